"""A job's events as server-sent events, until the job has ended."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from service.fine_tuning.lifecycle import TERMINAL
from service.fine_tuning.repository import JobRepository
from service.fine_tuning.schemas import EventObject
from service.kit.errors import ApiError
from service.kit.gateway import Gateway
from service.kit.handlers import database_away
from service.store.models import Event, Job

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 15.0
BATCH = 200

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class _Batch(NamedTuple):
    """Some events in order, the cursor behind them, and whether there will be no more."""

    events: list[EventObject]
    cursor: int
    ended: bool


def start_of(gateway: Gateway, job_id: str, after: str | None) -> int:
    """The cursor behind event `after`; 0: from the beginning. Raises ApiError `invalid_cursor`."""
    if after is None:
        return 0
    with gateway.reading() as session:
        statement = JobRepository(session, None).events(job_id).where(Event.id == after)
        event = session.scalar(statement)
    if event is None:
        raise ApiError(
            400, "No event of this job has the id to go on after.", "invalid_cursor", "after"
        )
    return event.sequence


def _read(gateway: Gateway, job_id: str, cursor: int) -> _Batch:
    """The next events, in one short transaction: a long one would keep the WAL growing."""
    with gateway.reading() as session:
        status = session.scalar(select(Job.status).where(Job.id == job_id))
        rows = session.scalars(
            JobRepository(session, None)
            .events(job_id)
            .where(Event.sequence > cursor)
            .order_by(Event.sequence)
            .limit(BATCH)
        ).all()
    return _Batch(
        [EventObject.of(row) for row in rows],
        rows[-1].sequence if rows else cursor,
        len(rows) < BATCH and (status is None or status in TERMINAL),
    )


async def stream(gateway: Gateway, job_id: str, cursor: int) -> AsyncIterator[bytes]:
    """Events behind `cursor`, oldest first, as they are written; then `data: [DONE]`, or
    `data: {"error": ...}` when the database fails.

    Nothing is kept for a reader but the cursor, so a slow one holds nobody up.
    """
    last_sent = time.monotonic()
    while True:
        try:
            batch = await run_in_threadpool(_read, gateway, job_id, cursor)
        except SQLAlchemyError as error:
            logger.error("events of job %s: %s", job_id, type(error).__name__, exc_info=error)
            yield format_sse_event(data_str=json.dumps(database_away().body()))
            return
        cursor = batch.cursor
        for event in batch.events:
            yield format_sse_event(data_str=event.model_dump_json(), id=event.id)
            last_sent = time.monotonic()
        if batch.ended:
            yield format_sse_event(data_str="[DONE]")
            return
        if time.monotonic() - last_sent >= KEEP_ALIVE_SECONDS:
            yield KEEPALIVE_COMMENT
            last_sent = time.monotonic()
        if len(batch.events) < BATCH:
            await asyncio.sleep(POLL_SECONDS)
