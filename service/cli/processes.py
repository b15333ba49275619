"""Child processes of `tunegate up`: each dies with its parent, a crashed one is started again."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from service.cli.output import note

PR_SET_PDEATHSIG = 1
STEADY_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 30.0
LOG_BYTES = 10 * 1024 * 1024
TAIL_BYTES = 2_000


def dies_with_parent() -> Callable[[], None] | None:
    """What a child runs before its program starts: SIGTERM when the parent is gone (Linux).

    Only for processes started by the main thread of a program without other threads: the signal
    is bound to the thread that forks, and code between fork and exec must not meet a lock.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def before_exec() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


class Kept:
    """One program that should always be running."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None,
    ) -> None:
        self.name = name
        self.crashes = 0
        self._command = list(command)
        self._environment = dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._again_at = 0.0

    def start(self) -> None:
        """Start the program in a session of its own, so that Ctrl-C reaches only the parent."""
        self._started = time.monotonic()
        if self._log is None:
            self._process = self._open(sys.stderr.fileno())
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            if self._log.stat().st_size > LOG_BYTES:
                self._log.replace(self._log.with_suffix(".log.1"))
        with self._log.open("ab") as sink:
            self._process = self._open(sink.fileno())

    def _open(self, output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )

    def keep(self) -> None:
        """Start the program again when it has ended, with growing pauses."""
        if self._process is None:
            if time.monotonic() >= self._again_at:
                self.start()
            return
        code = self._process.poll()
        if code is None:
            return
        self._process = None
        steady = time.monotonic() - self._started > STEADY_SECONDS
        self.crashes = 1 if steady else self.crashes + 1
        pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** (self.crashes - 1))
        self._again_at = time.monotonic() + pause
        where = f" (log: {self._log})" if self._log else ""
        note(f"{self.name} ended with exit code {code}, again in {pause:.0f} s{where}")

    def log_tail(self) -> str:
        """The end of the log, for an error message."""
        if self._log is None:
            return ""
        with suppress(OSError), self._log.open("rb") as source:
            source.seek(max(0, self._log.stat().st_size - TAIL_BYTES))
            return source.read().decode("utf-8", errors="replace").strip()
        return ""

    def terminate(self) -> None:
        """Ask it to stop."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def wait(self, deadline: float) -> None:
        """Wait for its end until `deadline` (monotonic), then kill it."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
