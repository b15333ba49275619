"""What the end of a training process means."""

import errno
from pathlib import Path
from typing import Any

import pytest

from service.kit.artifacts import StorageFull
from workers.bundles import BundleDamaged
from workers.memory import oom_kills, ran_out_of_memory
from workers.outcome import Ask, ChildExit, classify
from workers.settle import interrupted

RESULT = {"event": "result", "verdict": "passed"}


def ended(exit_code: int = 1, log_tail: str = "", **fields: Any) -> ChildExit:
    return ChildExit(exit_code=exit_code, log_tail=log_tail, **fields)


def failure(code: str, *, retryable: bool = False, **fields: Any) -> dict[str, Any]:
    return {"event": "failure", "code": code, "message": "why", "retryable": retryable, **fields}


@pytest.mark.parametrize(
    ("end", "kind", "label"),
    [
        (ended(0, result=RESULT), "publish", "result"),
        (ended(0, result=RESULT, asked=Ask.PAUSE), "publish", "result"),
        (ended(0, result=RESULT, asked=Ask.CANCEL), "cancelled", "cancelled"),
        (ended(15, asked=Ask.PAUSE), "paused", "paused"),
        (ended(-9, asked=Ask.PAUSE), "paused", "paused"),
        (ended(15, asked=Ask.SHUTDOWN), "released", "shutdown"),
        (ended(-9, asked=Ask.FENCED), "fenced", "fenced"),
        (ended(15, asked=Ask.TIME_LIMIT), "failed", "time_limit_exceeded"),
        (ended(10, failure=failure("invalid_n_examples")), "failed", "invalid_n_examples"),
        (ended(10, failure=failure("storage_full", retryable=True)), "retry", "storage_full"),
        (ended(10, failure=failure("something odd")), "failed", "internal_error"),
        (ended(-9, out_of_memory=True), "retry", "out_of_memory"),
        (ended(-9), "retry", "worker_lost"),
        (ended(-11), "retry", "internal_error"),
        (ended(1), "retry", "internal_error"),
        (ended(0), "retry", "internal_error"),
        (ended(1, "OSError: [Errno 28] No space left on device"), "retry", "storage_full"),
    ],
)
def test_every_end_has_its_meaning(end: ChildExit, kind: str, label: str) -> None:
    ending = classify(end)
    assert (ending.kind, ending.label) == (kind, label)


def test_a_crash_names_its_signal_but_repeats_nothing_of_the_log() -> None:
    error = classify(ended(-11, "a tenant's words")).error
    assert error is not None
    assert "SIGSEGV" in error.message
    assert "tenant" not in error.message


def test_a_failure_keeps_param_and_findings() -> None:
    reported = failure("invalid_training_file", param="training_file", details=["line 3"])
    error = classify(ended(10, failure=reported)).error
    assert error is not None
    assert error.body() == {
        "code": "invalid_training_file",
        "message": "why",
        "param": "training_file",
        "errors": [{"message": "line 3"}],
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageFull(errno.ENOSPC, "full"), "storage_full"),
        (OSError(errno.EDQUOT, "quota"), "storage_full"),
        (BundleDamaged("report.json is missing"), "internal_error"),
        (RuntimeError("secret"), "internal_error"),
    ],
)
def test_what_interrupts_the_worker_is_tried_again(error: Exception, code: str) -> None:
    ending = interrupted(error)
    assert (ending.kind, ending.label) == ("retry", code)
    assert ending.error is not None
    assert "secret" not in ending.error.message


@pytest.mark.parametrize(
    "words",
    [
        "MemoryError",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_the_processs_own_words_show_a_lack_of_memory(words: str) -> None:
    assert ran_out_of_memory(1, words, None, None)


@pytest.mark.parametrize(
    ("exit_code", "before", "after", "expected"),
    [(-9, 2, 3, True), (-9, 2, 2, False), (-9, None, None, False), (-15, 2, 3, False)],
)
def test_a_kill_counts_as_lack_of_memory_only_with_the_kernels_count(
    exit_code: int, before: int | None, after: int | None, expected: bool
) -> None:
    assert ran_out_of_memory(exit_code, "", before, after) is expected


@pytest.mark.parametrize(
    ("groups", "counter"),
    [
        ("0::/pod/one\n", "sys/fs/cgroup/pod/one/memory.events"),
        ("0::/hidden\n", "sys/fs/cgroup/memory.events"),
        ("4:memory:/pod\n", "sys/fs/cgroup/memory/pod/memory.oom_control"),
        ("0::/\n", "proc/vmstat"),
    ],
)
def test_the_kernels_count_is_read_where_this_machine_keeps_it(
    tmp_path: Path, groups: str, counter: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / counter).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / counter).write_text("low 0\noom_kill 4\nother 1\n")
    assert oom_kills(tmp_path) == 4


def test_a_machine_without_counters_gives_no_count(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
