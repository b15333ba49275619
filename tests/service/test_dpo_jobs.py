"""DPO jobs and preference files through the official client."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from sqlalchemy import func, select

from service.fine_tuning.repository import JobRepository
from service.store.models import File, Job

Rows = Callable[..., bytes]


def preference(index: int, preferred: str = "Number", rejected: str = "No") -> dict[str, Any]:
    return {
        "input": {"messages": [{"role": "user", "content": f"Say number {index}"}]},
        "preferred_output": [{"role": "assistant", "content": f"{preferred} {index}"}],
        "non_preferred_output": [{"role": "assistant", "content": f"{rejected} {index}"}],
    }


def preferences(count: int = 12) -> bytes:
    return b"".join(json.dumps(preference(index)).encode() + b"\n" for index in range(count))


def dpo(**hyperparameters: Any) -> dict[str, Any]:
    return {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}


def refusal(tenant: Any, **fields: Any) -> openai.BadRequestError:
    """Create what must be refused, and see that no job was written."""
    count = select(func.count()).select_from(Job)
    with tenant.transaction() as session:
        before = session.scalar(count)
    with pytest.raises(openai.BadRequestError) as caught:
        tenant.job(**fields)
    with tenant.transaction() as session:
        assert session.scalar(count) == before
    return caught.value


def test_a_preference_file_is_processed_and_its_format_is_told(tenant: Any) -> None:
    file = tenant.client.files.retrieve(tenant.upload(preferences()))
    assert (file.status, file.model_extra["rows"]) == ("processed", 12)
    assert file.model_extra["format"] == "preference"
    assert file.model_extra["findings"] == []


def test_a_chat_file_and_an_evals_file_tell_their_formats(tenant: Any, rows: Rows) -> None:
    assert tenant.client.files.retrieve(tenant.upload(rows())).model_extra["format"] == "chat"
    other = tenant.lenient.files.create(file=("notes.txt", preferences()), purpose="evals")
    assert other.model_extra["format"] is None


def test_a_faulty_preference_is_told_with_line_and_field(tenant: Any) -> None:
    bad = json.dumps(preference(1, "same", "same")).encode() + b"\n"
    file_id = tenant.upload(preferences(10) + bad)
    file = tenant.client.files.retrieve(file_id)
    assert (file.status, file.model_extra["format"]) == ("error", "preference")
    error = refusal(tenant, training_file=file_id, method=dpo())
    assert (error.code, error.param) == ("invalid_training_file", "training_file")
    found = error.response.json()["error"]["errors"]
    assert (found[0]["line"], found[0]["path"]) == (11, "non_preferred_output")


def test_a_preference_file_that_is_no_text_is_refused_and_leaves_nothing(local: Any) -> None:
    before = local.installation.traces()
    with pytest.raises(openai.BadRequestError) as caught:
        local.upload(preferences(10) + b"\xff\xfe\n")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "file")
    assert "Line 11" in caught.value.message
    assert local.installation.traces() == before


def test_a_dpo_job_starts_with_everything_the_client_requires(tenant: Any) -> None:
    training, validation = tenant.upload(preferences()), tenant.upload(preferences(10))
    numbers = {"beta": 0.2, "n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 0.5}
    job_id = tenant.job(training_file=training, validation_file=validation, method=dpo(**numbers))
    job = tenant.client.fine_tuning.jobs.retrieve(job_id)
    assert (job.status, job.method.type) == ("validating_files", "dpo")
    assert job.method.dpo.hyperparameters.model_dump() == numbers
    assert job.method.supervised is None
    assert job.hyperparameters.n_epochs == 3
    assert job_id in [listed.id for listed in tenant.client.fine_tuning.jobs.list()]


@pytest.mark.parametrize(
    "method",
    [{"type": "dpo"}, {"type": "dpo", "dpo": {}}, dpo(), dpo(beta="auto"), dpo(beta=None)],
)
def test_what_is_left_out_is_auto(tenant: Any, method: Any) -> None:
    job_id = tenant.job(training_file=tenant.upload(preferences()), method=method)
    found = tenant.client.fine_tuning.jobs.retrieve(job_id).method.dpo.hyperparameters
    assert found.model_dump() == dict.fromkeys(
        ("beta", "n_epochs", "batch_size", "learning_rate_multiplier"), "auto"
    )


def test_a_supervised_job_has_no_beta(tenant: Any) -> None:
    job = tenant.client.fine_tuning.jobs.retrieve(tenant.job())
    assert "beta" not in job.hyperparameters.model_dump()


def test_whole_numbers_and_the_upper_bound_of_beta_are_taken(tenant: Any) -> None:
    file_id = tenant.upload(preferences())
    for beta in (1, 2, 0.001):
        job_id = tenant.job(training_file=file_id, method=dpo(beta=beta))
        with tenant.transaction() as session:
            job = JobRepository(session, None).get(job_id)
        assert job.method == {"type": "dpo"}
        assert job.hyperparameters["beta"] == beta


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("beta", value) for value in (0, -0.1, 2.01, True, "high", [0.1])),
        *(("n_epochs", value) for value in (0, 51, 1.5)),
        ("batch_size", 257),
        ("learning_rate_multiplier", 0),
        ("compute_multiplier", 1),
    ],
)
def test_a_hyperparameter_out_of_range_is_named(local: Any, name: str, value: Any) -> None:
    error = refusal(local, training_file="file-any", method=dpo(**{name: value}))
    assert error.param == f"method.dpo.hyperparameters.{name}"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 0.1}}}},
            "method.supervised.hyperparameters.beta",
            "unknown_parameter",
        ),
        ({"hyperparameters": {"beta": 0.1}}, "hyperparameters.beta", "unknown_parameter"),
        ({"method": {"type": "dpo", "supervised": {}}}, "method", "invalid_value"),
        ({"method": {"type": "dpo", "dpo": {"grader": {}}}}, "method.dpo.grader",
         "unknown_parameter"),
        ({"method": dpo(), "hyperparameters": {"n_epochs": 1}}, "hyperparameters",
         "invalid_value"),
        ({"method": {"type": "reinforcement", "reinforcement": {"grader": {}}}}, "method.type",
         "method_not_supported"),
        (
            {"method": dpo(), "extra_body": {"defense": {"scheduler": "constrained_sft"}}},
            "defense.scheduler",
            "invalid_value",
        ),
    ],
)  # fmt: skip
def test_a_field_that_does_not_go_with_the_method_is_named(
    local: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    error = refusal(local, training_file="file-any", **fields)
    assert (error.param, error.code) == (param, code)


def test_a_chat_file_is_refused_for_dpo_and_a_preference_file_for_supervised_tuning(
    tenant: Any, rows: Rows
) -> None:
    chat, pairs = tenant.upload(rows()), tenant.upload(preferences())
    for file_id, seen, method in ((chat, "chat", "dpo"), (pairs, "preference", "supervised")):
        error = refusal(tenant, training_file=file_id, method={"type": method})
        assert (error.code, error.param) == ("invalid_training_file", "training_file")
        assert f"in the {seen} format, but the method is {method}" in error.message


def test_the_validation_file_must_have_the_methods_format_too(tenant: Any, rows: Rows) -> None:
    chat, pairs = tenant.upload(rows()), tenant.upload(preferences())
    error = refusal(tenant, training_file=pairs, validation_file=chat, method=dpo())
    assert (error.code, error.param) == ("invalid_validation_file", "validation_file")
    error = refusal(tenant, training_file=chat, validation_file=pairs)
    assert (error.code, error.param) == ("invalid_validation_file", "validation_file")


def test_the_wrong_format_is_told_before_what_else_is_wrong(tenant: Any, rows: Rows) -> None:
    error = refusal(tenant, training_file=tenant.upload(rows(3)), method=dpo())
    assert "in the chat format" in error.message


@pytest.mark.parametrize("count", [1, 9])
def test_too_few_preferences_are_refused(tenant: Any, count: int) -> None:
    error = refusal(tenant, training_file=tenant.upload(preferences(count)), method=dpo())
    assert error.code == "invalid_n_examples"


def test_the_format_is_stored_with_the_file(tenant: Any) -> None:
    file_id = tenant.upload(preferences())
    with tenant.transaction() as session:
        assert session.scalar(select(File.format).where(File.id == file_id)) == "preference"
