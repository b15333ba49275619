"""The table of transitions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.fine_tuning.lifecycle import (
    STAGES,
    TERMINAL,
    TRANSITIONS,
    UNFINISHED,
    IllegalTransition,
    can_cancel,
    can_pause,
    can_resume,
    is_finished,
    move,
)
from service.store.models import Job

# OpenAI's six states and paused, with the moves the API documents; running to queued is a new
# attempt after a lost worker.
ALLOWED = {
    ("validating_files", "queued"),
    ("validating_files", "failed"),
    ("validating_files", "cancelled"),
    ("validating_files", "paused"),
    ("queued", "running"),
    ("queued", "failed"),
    ("queued", "cancelled"),
    ("queued", "paused"),
    ("running", "succeeded"),
    ("running", "failed"),
    ("running", "cancelled"),
    ("running", "paused"),
    ("running", "queued"),
    ("paused", "validating_files"),
    ("paused", "queued"),
    ("paused", "cancelled"),
}


def job_at(status: str) -> Job:
    return Job(id="ftjob-x", status=status, stage=None, cancel_requested=False)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(TRANSITIONS, 2)))
def test_exactly_the_documented_moves_are_legal(source: str, target: str) -> None:
    job = job_at(source)
    if (source, target) in ALLOWED:
        move(job, target)
        assert job.status == target
    else:
        with pytest.raises(IllegalTransition):
            move(job, target)
        assert job.status == source


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_a_finished_job_never_changes_again(status: str) -> None:
    job = job_at(status)
    for target in TRANSITIONS:
        with pytest.raises(IllegalTransition):
            move(job, target)
    assert is_finished(job)
    assert not any([can_cancel(job), can_pause(job), can_resume(job)])


def test_a_terminal_status_sets_the_finishing_time_and_no_stage() -> None:
    job = job_at("running")
    move(job, "succeeded")
    assert (job.stage, job.finished_at is None) == (None, False)


def test_a_stage_of_another_status_is_refused_and_changes_nothing() -> None:
    job = job_at("queued")
    with pytest.raises(IllegalTransition, match="stage"):
        move(job, "queued", stage="tuning")
    with pytest.raises(IllegalTransition, match="stage"):
        move(job, "running", stage="queued")
    assert (job.status, job.stage) == ("queued", None)


def test_the_stage_changes_within_a_status() -> None:
    job = job_at("running")
    for stage in ("tuning", "perturbing", "evaluating", "gating", "publishing"):
        move(job, "running", stage=stage)
        assert job.stage == stage


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(IllegalTransition):
        move(job_at("running"), "done")


def test_a_job_that_is_being_cancelled_cannot_be_paused() -> None:
    job = job_at("running")
    job.cancel_requested = True
    assert not can_pause(job)


@given(st.lists(st.sampled_from(sorted(TRANSITIONS)), max_size=12))
def test_any_walk_ends_in_a_known_status_and_stage(targets: list[str]) -> None:
    job = job_at("validating_files")
    job.stage = "queued"
    for target in targets:
        try:
            move(job, target)
        except IllegalTransition:
            continue
    assert job.status in TERMINAL | UNFINISHED
    assert job.stage in STAGES[job.status]
