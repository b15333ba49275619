"""The heartbeat of one attempt, in a thread of its own: long uploads must not cost the lease."""

import logging
import threading
from types import TracebackType
from typing import Self

from sqlalchemy.exc import InterfaceError, OperationalError, TimeoutError

from service.fine_tuning.attempts import Control, Fenced, Lease, heartbeat
from service.store.database import SessionFactory, transaction

logger = logging.getLogger("tunegate.worker")

# What a database that is away or busy raises. The attempt goes on and tries again later: nobody
# can take its lease through the same database in the meantime.
DATABASE_AWAY = (OperationalError, InterfaceError, TimeoutError)


class Pulse:
    """Renews a lease every `every_seconds` while the block runs, and reads what the owner wants."""

    def __init__(
        self, factory: SessionFactory, lease: Lease, lease_seconds: float, every_seconds: float
    ) -> None:
        self._factory = factory
        self._lease = lease
        self._lease_seconds = lease_seconds
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self.control = Control(cancel=False, pause=False)
        self.fenced = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with transaction(self._factory) as session:
                    self.control = heartbeat(session, self._lease, self._lease_seconds)
            except Fenced:
                self.fenced.set()
                return
            except Exception as error:
                # Whatever it was: without this thread a healthy attempt would lose its lease.
                logger.warning(
                    "job %s: no heartbeat (%s)", self._lease.job_id, type(error).__name__
                )
            self._stop.wait(self._every_seconds)
