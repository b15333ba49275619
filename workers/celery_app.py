"""The worker's Celery application, and the boot step that fills its slots.

`python -m workers` starts it; `celery --app workers.celery_app worker --concurrency N` does the
same for those who manage Celery themselves.
"""

import logging
import threading
from typing import Any

from celery import bootsteps, signals

from service.kit.artifacts import ArtifactStore
from service.kit.broker import create_celery
from service.settings import Settings
from service.store.database import create_engine, session_factory
from workers import tasks
from workers.slots import Slots
from workers.supervisor import PIPELINE, Supervisor
from workers.sweep import sweep, sweep_folders

settings = Settings.load()
app = create_celery(settings, "tunegate-worker")
# How a training process is started; whoever embeds the worker may set another before it starts.
command = PIPELINE


@signals.setup_logging.connect  # type: ignore[untyped-decorator]
def configure_logging(**_: Any) -> None:
    """One plain format; Celery's own would print task arguments and the broker's URL."""
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for name in ("celery", "kombu"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class SlotsStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Starts after the pool and stops before it, so that a warm shutdown first lets the running
    attempts write their checkpoints."""

    requires = frozenset({"celery.worker.components:Pool"})

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._slots: Slots | None = None
        self._stopping = threading.Event()

    def start(self, parent: Any) -> None:
        factory = session_factory(create_engine(settings, small_pool=True))
        sweep(settings, factory)
        supervisor = Supervisor(
            settings,
            factory,
            ArtifactStore.from_url(settings.artifacts),
            command=command,
            stopping=self._stopping,
        )
        self._slots = Slots(
            supervisor,
            factory,
            parent.concurrency,
            tasks.wake,
            self._stopping,
            tidy=lambda: sweep_folders(settings, factory),
        )
        self._slots.start()

    def close(self, parent: Any) -> None:
        """First word of a shutdown: nothing new, and everybody write a checkpoint."""
        self._stopping.set()

    def stop(self, parent: Any) -> None:
        if self._slots is not None:
            self._slots.stop()

    def terminate(self, parent: Any) -> None:
        """A cold shutdown waits for nobody: the children die with this process."""
        self._stopping.set()


app.steps["worker"].add(SlotsStep)
