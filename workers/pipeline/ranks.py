"""Starting the processes that share a job's tuning, where torchrun has not done it already."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.pipeline.emit import Emit
from workers.pipeline.failure import PipelineFailure

PARENT_VARIABLE = "TUNEGATE_PARENT_PID"
RENDEZVOUS_VARIABLE = "TUNEGATE_RENDEZVOUS"
POLL_SECONDS = 0.5
TOLD_SECONDS = 600.0
EXIT_DONE, EXIT_FAILED, EXIT_STOPPED = 0, 10, 15


def rank() -> int:
    """This process's number in its group, 0 for the one that speaks."""
    return int(os.environ.get("RANK", "0"))


def grouped() -> bool:
    """Whether torchrun, or start_ranks in another process, has put this process into a group."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def other_ranks(count: int, lost: Callable[[], None]) -> Iterator[None]:
    """Run the same command in count - 1 more processes while the block runs.

    They die with this one. `lost()` is called from a thread when one of them ends badly: the
    others wait for it in their next exchange, so this process has to end too.
    """
    if count == 1 or grouped():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tunegate-ranks-") as folder:
        shared = {
            "WORLD_SIZE": str(count),
            RENDEZVOUS_VARIABLE: f"file://{Path(folder) / 'rendezvous'}",
        }
        os.environ |= shared | {"RANK": "0", "LOCAL_RANK": "0"}
        others = [_start(number) for number in range(1, count)]
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(others, done, lost), daemon=True)
        watcher.start()
        try:
            yield
            for other in others:
                other.wait()
        finally:
            done.set()
            watcher.join()
            for other in others:
                other.kill()
                other.wait()
            for name in (*shared, "RANK", "LOCAL_RANK"):
                os.environ.pop(name, None)


def _start(number: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        PARENT_VARIABLE: str(os.getpid()),
    }
    command = [sys.executable, "-m", "workers.pipeline", *sys.argv[1:]]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def _watch(
    others: list[subprocess.Popen[bytes]], done: threading.Event, lost: Callable[[], None]
) -> None:
    while not done.is_set():
        codes = {other.poll() for other in others} - {None, 0}
        if codes:
            # The same end, with its reason, may be on its way out of this process: let it speak.
            told = codes <= {EXIT_FAILED, EXIT_STOPPED}
            if not done.wait(TOLD_SECONDS if told else 10 * POLL_SECONDS):
                lost()
            return
        time.sleep(POLL_SECONDS)


def lost_rank(emit: Emit, exit_code: int) -> Callable[[], None]:
    """What to do about a process that is gone: say so and leave at once."""

    def leave() -> None:
        failure = PipelineFailure(
            "internal_error",
            "One of the processes that share the tuning ended unexpectedly; the worker's log holds "
            "the details.",
            retryable=True,
        )
        emit("failure", code=failure.code, message=failure.message, param=None, retryable=True,
             details=[])  # fmt: skip
        os._exit(exit_code)

    return leave
