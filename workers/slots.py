"""Slots: how many attempts this worker runs at once, and the look at the table that fills them.

Messages only wake the look: whatever a broker loses, delays or repeats, the table is asked every
few seconds anyway, and it decides.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from service.fine_tuning.attempts import claimable
from service.store.database import SessionFactory, transaction
from workers.supervisor import Supervisor

logger = logging.getLogger("tunegate.worker")

LOOK_SECONDS = 3.0
TIDY_SECONDS = 600.0


class Slots:
    """Runs attempts in threads of their own, at most `count` at a time; calls `tidy` now and then.

    Each thread stays with its training process to the end: the process's parent-death signal is
    bound to the thread that started it.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        factory: SessionFactory,
        count: int,
        wake: threading.Event,
        stopping: threading.Event,
        look_seconds: float = LOOK_SECONDS,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._factory = factory
        self._free = threading.Semaphore(count)
        self._wake = wake
        self._stopping = stopping
        self._look_seconds = look_seconds
        self._tidy = tidy
        self._tidied_at = time.monotonic()
        self._looker = threading.Thread(target=self._look_repeatedly, name="look", daemon=True)
        self._running: set[threading.Thread] = set()

    def start(self) -> None:
        """Begin to look for work."""
        self._looker.start()

    def stop(self) -> None:
        """Take nothing new, let running attempts write a checkpoint and go back to the queue."""
        self._stopping.set()
        self._wake.set()
        if self._looker.is_alive():
            self._looker.join()
        for thread in list(self._running):
            thread.join()

    def _look_repeatedly(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                self._fill()
                self._tidy_now_and_then()
            except Exception as error:
                logger.warning("looking for work failed (%s)", type(error).__name__)
            self._wake.wait(self._look_seconds)

    def _tidy_now_and_then(self) -> None:
        if self._tidy is not None and time.monotonic() - self._tidied_at >= TIDY_SECONDS:
            self._tidied_at = time.monotonic()
            self._tidy()

    def _fill(self) -> None:
        """Start waiting attempts while there are free slots."""
        for job_id, number in self.waiting():
            if self._stopping.is_set() or not self._free.acquire(blocking=False):
                return
            thread = threading.Thread(
                target=self._occupy, args=(job_id, number), name=f"attempt {job_id}", daemon=True
            )
            self._running.add(thread)
            thread.start()

    def waiting(self) -> Sequence[tuple[str, int]]:
        """Attempts that may be claimed now, oldest first."""
        with transaction(self._factory, read_only=True) as session:
            return claimable(session)

    def _occupy(self, job_id: str, number: int) -> None:
        ran = False
        try:
            ran = self._supervisor.run(job_id, number)
        except Exception:
            logger.exception("job %s: attempt %d was dropped", job_id, number)
        finally:
            self._running.discard(threading.current_thread())
            self._free.release()
        if ran:
            # The next attempt need not wait for the next look. An attempt that was not to be had
            # must: looking again at once would spin.
            self._wake.set()
