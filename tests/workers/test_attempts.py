"""Claims, heartbeats, fencing and the way back to the queue, on every database."""

import threading
from typing import Any

import pytest

from service.fine_tuning import attempts
from service.fine_tuning.attempts import Control, Fenced, JobError, Lease

LOST = JobError("worker_lost", "lost")


def claim(workshop: Any, job_id: str, worker: str = "w1", number: int = 1) -> bool:
    with workshop.transaction() as session:
        return attempts.claim(session, job_id, number, worker, 3.0)


def test_a_waiting_attempt_is_claimed_once(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    assert [claim(any_workshop, job_id, f"w{index}") for index in range(3)] == [True, False, False]


def test_of_many_workers_at_once_exactly_one_gets_the_claim(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    won: list[bool] = []
    barrier = threading.Barrier(8)

    def compete(name: str) -> None:
        barrier.wait()
        won.append(claim(any_workshop, job_id, name))

    threads = [threading.Thread(target=compete, args=(f"w{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]


@pytest.mark.parametrize(
    "columns",
    [
        {"status": "cancelled", "stage": None},
        {"status": "paused", "stage": None},
        {"status": "failed", "stage": None},
        {"cancel_requested": True},
        {"attempt": 2},
    ],
)
def test_a_job_that_does_not_wait_is_not_claimed(
    any_workshop: Any, columns: dict[str, Any]
) -> None:
    job_id = any_workshop.new_job()
    any_workshop.change(job_id, **columns)
    assert not claim(any_workshop, job_id)


def test_an_attempt_is_not_claimed_before_its_time(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    any_workshop.change_attempt(job_id, 1, available_at=4e9)
    assert not claim(any_workshop, job_id)


def test_a_heartbeat_reads_what_the_owner_wants(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    claim(any_workshop, job_id)
    any_workshop.change(job_id, cancel_requested=True)
    with any_workshop.transaction() as session:
        control = attempts.heartbeat(session, Lease(job_id, 1, "w1"), 3.0)
    assert control == Control(cancel=True, pause=False)


def test_another_workers_heartbeat_is_fenced(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    claim(any_workshop, job_id)
    with any_workshop.transaction() as session, pytest.raises(Fenced):
        attempts.heartbeat(session, Lease(job_id, 1, "w2"), 3.0)


def test_a_worker_whose_attempt_was_taken_away_can_write_nothing(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    claim(any_workshop, job_id)
    any_workshop.change_attempt(job_id, 1, lease_expires_at=1.0)
    with any_workshop.transaction() as session:
        assert attempts.lose(session, any_workshop.attempts(job_id)[0].id)
    lease = Lease(job_id, 1, "w1")
    with any_workshop.transaction() as session:
        for write in (
            lambda: attempts.own(session, lease, 3.0),
            lambda: attempts.finish(session, lease, "succeeded"),
            lambda: attempts.release(session, lease, "paused"),
            lambda: attempts.record_process(session, lease, 1, 1.0),
        ):
            with pytest.raises(Fenced):
                write()
    assert any_workshop.attempts(job_id)[0].state == "lost"


def test_a_lease_that_was_renewed_is_not_lost(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    claim(any_workshop, job_id)
    with any_workshop.transaction() as session:
        assert not attempts.lose(session, any_workshop.attempts(job_id)[0].id)
        assert attempts.expired(session) == []


def test_a_withdrawn_attempt_is_not_claimed(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    with any_workshop.transaction() as session:
        assert attempts.withdraw(session, job_id, 1, "cancelled")
    assert not claim(any_workshop, job_id)


def test_a_claimed_attempt_is_not_withdrawn(any_workshop: Any) -> None:
    job_id = any_workshop.new_job()
    claim(any_workshop, job_id)
    with any_workshop.transaction() as session:
        assert not attempts.withdraw(session, job_id, 1, "cancelled")


def requeue(workshop: Any, job_id: str, failure: JobError | None, tries: int = 3) -> bool:
    with workshop.transaction() as session:
        job = attempts.lock_job(session, job_id)
        assert job is not None
        return attempts.requeue(session, job, "Again", failure, tries)


def test_a_requeued_job_has_a_new_attempt_with_a_wake_up(any_workshop: Any) -> None:
    job_id = any_workshop.new_job(status="running", stage="tuning")
    assert requeue(any_workshop, job_id, None)
    job = any_workshop.job(job_id)
    assert (job.status, job.stage, job.attempt, job.failures) == ("queued", "queued", 2, 0)
    with any_workshop.transaction() as session:
        wake_ups = [(job, number) for _, job, number in attempts.due_wake_ups(session)]
    assert wake_ups == [(job_id, 1), (job_id, 2)]


def test_a_failed_try_waits_before_the_next_one(any_workshop: Any) -> None:
    job_id = any_workshop.new_job(status="running", stage="tuning")
    requeue(any_workshop, job_id, LOST)
    assert any_workshop.job(job_id).failures == 1
    with any_workshop.transaction() as session:
        assert attempts.claimable(session) == []
        assert [number for _, _, number in attempts.due_wake_ups(session)] == [1]


def test_the_last_failed_try_fails_the_job_in_words(any_workshop: Any) -> None:
    job_id = any_workshop.new_job(status="running", stage="tuning", failures=2)
    assert not requeue(any_workshop, job_id, LOST)
    job = any_workshop.job(job_id)
    assert job.status == "failed"
    assert job.error == {"code": "worker_lost", "message": "lost", "param": None}
    assert job.finished_at is not None


@pytest.mark.parametrize(
    ("asked", "status"), [("cancel_requested", "cancelled"), ("pause_requested", "paused")]
)
def test_an_open_wish_is_carried_out_when_no_worker_is_left(
    any_workshop: Any, asked: str, status: str
) -> None:
    job_id = any_workshop.new_job(status="running", stage="tuning", **{asked: True})
    assert not requeue(any_workshop, job_id, LOST)
    assert any_workshop.job(job_id).status == status


def test_waiting_attempts_are_offered_oldest_first(any_workshop: Any) -> None:
    first, second = any_workshop.new_job(), any_workshop.new_job()
    with any_workshop.transaction() as session:
        assert attempts.claimable(session) == [(first, 1), (second, 1)]
