"""The one task: a wake-up."""

import logging
import threading

from celery import shared_task

from service.kit.broker import TASK_NAME

logger = logging.getLogger("tunegate.worker")

# Set by every message, waited for by the slots of this process.
wake = threading.Event()


@shared_task(name=TASK_NAME, ignore_result=True)  # type: ignore[untyped-decorator]
def run_attempt(job_id: str, attempt: int) -> None:
    """Look at the table now: this attempt was just queued. The row decides who runs it."""
    logger.debug("job %s: woken for attempt %d", job_id, attempt)
    wake.set()
