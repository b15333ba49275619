"""A job's log: pages, and the stream of server-sent events."""

import asyncio
import json
import threading
from typing import Any

import httpx2
import openai
import pytest
from sqlalchemy.exc import OperationalError

from service.fine_tuning import attempts, events_stream
from service.fine_tuning.lifecycle import FAILED, QUEUED, RUNNING, move
from service.fine_tuning.repository import (
    JobRepository,
    add_checkpoint,
    append_event,
    upsert_metrics,
)


def log(tenant: Any, job_id: str, *messages: str) -> None:
    with tenant.transaction() as session:
        for message in messages:
            append_event(session, job_id, "info", message)


def end(tenant: Any, job_id: str) -> None:
    with tenant.transaction() as session:
        append_event(session, job_id, "error", "the end")
        move(JobRepository(session, None).get(job_id), FAILED)


def read_stream(tenant: Any, job_id: str, **request: Any) -> list[tuple[str | None, str]]:
    """(id, data) of every event until the stream ends."""
    found: list[tuple[str | None, str]] = []
    with tenant.http.stream(
        "GET", f"/v1/fine_tuning/jobs/{job_id}/events?stream=true", timeout=30, **request
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        event_id, data = None, None
        for line in answer.iter_lines():
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                data = line[6:]
            elif not line and data is not None:
                found.append((event_id, data))
                event_id, data = None, None
    return found


def test_events_come_newest_first_and_page_within_one_second(tenant: Any) -> None:
    job_id = tenant.job()
    log(tenant, job_id, *(f"event {index}" for index in range(5)))
    page = tenant.client.fine_tuning.jobs.list_events(job_id, limit=2)
    assert page.has_more
    messages = [event.message for event in page]
    assert messages[:5] == [f"event {index}" for index in (4, 3, 2, 1, 0)]
    assert len(messages) == 6


def test_event_ids_sort_in_the_order_of_the_log(tenant: Any) -> None:
    job_id = tenant.job()
    log(tenant, job_id, *("x" for _ in range(20)))
    ids = [event.id for event in tenant.client.fine_tuning.jobs.list_events(job_id, limit=100)]
    assert ids == sorted(ids, reverse=True)
    assert len(set(ids)) == 21


def test_an_event_of_another_job_is_no_cursor(tenant: Any) -> None:
    first, second = tenant.job(), tenant.job()
    events = tenant.client.fine_tuning.jobs.list_events
    with pytest.raises(openai.BadRequestError) as caught:
        events(first, after=events(second).data[0].id)
    assert caught.value.code == "invalid_cursor"


def test_metrics_events_carry_their_numbers(tenant: Any) -> None:
    job_id = tenant.job()
    data = {"step": 1, "total_steps": 9, "train_loss": 2.5}
    with tenant.transaction() as session:
        append_event(session, job_id, "info", "Step 1/9", type="metrics", data=data)
    event = tenant.client.fine_tuning.jobs.list_events(job_id).data[0]
    assert (event.type, event.data) == ("metrics", data)


def test_the_stream_of_a_finished_job_gives_its_whole_log_and_ends(tenant: Any) -> None:
    job_id = tenant.job()
    log(tenant, job_id, *(f"event {index}" for index in range(250)))
    end(tenant, job_id)
    found = read_stream(tenant, job_id)
    assert found[-1] == (None, "[DONE]")
    events = [json.loads(data) for _, data in found[:-1]]
    assert [event["message"] for event in events[1:-1]] == [f"event {i}" for i in range(250)]
    assert [event["id"] for event in events] == [event_id for event_id, _ in found[:-1]]
    listed = tenant.client.fine_tuning.jobs.list_events(job_id, limit=1).data[0]
    assert events[-1] == listed.model_dump()


def test_the_stream_gives_events_as_they_are_written(tenant: Any) -> None:
    job_id = tenant.job()
    found: list[tuple[str | None, str]] = []
    reader = threading.Thread(target=lambda: found.extend(read_stream(tenant, job_id)))
    reader.start()
    with tenant.http.stream("GET", f"/v1/fine_tuning/jobs/{job_id}/events?stream=1") as answer:
        lines = answer.iter_lines()
        assert "Created fine-tuning job" in next(lines)
        log(tenant, job_id, "later")
        assert any("later" in line for line in lines if line.startswith("data"))
    end(tenant, job_id)
    reader.join(timeout=30)
    messages = [json.loads(data)["message"] for _, data in found[:-1]]
    assert messages[1:] == ["later", "the end"]


def test_a_silent_stream_is_kept_alive(tenant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_stream, "KEEP_ALIVE_SECONDS", 0.1)
    url = f"/v1/fine_tuning/jobs/{tenant.job()}/events?stream=true"
    with tenant.http.stream("GET", url, timeout=30) as answer:
        assert any(line == ": ping" for line in answer.iter_lines())


@pytest.mark.parametrize("way", ["header", "query"])
def test_a_stream_resumes_after_the_last_event_seen(tenant: Any, way: str) -> None:
    job_id = tenant.job()
    log(tenant, job_id, "one", "two", "three")
    end(tenant, job_id)
    seen = next(event_id for event_id, data in read_stream(tenant, job_id) if '"one"' in data)
    request: dict[str, Any] = (
        {"headers": {"last-event-id": seen}} if way == "header" else {"params": {"after": seen}}
    )
    if way == "query":
        request["params"]["stream"] = "true"
    rest = [data for _, data in read_stream(tenant, job_id, **request)]
    assert [json.loads(data)["message"] for data in rest[:-1]] == ["two", "three", "the end"]


def test_a_stream_cannot_resume_after_an_unknown_event(tenant: Any) -> None:
    answer = tenant.http.get(
        f"/v1/fine_tuning/jobs/{tenant.job()}/events?stream=true",
        headers={"last-event-id": "ftevent-none"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")


def test_the_stream_of_another_organisations_job_is_a_404(tenant: Any, stranger: Any) -> None:
    answer = stranger.http.get(f"/v1/fine_tuning/jobs/{tenant.job()}/events?stream=true")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")


def test_sixty_open_streams_leave_room_for_other_requests(tenant: Any) -> None:
    # More streams than the gateway has threads: each may hold one only while it looks.
    job_id = tenant.job()
    url = f"{tenant.installation.url}/v1/fine_tuning/jobs/{job_id}/events?stream=true"
    headers = {"authorization": f"Bearer {tenant.key}"}

    async def crowd() -> int:
        limits = httpx2.Limits(max_connections=100)
        async with httpx2.AsyncClient(headers=headers, timeout=60, limits=limits) as client:

            async def read() -> str:
                async with client.stream("GET", url) as answer:
                    return (await answer.aread()).decode()

            readers = [asyncio.create_task(read()) for _ in range(60)]
            await asyncio.sleep(1)
            await asyncio.to_thread(end, tenant, job_id)
            texts = await asyncio.gather(*readers)
        return sum("the end" in text and text.endswith("data: [DONE]\n\n") for text in texts)

    assert asyncio.run(crowd()) == 60


def test_checkpoints_come_newest_first_with_known_measures(tenant: Any) -> None:
    job_id = tenant.job()
    with tenant.transaction() as session:
        for step in (10, 20, 30):
            add_checkpoint(
                session,
                job_id,
                name=f"ft:m:o::x{step}{job_id[-4:]}:ckpt-step-{step}",
                step_number=step,
                metrics={"train_loss": 1.0 / step, "gradient_norm": 3.0},
                location=f"checkpoints/{job_id}/{step}",
            )
    page = tenant.client.fine_tuning.jobs.checkpoints.list(job_id, limit=2)
    assert [item.step_number for item in page.data] == [30, 20]
    assert (page.has_more, page.model_extra["first_id"]) == (True, page.data[0].id)
    assert [item.step_number for item in page] == [30, 20, 10]
    assert page.data[0].metrics.step == 30
    assert page.data[0].metrics.train_loss == pytest.approx(1 / 30)
    assert page.data[0].fine_tuned_model_checkpoint.endswith("ckpt-step-30")


def test_no_checkpoints_are_an_empty_list(tenant: Any) -> None:
    page = tenant.client.fine_tuning.jobs.checkpoints.list(tenant.job())
    assert (page.data, page.has_more) == ([], False)


def test_a_repeated_step_overwrites_its_metrics_and_keeps_its_checkpoint(tenant: Any) -> None:
    job_id = tenant.job()
    with tenant.transaction() as session:
        upsert_metrics(session, job_id, [{"step": 1, "train_loss": 3.0}, {"step": 2}])
        upsert_metrics(session, job_id, [{"step": 2, "train_loss": 1.0}, {"step": 3}])
        upsert_metrics(session, job_id, [])
        rows = JobRepository(session, None).metrics(job_id)
        assert [(row.step, row.data.get("train_loss")) for row in rows] == [
            (1, 3.0),
            (2, 1.0),
            (3, None),
        ]
        made = [
            add_checkpoint(
                session, job_id, name=f"n{job_id}", step_number=1, metrics={}, location=place
            )
            for place in ("a", "b")
        ]
    assert made[0].id == made[1].id
    assert made[1].location == "b"


def test_a_running_job_estimates_its_end(tenant: Any) -> None:
    job_id = tenant.job()
    with tenant.transaction() as session:
        assert attempts.claim(session, job_id, 1, "w", 60.0)
        job = JobRepository(session, None).get(job_id)
        move(job, QUEUED)
        move(job, RUNNING)
        job.estimate = {"seconds": 100.0}
    job = tenant.client.fine_tuning.jobs.retrieve(job_id)
    assert job.estimated_finish == pytest.approx(job.created_at + 100, abs=20)


def test_a_stream_whose_database_fails_ends_with_an_error(
    tenant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = tenant.job()

    def fail(*_: Any) -> None:
        raise OperationalError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr(events_stream, "_read", fail)
    ((_, data),) = read_stream(tenant, job_id)
    assert json.loads(data)["error"]["code"] == "service_unavailable"
