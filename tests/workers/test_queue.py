"""Outbox to broker, lost workers to the next attempt."""

import logging
import threading
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import select, update

from service.fine_tuning import attempts
from service.kit.broker import QUEUE_NAME, celery_configuration, create_celery
from service.queue import Dispatcher, Pruner, Reaper, repeat
from service.settings import Settings
from service.store.models import Outbox


def waiting_messages(settings: Settings) -> list[list[Any]]:
    """What lies in the queue, taken out through kombu's own reader."""
    with create_celery(settings).connection_for_read() as connection:
        queue = connection.SimpleQueue(QUEUE_NAME)
        bodies = []
        with suppress(queue.Empty):
            while True:
                message = queue.get(timeout=1)
                bodies.append(message.decode()[0])
                message.ack()
        queue.close()
        return bodies


def unsent(workshop: Any) -> int:
    with workshop.transaction() as session:
        return len(list(session.scalars(select(Outbox.id).where(Outbox.sent_at.is_(None)))))


def test_a_new_job_becomes_one_message(workshop: Any) -> None:
    job_id = workshop.new_job()
    dispatcher = Dispatcher(workshop.factory, create_celery(workshop.settings))
    assert [dispatcher.run(), dispatcher.run()] == [1, 0]
    assert waiting_messages(workshop.settings) == [[job_id, 1]]


def test_half_a_message_is_dropped_and_the_next_one_read(workshop: Any) -> None:
    job_id = workshop.new_job()
    celery = create_celery(workshop.settings)
    folder = workshop.settings.broker_dir / "messages"
    for index, content in enumerate(["", '{"body": ']):
        (folder / f"{index}_x.{QUEUE_NAME}.msg").write_text(content)
    Dispatcher(workshop.factory, celery).run()
    assert waiting_messages(workshop.settings) == [[job_id, 1]]


def test_a_message_folder_that_is_gone_keeps_the_row(workshop: Any) -> None:
    workshop.new_job()
    celery = create_celery(workshop.settings)
    (workshop.settings.broker_dir / "messages").rmdir()
    with pytest.raises(OSError, match="No such file"):
        Dispatcher(workshop.factory, celery).run()
    assert unsent(workshop) == 1


def test_a_message_through_redis_reaches_the_queue(workshop: Any, redis_url: str) -> None:
    job_id = workshop.new_job()
    settings = workshop.settings.model_copy(update={"broker_url": redis_url})
    Dispatcher(workshop.factory, create_celery(settings)).run()
    assert [job_id, 1] in waiting_messages(settings)


def test_a_broker_that_is_away_keeps_the_rows(
    workshop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    workshop.new_job()
    away = workshop.settings.model_copy(update={"broker_url": "redis://:hidden-word@127.0.0.1:1/0"})
    stop = threading.Event()
    thread = threading.Thread(
        target=repeat, args=(Dispatcher(workshop.factory, create_celery(away)), 0.05, stop)
    )
    with caplog.at_level(logging.WARNING):
        thread.start()
        stop.wait(1.5)
        stop.set()
        thread.join()
    assert unsent(workshop) == 1
    assert "Dispatcher failed" in caplog.text
    assert "hidden-word" not in caplog.text


def test_an_expired_lease_becomes_the_next_attempt(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    with any_workshop.transaction() as session:
        attempts.claim(session, job_id, 1, "w1", 3.0)
    any_workshop.change(job_id, status="running", stage="tuning")
    reaper = Reaper(any_workshop.factory, 3)
    assert reaper.run() == 0
    any_workshop.change_attempt(job_id, 1, lease_expires_at=1.0)
    assert [reaper.run(), reaper.run()] == [1, 0]
    assert [(row.number, row.state) for row in any_workshop.attempts(job_id)] == [
        (1, "lost"),
        (2, "queued"),
    ]
    assert any_workshop.job(job_id).status == "queued"


def test_a_job_whose_worker_is_lost_again_and_again_fails(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    for number in (1, 2, 3):
        any_workshop.change_attempt(job_id, number, available_at=1.0)
        with any_workshop.transaction() as session:
            assert attempts.claim(session, job_id, number, f"w{number}", 3.0)
        any_workshop.change_attempt(job_id, number, lease_expires_at=1.0)
        Reaper(any_workshop.factory, 3).run()
    job = any_workshop.job(job_id)
    assert job.status == "failed"
    assert job.error["code"] == "worker_lost"


def test_old_sent_wake_ups_are_forgotten_and_new_ones_kept(workshop: Any) -> None:
    workshop.new_job()
    job_id = workshop.new_job()
    with workshop.transaction() as session:
        session.execute(update(Outbox).where(Outbox.job_id != job_id).values(sent_at=1.0))
    assert Pruner(workshop.factory, workshop.settings.artifacts).run() == 1
    assert unsent(workshop) == 1


def test_stored_checkpoints_of_finished_jobs_are_removed(workshop: Any) -> None:
    finished = workshop.new_job(status="cancelled", stage=None)
    paused = workshop.new_job(status="paused", stage=None)
    for job_id in (finished, paused):
        workshop.artifacts.put_stream(f"checkpoints/{job_id}/1/step-000001/state", [b"x"])
    pruner = Pruner(workshop.factory, workshop.settings.artifacts)
    assert [pruner.run(), pruner.run()] == [1, 0]
    assert workshop.artifacts.list("checkpoints") == [f"checkpoints/{paused}/1/step-000001/state"]


def test_the_configuration_promises_nothing_that_the_rows_do_not_keep(workshop: Any) -> None:
    local = celery_configuration(workshop.settings)
    assert local["task_acks_late"] is False
    assert local["result_backend"] is None
    assert local["accept_content"] == ["json"]
    folders = local["broker_transport_options"]
    assert folders["data_folder_in"] == folders["data_folder_out"]
    assert all(
        str(folders[name]).startswith(str(workshop.settings.broker_dir))
        for name in ("data_folder_in", "processed_folder", "control_folder")
    )
    redis = celery_configuration(
        workshop.settings.model_copy(update={"broker_url": "redis://localhost/0"})
    )
    assert redis["broker_transport_options"]["health_check_interval"] == 25
    assert redis["broker_transport_options"]["visibility_timeout"] > 86_400
