"""`python -m workers [--slots N] [--once]`: run attempts until told to stop."""

import argparse
import logging
import os
import signal
import sys
import threading
import time

# One pod or batch job per attempt may start a moment before the row can be seen.
ONCE_SECONDS = 10.0


def main() -> int:
    """Exit code 0 after a clean stop, or after one attempt (or none to be had) with --once."""
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("--slots", type=int, default=1, help="attempts at once (default 1)")
    parser.add_argument("--once", action="store_true", help="run one attempt and exit")
    options = parser.parse_args()
    if options.slots < 1:
        parser.error("--slots must be at least 1")
    return _once() if options.once else _serve(options.slots)


def _serve(slots: int) -> int:
    from workers.celery_app import app, settings

    worker = app.Worker(
        hostname=f"tunegate-{os.getpid()}@%h",
        concurrency=slots,
        pool="threads",
        loglevel=settings.log_level,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )
    worker.start()
    return int(worker.exitcode or 0)


def _once() -> int:
    from service.kit.artifacts import ArtifactStore
    from service.settings import Settings
    from service.store.database import create_engine, session_factory
    from workers.slots import Slots
    from workers.supervisor import Supervisor
    from workers.sweep import sweep

    settings = Settings.load()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(message)s")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    factory = session_factory(create_engine(settings, small_pool=True))
    sweep(settings, factory)
    artifacts = ArtifactStore.from_url(settings.artifacts)
    supervisor = Supervisor(settings, factory, artifacts, stopping=stopping)
    table = Slots(supervisor, factory, 1, threading.Event(), stopping)
    deadline = time.monotonic() + ONCE_SECONDS
    while not stopping.is_set():
        if any(supervisor.run(job_id, number) for job_id, number in table.waiting()):
            return 0
        if time.monotonic() > deadline:
            break
        stopping.wait(0.5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
