"""`tunegate up`: the whole service on this machine; `serve` and `worker`: its parts."""

import fcntl
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.output import JSON_HELP, UNAVAILABLE, USAGE, CommandError, answer, note
from service.cli.processes import Kept
from service.cli.store import load_settings, open_session, upgrade_database

if TYPE_CHECKING:
    from service.settings import Settings

AsJson = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
Host = Annotated[str | None, typer.Option(help="address (TUNEGATE_HOST)")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="0: a free one (TUNEGATE_PORT)")]
Slots = Annotated[int, typer.Option(min=1, help="jobs at once")]

FIRST_ORGANIZATION = "default"
READY_SECONDS = 60.0
STOP_SECONDS = 40.0
EARLY_CRASHES = 3


def up(
    data_dir: Annotated[Path | None, typer.Option(help="data folder (TUNEGATE_DATA_DIR)")] = None,
    host: Host = None,
    port: Port = None,
    slots: Slots = 1,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="logs on stderr")] = False,
    as_json: AsJson = False,
) -> None:
    """Start gateway, worker and dispatcher, and keep them running until Ctrl-C.

    The first start makes the database and an admin key, which is shown once. With --json one line
    {"url", "key" (first start only)} is printed when the service is ready.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    settings = _settings(data_dir, host, port)
    with _only_one(settings):
        address = free_port(settings.host) if settings.port == 0 else settings.port
        _check_free(settings.host, address)
        upgrade_database(settings)
        url = f"http://{_reachable(settings.host)}:{address}"
        programs = _programs(settings, address, slots, verbose)
        try:
            for program in programs:
                program.start()
            if not _wait_ready(url, programs, stop):
                return
            # Made last: a key whose start then fails would never be shown.
            _announce(as_json, url, _first_key(settings))
            while not stop.wait(0.5):
                for program in programs:
                    program.keep()
        finally:
            note("stopping")
            _stop(programs)


def serve(
    host: Host = None,
    port: Port = None,
    with_dispatcher: Annotated[
        bool, typer.Option("--with-dispatcher", help="also send wake-ups and reap lost attempts")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the gateway alone, in this process. The database must be at the newest migration."""
    settings = _settings(None, host, port)
    address = free_port(settings.host) if settings.port == 0 else settings.port
    _check_free(settings.host, address)

    import uvicorn

    from evaluators.gate import PolicyError
    from jobspec.catalogue import CatalogueError
    from service.app import create_app

    try:
        gateway = create_app(settings)
    except (CatalogueError, PolicyError, OSError) as error:
        words = " ".join(str(error).split())
        raise CommandError(f"the gateway cannot start: {words}", USAGE) from None
    url = f"http://{_reachable(settings.host)}:{address}"
    answer(as_json, {"url": url}, f"gateway: {url}")
    stop = threading.Event()
    if with_dispatcher:
        from service.queue import start
        from service.store.database import create_engine, session_factory

        start(settings, session_factory(create_engine(settings, small_pool=True)), stop)
    try:
        uvicorn.run(
            gateway,
            host=settings.host,
            port=address,
            log_level=settings.log_level.lower(),
            access_log=False,
            timeout_graceful_shutdown=5,
        )
    finally:
        stop.set()


def worker(
    slots: Slots = 1,
    once: Annotated[bool, typer.Option("--once", help="run one attempt, then exit")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a worker in this process. SIGTERM lets its jobs write a checkpoint and go back."""
    load_settings()
    arguments = ["-m", "workers", "--slots", str(slots), *(["--once"] if once else [])]
    if as_json:
        answer(True, {"pid": os.getpid(), "slots": slots, "once": once}, "")
    os.execv(sys.executable, [sys.executable, *arguments])


def _settings(data_dir: Path | None, host: str | None, port: int | None) -> "Settings":
    """Options win over the environment, and reach the child processes through it."""
    for name, value in (("DATA_DIR", data_dir), ("HOST", host), ("PORT", port)):
        if value is not None:
            os.environ[f"TUNEGATE_{name}"] = str(value)
    settings = load_settings()
    os.environ["TUNEGATE_DATA_DIR"] = str(settings.data_dir)
    return settings


@contextmanager
def _only_one(settings: "Settings") -> Iterator[None]:
    """Hold the data folder, so that it is not served twice."""
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        handle = (settings.data_dir / "up.lock").open("w")
    except OSError as error:
        raise CommandError(f"{settings.data_dir}: {error.strerror}", USAGE) from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"{settings.data_dir} is already served by another `tunegate up`", USAGE
            ) from None
        yield


def _first_key(settings: "Settings") -> str | None:
    """An admin key when there is none at all."""
    from service.organizations.service import create_key, list_keys

    with open_session(settings) as session:
        if list_keys(session):
            return None
        return create_key(session, settings, FIRST_ORGANIZATION, "admin")["key"]


def free_port(host: str) -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_free(host: str, port: int) -> None:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommandError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port",
                USAGE,
            ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _reachable(host: str) -> str:
    local = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}
    return local.get(host, f"[{host}]" if ":" in host else host)


def _programs(settings: "Settings", port: int, slots: int, verbose: bool) -> list[Kept]:
    python = sys.executable
    gateway = [python, "-m", "uvicorn", "service.app:create_app", "--factory"]
    gateway += ["--host", settings.host, "--port", str(port), "--no-access-log"]
    gateway += ["--timeout-graceful-shutdown", "5", "--log-level", settings.log_level.lower()]
    commands = {
        "gateway": gateway,
        "worker": [python, "-m", "workers", "--slots", str(slots)],
        "dispatcher": [python, "-m", "service.queue"],
    }
    logs = settings.data_dir / "logs"
    return [
        Kept(name, command, os.environ, None if verbose else logs / f"{name}.log")
        for name, command in commands.items()
    ]


def _wait_ready(url: str, programs: list[Kept], stop: threading.Event) -> bool:
    """True when /readyz answers 200; False when told to stop. Raises CommandError."""
    deadline = time.monotonic() + READY_SECONDS
    while not stop.wait(0.1):
        if is_ready(url):
            return True
        for program in programs:
            program.keep()
            if program.crashes >= EARLY_CRASHES:
                raise CommandError(
                    f"{program.name} does not start:\n{program.log_tail()}", UNAVAILABLE
                )
        if time.monotonic() > deadline:
            raise CommandError(
                f"the gateway was not ready after {READY_SECONDS:.0f} s", UNAVAILABLE
            )
    return False


def is_ready(url: str) -> bool:
    """Whether the gateway at `url` can serve requests."""
    # A proxy of the environment must not be asked for an address of this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/readyz", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _announce(as_json: bool, url: str, key: str | None) -> None:
    data: dict[str, Any] = {"url": url} | ({"key": key} if key else {})
    words = f"tunegate is ready: {url}"
    if key:
        words += f"\nadmin key (shown once): {key}"
    answer(as_json, data, words)


def _stop(programs: list[Kept]) -> None:
    for program in programs:
        program.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for program in programs:
        program.wait(deadline)
