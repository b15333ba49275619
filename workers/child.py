"""The training process as the supervisor sees it: a process group, a pipe of events, a log tail."""

import json
import os
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

EVENT_BYTES = 4 * 1024 * 1024
TAIL_BYTES = 16 * 1024
QUEUED_EVENTS = 10_000

Message = dict[str, Any]

# All that a training process needs of its surroundings. Everything else stays outside, since a name
# does not tell whether its value is a secret.
_ALLOWED = frozenset(
    {"PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
    | {"REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
)
# HF_ lets HF_TOKEN in: gated base models need it, and this process is the one that downloads them.
_ALLOWED_PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "SSL_CERT_", "MALLOC_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_"),
)
_URL_WITH_CREDENTIALS = re.compile(r"(://|^[^/@\s:]*:)[^/@\s]+@")


def child_environment(
    base: Mapping[str, str], parent_pid: int, threads: int | None
) -> dict[str, str]:
    """The environment of a training process: what it needs of `base`, and no URL with credentials.

    The process learns its parent's pid, so that it can end itself when that parent is gone.
    """
    environment = {
        name: value
        for name, value in base.items()
        if (name.upper() in _ALLOWED or name.startswith(_ALLOWED_PREFIXES))
        and not _URL_WITH_CREDENTIALS.search(value)
    }
    environment["TUNEGATE_PARENT_PID"] = str(parent_pid)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def process_start(pid: int) -> float | None:
    """When a process started, in seconds since boot; None when there is no such process.

    Together with the pid this names a process for good, which the pid alone does not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may itself contain spaces.
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


class Child:
    """One running training process, leader of its own session and process group.

    Must be started by a thread that outlives it: the parent-death signal fires when the thread
    that forked ends.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.started = process_start(self.pid)
        self._events: queue.Queue[Message] = queue.Queue(QUEUED_EVENTS)
        self._tail = bytearray()
        self._tail_lock = threading.Lock()
        self._closing = threading.Event()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_events, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_log, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_events(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(EVENT_BYTES):
                event = parse_event(line)
                if event is None:
                    self._remember(line)
                    continue
                while not self._closing.is_set():
                    with suppress(queue.Full):
                        self._events.put(event, timeout=0.5)
                        break

    def _read_log(self, stream: IO[bytes]) -> None:
        with stream:
            while chunk := os.read(stream.fileno(), 65_536):
                self._remember(chunk)

    def _remember(self, chunk: bytes) -> None:
        with self._tail_lock:
            self._tail += chunk
            del self._tail[:-TAIL_BYTES]

    def log_tail(self) -> str:
        """The last of what the process wrote that was not an event."""
        with self._tail_lock:
            return self._tail.decode("utf-8", errors="replace").replace(
                "\0", "\N{REPLACEMENT CHARACTER}"
            )

    def take(self, wait_seconds: float) -> list[Message]:
        """Events that have arrived, waiting for the first one at most so long."""
        events: list[Message] = []
        with suppress(queue.Empty):
            events.append(
                self._events.get(timeout=wait_seconds)
                if wait_seconds
                else self._events.get_nowait()
            )
            while len(events) < QUEUED_EVENTS:
                events.append(self._events.get_nowait())
        return events

    def exited(self) -> bool:
        """Whether the process has ended. It stays a zombie, so its group's number is not reused."""
        if self._process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def terminate(self) -> None:
        """Ask the process to write a checkpoint and leave (SIGTERM to the leader only: its own
        ranks are its business)."""
        if not self.exited():
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group now."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> int:
        """End what is left of the group and collect it; returns the leader's exit code (negative:
        the signal). Events that arrived before can still be taken."""
        self.kill()
        code = self._process.wait()
        # With the group gone the pipes are closed, so both readers come to their end; one that
        # waits for room in the queue is let go by the timeout.
        for reader in self._readers:
            reader.join(timeout=5)
        self._closing.set()
        return code


def parse_event(line: bytes) -> Message | None:
    """The event in a line, or None for anything else. NaN and infinities become null, since
    neither JSON nor every database knows them."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        event = json.loads(line, parse_constant=lambda _: None)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    return event
