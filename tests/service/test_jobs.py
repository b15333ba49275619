"""Fine-tuning jobs through the official client: creating, reading, stopping."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from sqlalchemy import func, select

from service.fine_tuning import attempts, creation
from service.fine_tuning.lifecycle import QUEUED, RUNNING, SUCCEEDED, move
from service.fine_tuning.repository import JobRepository
from service.store.models import Attempt, Event, Job, JobLabel, Outbox

Rows = Callable[..., bytes]


def claim(tenant: Any, job_id: str, *, running: bool = False) -> None:
    """Do what a worker does when it takes the job (and has validated its files)."""
    with tenant.transaction() as session:
        job = JobRepository(session, None).get(job_id)
        assert attempts.claim(session, job_id, job.attempt, "test-worker", 60.0)
        if running:
            move(job, QUEUED)
            move(job, RUNNING)


def finish(tenant: Any, job_id: str) -> None:
    claim(tenant, job_id, running=True)
    with tenant.transaction() as session:
        move(JobRepository(session, None).get(job_id), SUCCEEDED)


def test_a_job_starts_as_validating_with_everything_the_client_requires(tenant: Any) -> None:
    file_id = tenant.upload()
    model = tenant.client.models.list().data[0].id
    job = tenant.client.fine_tuning.jobs.create(
        model=model, training_file=file_id, suffix="My-v1.0_a", seed=7, metadata={"team": "a"}
    )
    assert job.id.startswith("ftjob-")
    assert (job.status, job.model, job.training_file) == ("validating_files", model, file_id)
    assert (job.error, job.finished_at, job.fine_tuned_model) == (None, None, None)
    assert (job.seed, job.metadata, job.result_files) == (7, {"team": "a"}, [])
    assert job.hyperparameters.n_epochs == "auto"
    assert job.method is not None
    assert job.method.type == "supervised"
    assert job.model_extra["user_provided_suffix"] == "My-v1.0_a"
    assert tenant.client.fine_tuning.jobs.retrieve(job.id) == job


def test_creating_a_job_writes_attempt_wake_up_and_event(tenant: Any) -> None:
    job_id = tenant.job()
    with tenant.transaction() as session:
        attempt = session.scalars(select(Attempt).where(Attempt.job_id == job_id)).one()
        wake_up = session.scalars(select(Outbox).where(Outbox.job_id == job_id)).one()
        event = session.scalars(select(Event).where(Event.job_id == job_id)).one()
    assert (attempt.number, attempt.state) == (1, "queued")
    assert (wake_up.attempt, wake_up.sent_at) == (1, None)
    assert event.message == f"Created fine-tuning job: {job_id}"


def test_a_job_tells_its_defense_gate_and_place_in_the_queue(tenant: Any) -> None:
    first, second = tenant.job(), tenant.job()
    extra = tenant.client.fine_tuning.jobs.retrieve(second).model_extra
    assert extra["stage"] == "queued"
    assert extra["defense"]["scheduler"]["name"] == "bds"
    assert extra["gate"] == {"policy_version": 1, "verdict": None, "rules": []}
    assert extra["report"] is None
    before = tenant.client.fine_tuning.jobs.retrieve(first).model_extra["tunegate"]
    assert extra["tunegate"]["queue_position"] == before["queue_position"] + 1
    assert extra["tunegate"]["attempt"] == 1


def test_a_seed_is_drawn_when_none_is_given(tenant: Any) -> None:
    seeds = {tenant.client.fine_tuning.jobs.retrieve(tenant.job()).seed for _ in range(3)}
    assert len(seeds) == 3
    assert all(0 <= seed <= 2**31 - 1 for seed in seeds)


def test_hyperparameters_may_stand_in_either_place(tenant: Any) -> None:
    numbers: Any = {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 0.5}
    jobs = tenant.client.fine_tuning.jobs
    old = jobs.retrieve(tenant.job(hyperparameters=numbers))
    new = jobs.retrieve(
        tenant.job(method={"type": "supervised", "supervised": {"hyperparameters": numbers}})
    )
    assert old.hyperparameters.model_dump() == new.hyperparameters.model_dump() == numbers
    assert new.method.supervised.hyperparameters.model_dump() == numbers


def test_the_request_can_choose_defense_and_add_gate_rules(tenant: Any) -> None:
    rule = {"metric": "harmfulness.score", "bound": "high", "max": 0.1}
    job_id = tenant.job(
        extra_body={
            "defense": {"scheduler": {"learning_rate": 0.01}, "perturbation": "joint"},
            "gate": {"rules": [rule]},
        }
    )
    with tenant.transaction() as session:
        job = JobRepository(session, None).get(job_id)
    assert job.defense["scheduler"]["learning_rate"] == 0.01
    assert job.defense["scheduler"]["name"] == "bds"
    assert job.defense["perturbation"]["mode"] == "joint"
    assert job.policy["rules"][-1]["max"] == 0.1
    assert len(job.policy["rules"]) > 1


def _refusal(tenant: Any, **fields: Any) -> Any:
    """Create what must be refused, and see that no job was written."""
    with tenant.transaction() as session:
        before = session.scalar(select(func.count()).select_from(Job))
    with pytest.raises(openai.APIStatusError) as caught:
        tenant.job(**fields)
    with tenant.transaction() as session:
        assert session.scalar(select(func.count()).select_from(Job)) == before
    body = caught.value.response.json()["error"]
    assert {"message", "type", "param", "code"} <= body.keys()
    assert caught.value.request_id
    return caught.value


HYPERPARAMETERS = [
    ("n_epochs", 0),
    ("n_epochs", 51),
    ("n_epochs", 1.5),
    ("n_epochs", True),
    ("n_epochs", "many"),
    ("batch_size", 0),
    ("batch_size", 257),
    ("learning_rate_multiplier", 0),
    ("learning_rate_multiplier", -1),
    ("learning_rate_multiplier", "high"),
    ("learning_rate_multiplier", [1]),
    ("warmup", 3),
]


@pytest.mark.parametrize(("name", "value"), HYPERPARAMETERS)
def test_a_hyperparameter_out_of_range_is_named(local: Any, name: str, value: Any) -> None:
    error = _refusal(local, hyperparameters={name: value})
    assert (error.status_code, error.param) == (400, f"hyperparameters.{name}")
    inside = _refusal(
        local, method={"type": "supervised", "supervised": {"hyperparameters": {name: value}}}
    )
    assert inside.param == f"method.supervised.hyperparameters.{name}"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"suffix": "a b"}, "suffix", "invalid_value"),
        ({"suffix": "käse"}, "suffix", "invalid_value"),
        ({"suffix": "a:b"}, "suffix", "invalid_value"),
        ({"suffix": "a/b"}, "suffix", "invalid_value"),
        ({"suffix": "a\n"}, "suffix", "invalid_value"),
        ({"suffix": "a\0"}, "suffix", "invalid_value"),
        ({"suffix": ""}, "suffix", "invalid_value"),
        ({"suffix": "a" * 65}, "suffix", "string_above_max_length"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"seed": 2**31}, "seed", "invalid_value"),
        ({"seed": "7"}, "seed", "invalid_value"),
        ({"metadata": {str(index): "x" for index in range(17)}}, "metadata", "invalid_value"),
        ({"metadata": {"k" * 65: "x"}}, "metadata", "invalid_value"),
        ({"metadata": {"k": "x" * 513}}, "metadata", "invalid_value"),
        ({"metadata": {"k": 3}}, "metadata.k", "invalid_value"),
        ({"extra_body": {"colour": "red"}}, "colour", "unknown_parameter"),
        ({"extra_body": {"model": None}}, "model", "invalid_value"),
        (
            {"extra_body": {"defense": {"scheduler": "magic"}}},
            "defense.scheduler",
            "invalid_value",
        ),
        (
            {"extra_body": {"defense": {"scheduler": {"learning_rate": 9}}}},
            "defense.scheduler.learning_rate",
            "invalid_value",
        ),
        (
            {"extra_body": {"defense": {"scheduler": {"speed": 9}}}},
            "defense.scheduler.speed",
            "unknown_parameter",
        ),
        (
            {"extra_body": {"gate": {"minimum_prompts": 1}}},
            "gate.minimum_prompts",
            "unknown_parameter",
        ),
        (
            {"extra_body": {"gate": {"rules": [{"metric": "x", "bound": "high", "max": 1}]}}},
            "gate.rules[0].metric",
            "invalid_value",
        ),
        ({"method": {"type": "reinforcement"}}, "method.type", "method_not_supported"),
        ({"method": {"type": "magic"}}, "method.type", "invalid_value"),
        ({"method": {"type": "supervised", "dpo": {}}}, "method", "invalid_value"),
        (
            {
                "hyperparameters": {"n_epochs": 1},
                "method": {
                    "type": "supervised",
                    "supervised": {"hyperparameters": {"n_epochs": 2}},
                },
            },
            "hyperparameters",
            "invalid_value",
        ),
        (
            {"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]},
            "integrations",
            "unsupported_parameter",
        ),
        ({"training_file": "file-none"}, "training_file", "invalid_value"),
        ({"validation_file": "file-none"}, "validation_file", "invalid_value"),
    ],
)
def test_a_wrong_field_of_a_job_is_named(
    local: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    error = _refusal(local, **fields)
    assert isinstance(error, openai.BadRequestError)
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")


@pytest.mark.parametrize("missing", ["model", "training_file"])
def test_a_missing_field_of_a_job_is_named(local: Any, missing: str) -> None:
    body = {"model": "m", "training_file": "f"}
    del body[missing]
    answer = local.http.post("/v1/fine_tuning/jobs", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "missing_required_parameter"
    assert answer.json()["error"]["param"] == missing


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b'{"a": NaN}', b"\xff", b'"\\ud800"', b'{"a":' + b"[" * 900]
)
def test_a_body_that_is_no_json_object_is_a_400(local: Any, body: bytes) -> None:
    answer = local.http.post("/v1/fine_tuning/jobs", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


def test_a_body_of_many_megabytes_is_a_413(local: Any) -> None:
    answer = local.http.post("/v1/fine_tuning/jobs", content=b"[" * 3_000_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_an_unknown_model_is_a_404(tenant: Any) -> None:
    error = _refusal(tenant, model="gpt-9")
    assert isinstance(error, openai.NotFoundError)
    assert (error.code, error.param) == ("model_not_found", "model")


def test_another_organisations_file_looks_like_none(tenant: Any, stranger: Any) -> None:
    foreign = stranger.upload()
    error = _refusal(tenant, training_file=foreign)
    absent = _refusal(tenant, training_file="file-none")
    assert error.message.replace(foreign, "ID") == absent.message.replace("file-none", "ID")


def test_a_deleted_file_cannot_be_used(tenant: Any) -> None:
    file_id = tenant.upload()
    tenant.client.files.delete(file_id)
    assert _refusal(tenant, training_file=file_id).param == "training_file"


def test_a_file_of_another_purpose_cannot_be_used(tenant: Any) -> None:
    file_id = tenant.lenient.files.create(file=("a.jsonl", b"x"), purpose="evals").id
    error = _refusal(tenant, training_file=file_id)
    assert error.param == "training_file"
    assert "purpose" in error.message


def test_the_training_file_cannot_validate_itself(tenant: Any) -> None:
    file_id = tenant.upload()
    error = _refusal(tenant, training_file=file_id, validation_file=file_id)
    assert error.param == "validation_file"


def _row(**message: Any) -> bytes:
    return json.dumps({"messages": [message]}).encode() + b"\n"


FAULTY = {
    "missing messages": (b"{}\n", "messages"),
    "unknown role": (_row(role="robot", content="x"), "messages[0].role"),
    "no assistant turn": (_row(role="user", content="x"), "messages"),
    "duplicate key": (b'{"messages": [], "messages": []}\n', "messages"),
    "half a surrogate": (
        b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}\n',
        "messages[0].content",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_row_is_told_with_line_and_field(tenant: Any, rows: Rows, name: str) -> None:
    content, field = FAULTY[name]
    file_id = tenant.upload(rows(10) + content + rows(5))
    file = tenant.client.files.retrieve(file_id)
    assert file.status == "error"
    assert "Line 11" in file.status_details
    error = _refusal(tenant, training_file=file_id)
    assert (error.status_code, error.code) == (400, "invalid_training_file")
    assert error.param == "training_file"
    assert "Line 11" in error.message
    found = error.response.json()["error"]["errors"]
    assert (found[0]["line"], found[0]["path"]) == (11, field)


def test_at_most_a_hundred_faults_are_listed(tenant: Any) -> None:
    file_id = tenant.upload(b'{"prompt": "x"}\n' * 300)
    error = _refusal(tenant, training_file=file_id)
    assert 0 < len(error.response.json()["error"]["errors"]) <= 100


def test_a_faulty_validation_file_has_its_own_code(tenant: Any, rows: Rows) -> None:
    file_id = tenant.upload(rows(10) + b'{"prompt": "x"}\n')
    error = _refusal(tenant, validation_file=file_id)
    assert (error.code, error.param) == ("invalid_validation_file", "validation_file")


@pytest.mark.parametrize("count", [1, 9])
def test_too_few_rows_are_refused(tenant: Any, rows: Rows, count: int) -> None:
    error = _refusal(tenant, training_file=tenant.upload(rows(count)))
    assert (error.status_code, error.code) == (400, "invalid_n_examples")
    assert str(count) in error.message


def test_a_file_with_byte_order_mark_and_crlf_is_accepted(tenant: Any, rows: Rows) -> None:
    content = b"\xef\xbb\xbf" + rows(10).replace(b"\n", b"\r\n")
    assert tenant.job(training_file=tenant.upload(content)).startswith("ftjob-")


def test_a_job_of_another_organisation_looks_like_none(tenant: Any, stranger: Any) -> None:
    job_id = tenant.job()
    jobs = stranger.client.fine_tuning.jobs
    calls = [
        jobs.retrieve,
        jobs.cancel,
        jobs.pause,
        jobs.resume,
        jobs.list_events,
        jobs.checkpoints.list,
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError) as caught:
            call(job_id)
        assert caught.value.code == "job_not_found"
    assert jobs.list().data == []
    assert tenant.client.fine_tuning.jobs.retrieve(job_id).status == "validating_files"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_pages_of_two_give_every_job_once(tenant: Any, count: int) -> None:
    file_id = tenant.upload()
    made = [tenant.job(training_file=file_id) for _ in range(count)]
    page = tenant.client.fine_tuning.jobs.list(limit=2)
    assert page.has_more == (count > 2)
    assert [job.id for job in page] == made[::-1]


@pytest.mark.parametrize("limit", [0, 101, "many"])
def test_a_limit_out_of_range_is_a_400(local: Any, limit: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        local.client.fine_tuning.jobs.list(limit=limit)
    assert (caught.value.param, caught.value.code) == ("limit", "invalid_value")


def test_an_unknown_cursor_is_a_400(tenant: Any, stranger: Any) -> None:
    for after in ("ftjob-none", "", stranger.job()):
        answer = tenant.http.get("/v1/fine_tuning/jobs", params={"after": after})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")


def test_jobs_are_filtered_by_metadata(tenant: Any) -> None:
    file_id = tenant.upload()

    def make(metadata: dict[str, str] | None) -> str:
        more = {} if metadata is None else {"metadata": metadata}
        return tenant.job(training_file=file_id, **more)

    both, empty = make({"team": "a b", "x[y]": "&=%"}), make({"team": ""})
    none, other = make(None), make({"team": "c"})

    def found(**query: Any) -> list[str]:
        return [job.id for job in tenant.client.fine_tuning.jobs.list(**query)]

    assert found(metadata={"team": "a b"}) == [both]
    assert found(metadata={"team": "a b", "x[y]": "&=%"}) == [both]
    assert found(metadata={"team": "a b", "x[y]": "no"}) == []
    assert found(metadata={"team": ""}) == [empty]
    assert found(extra_query={"metadata": "null"}) == [none]
    assert set(found()) == {both, empty, none, other}


@pytest.mark.parametrize("query", ["metadata=null&metadata[a]=b", "metadata=x"])
def test_contradicting_metadata_filters_are_a_400(local: Any, query: str) -> None:
    answer = local.http.get(f"/v1/fine_tuning/jobs?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


def test_labels_are_written_for_the_filter(tenant: Any) -> None:
    job_id = tenant.job(metadata={"a": "b"})
    with tenant.transaction() as session:
        label = session.scalars(select(JobLabel).where(JobLabel.job_id == job_id)).one()
    assert (label.key, label.value) == ("a", "b")


def test_a_waiting_job_is_cancelled_at_once(tenant: Any) -> None:
    jobs = tenant.client.fine_tuning.jobs
    job_id = tenant.job()
    cancelled = jobs.cancel(job_id)
    assert (cancelled.status, cancelled.error) == ("cancelled", None)
    assert cancelled.finished_at is not None
    assert jobs.cancel(job_id) == cancelled
    with tenant.transaction() as session:
        attempt = session.scalars(select(Attempt).where(Attempt.job_id == job_id)).one()
        assert (attempt.state, attempt.outcome) == ("finished", "cancelled")
        assert not attempts.claim(session, job_id, 1, "late-worker", 60.0)


@pytest.mark.parametrize("running", [False, True])
def test_a_claimed_job_is_cancelled_by_its_worker(tenant: Any, running: bool) -> None:
    job_id = tenant.job()
    claim(tenant, job_id, running=running)
    job = tenant.client.fine_tuning.jobs.cancel(job_id)
    assert job.status == ("running" if running else "validating_files")
    assert job.model_extra["stage"] == "cancelling"
    lease = attempts.Lease(job_id, 1, "test-worker")
    with tenant.transaction() as session:
        assert attempts.heartbeat(session, lease, 60.0).cancel


def test_a_finished_job_cannot_be_cancelled_paused_or_resumed(tenant: Any) -> None:
    job_id = tenant.job()
    finish(tenant, job_id)
    jobs = tenant.client.fine_tuning.jobs
    for call, code in (
        (jobs.cancel, "job_not_cancellable"),
        (jobs.pause, "job_not_pausable"),
        (jobs.resume, "job_not_resumable"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call(job_id)
        assert (caught.value.code, caught.value.param) == (code, "id")
        assert "succeeded" in caught.value.message


def test_a_waiting_job_is_paused_at_once_and_resumes_as_a_new_attempt(tenant: Any) -> None:
    job_id = tenant.job()
    jobs = tenant.lenient.fine_tuning.jobs
    paused = jobs.pause(job_id)
    assert (paused.status, paused.model_extra["tunegate"]["queue_position"]) == ("paused", None)
    resumed = tenant.client.fine_tuning.jobs.resume(job_id)
    # No worker has validated its files yet.
    assert resumed.status == "validating_files"
    assert resumed.model_extra["tunegate"]["attempt"] == 2
    with tenant.transaction() as session:
        assert not attempts.claim(session, job_id, 1, "late-worker", 60.0)
        assert attempts.claim(session, job_id, 2, "worker", 60.0)
        sent = session.scalars(select(Outbox.attempt).where(Outbox.job_id == job_id)).all()
    assert sorted(sent) == [1, 2]


def test_a_paused_job_is_cancelled_at_once(tenant: Any) -> None:
    job_id = tenant.job()
    tenant.lenient.fine_tuning.jobs.pause(job_id)
    assert tenant.client.fine_tuning.jobs.cancel(job_id).status == "cancelled"


def test_a_running_job_keeps_its_status_until_its_worker_has_paused(tenant: Any) -> None:
    job_id = tenant.job()
    claim(tenant, job_id, running=True)
    job = tenant.client.fine_tuning.jobs.pause(job_id)
    assert (job.status, job.model_extra["stage"]) == ("running", "pausing")
    with pytest.raises(openai.BadRequestError) as caught:
        tenant.client.fine_tuning.jobs.resume(job_id)
    assert caught.value.code == "job_not_resumable"
    with tenant.transaction() as session:
        assert attempts.heartbeat(session, attempts.Lease(job_id, 1, "test-worker"), 60.0).pause


def test_the_same_idempotency_key_makes_one_job(tenant: Any, stranger: Any) -> None:
    file_id = tenant.upload()
    header = {"Idempotency-Key": "k1"}
    first = tenant.job(training_file=file_id, seed=1, extra_headers=header)
    assert tenant.job(training_file=file_id, seed=1, extra_headers=header) == first
    assert tenant.job(training_file=file_id, seed=1) != first
    assert stranger.job(seed=1, extra_headers=header) != first


def test_an_idempotency_key_with_another_body_is_a_conflict(tenant: Any) -> None:
    file_id = tenant.upload()
    header = {"Idempotency-Key": "k1"}
    tenant.job(training_file=file_id, seed=1, extra_headers=header)
    error = _refusal(tenant, training_file=file_id, seed=2, extra_headers=header)
    assert isinstance(error, openai.ConflictError)
    assert error.code == "idempotency_key_reused"
    assert error.response.headers["x-should-retry"] == "false"


def test_a_retry_of_the_client_returns_the_job_it_made(tenant: Any) -> None:
    body = {"model": tenant.client.models.list().data[0].id, "training_file": tenant.upload()}
    made = [
        tenant.http.post(
            "/v1/fine_tuning/jobs", json=body, headers={"x-stainless-retry-count": str(count)}
        ).json()["id"]
        for count in (0, 1, 2, 0)
    ]
    assert made[0] == made[1] == made[2]
    assert made[3] != made[0]


def test_a_retry_after_the_job_has_finished_makes_a_new_one(tenant: Any) -> None:
    body = {"model": tenant.client.models.list().data[0].id, "training_file": tenant.upload()}

    def send(count: int) -> str:
        headers = {"x-stainless-retry-count": str(count)}
        answer = tenant.http.post("/v1/fine_tuning/jobs", json=body, headers=headers)
        return str(answer.json()["id"])

    first = send(0)
    finish(tenant, first)
    assert send(1) != first


def test_a_first_sending_holds_the_row_that_its_retry_waits_for(
    tenant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": tenant.client.models.list().data[0].id, "training_file": tenant.upload()}
    inside, go_on = threading.Event(), threading.Event()
    check = creation._base_and_parent

    def slow(*arguments: Any) -> tuple[str, str | None]:
        inside.set()
        go_on.wait(30)
        return check(*arguments)

    monkeypatch.setattr(creation, "_base_and_parent", slow)

    def send(count: int) -> str:
        headers = {"x-stainless-retry-count": str(count)}
        answer = tenant.http.post("/v1/fine_tuning/jobs", json=body, headers=headers, timeout=60)
        return str(answer.json()["id"])

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(send, 0)
        assert inside.wait(30)
        retry = pool.submit(send, 1)
        time.sleep(0.3)
        go_on.set()
        assert retry.result() == first.result()


def test_two_sendings_at_once_with_one_key_make_one_job(tenant: Any) -> None:
    file_id, client = tenant.upload(), tenant.client
    model = client.models.list().data[0].id

    def send(_: int) -> str:
        return client.fine_tuning.jobs.create(
            model=model, training_file=file_id, extra_headers={"Idempotency-Key": "same"}
        ).id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(send, range(24)))) == 1


def test_a_demanded_defense_cannot_be_switched_off_or_weakened(gateway_with: Any) -> None:
    tenant = gateway_with(require_defense=True)
    for scheduler in (
        *("none", "mix", "lisa", "constrained_sft", "seal", "prefilter"),
        {"name": "none"},
        {"name": "lisa", "alignment_coefficient": 2.0},
        {"name": "custom", "method": "anything"},
        {"sampler": "sgld"},
        {"rescore": False},
        {"coefficients": "seal"},
        {"form": "neural", "scorer_learning_rate": 1e-12},
        {"form": "neural", "sampler": "sgld"},
        {"alignment_coefficient": 0.0},
        {"alignment_rows": 1},
        {"learning_rate": 1e-6},
        {"rescore_temperature": 10.0},
        {"clip": 1e-9},
        {"betas": [0.9999, 0.9999]},
        {"eps": 1e-2},
        {"initial_logit": 20.0},
        {"gaussian_coefficient": 100.0},
        {"entropy_coefficient": 100.0},
    ):
        error = _refusal(tenant, extra_body={"defense": {"scheduler": scheduler}})
        assert (error.status_code, error.code) == (400, "policy_violation")
        assert error.param.startswith("defense.scheduler")
    for allowed in (
        "bds",
        {"transform": "sigmoid", "alignment_coefficient": 2.0},
        {"form": "neural", "scorer": "tokens"},
    ):
        assert tenant.job(extra_body={"defense": {"scheduler": allowed}}).startswith("ftjob-")


def test_a_demanded_defense_keeps_the_strength_of_the_joint_objective(gateway_with: Any) -> None:
    tenant = gateway_with(require_defense=True)
    for change in ({"strength": 1.0}, {"clamp": 1.0}, {"on_clamp": "released"}):
        perturbation = {"mode": "joint", **change}
        error = _refusal(tenant, extra_body={"defense": {"perturbation": perturbation}})
        assert error.code == "policy_violation"
        assert error.param == f"defense.perturbation.{next(iter(change))}"


def test_a_demanded_defense_keeps_its_canaries(gateway_with: Any) -> None:
    tenant = gateway_with(require_defense=True)
    for count in (0, 19):
        error = _refusal(tenant, extra_body={"defense": {"canaries": {"count": count}}})
        assert (error.code, error.param) == ("policy_violation", "defense.canaries.count")
    more = tenant.job(extra_body={"defense": {"canaries": {"count": 40}}})
    job = tenant.client.fine_tuning.jobs.retrieve(more)
    assert job.model_extra["defense"]["canaries"]["count"] == 40


def test_plain_tuning_is_allowed_where_no_defense_is_demanded(tenant: Any) -> None:
    job_id = tenant.job(extra_body={"defense": {"scheduler": "none", "perturbation": "none"}})
    job = tenant.client.fine_tuning.jobs.retrieve(job_id)
    assert job.model_extra["defense"]["scheduler"]["name"] == "none"


def test_the_place_in_the_queue_follows_the_time_an_attempt_may_start(tenant: Any) -> None:
    early, late = tenant.job(), tenant.job()
    with tenant.transaction() as session:
        attempt = session.scalars(select(Attempt).where(Attempt.job_id == early)).one()
        attempt.available_at += 3600
    places = [
        tenant.client.fine_tuning.jobs.retrieve(job_id).model_extra["tunegate"]["queue_position"]
        for job_id in (early, late)
    ]
    assert places[0] > places[1]
