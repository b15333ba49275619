"""Models through the official client: the catalogue and what was released."""

import secrets
from typing import Any

import openai
import pytest

from service.fine_tuning.repository import JobRepository
from service.store.models import ReleasedModel

OPERATOR_FILES = {
    "perturbation/adapter_before.safetensors": b"not gated",
    "evaluation_samples.parquet": b"prompts",
}
FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"weights",
    "tokenizer/tokenizer.json": b"{}",
}


def release(tenant: Any, suffix: str = "") -> str:
    """Write what a worker writes when a job's gate has passed; returns the model's name."""
    job_id = tenant.job()
    with tenant.transaction() as session:
        job = JobRepository(session, None).get(job_id)
        name = f"ft:{job.model}:{tenant.organization}:{suffix}:{secrets.token_hex(4)}"
        location = f"released/{job_id}/1"
        for path, content in (FILES | OPERATOR_FILES).items():
            tenant.installation.artifacts.put_stream(f"{location}/{path}", [content])
        session.add(
            ReleasedModel(
                id=name,
                organization_id=job.organization_id,
                job_id=job_id,
                base_model=job.model,
                location=location,
                manifest_sha256="0" * 64,
                created_at=job.created_at,
            )
        )
    return name


def base_of(tenant: Any) -> str:
    return str(tenant.client.models.list().data[0].id)


def test_the_list_has_base_models_and_the_organisations_released_ones(
    tenant: Any, stranger: Any
) -> None:
    base = [model.id for model in stranger.client.models.list()]
    mine = release(tenant)
    assert [model.id for model in tenant.client.models.list()] == [*base, mine]
    assert [model.id for model in stranger.client.models.list()] == base


def test_a_base_model_is_found_by_name(tenant: Any) -> None:
    model = tenant.client.models.list().data[0]
    assert tenant.client.models.retrieve(model.id) == model


@pytest.mark.parametrize("suffix", ["", "plain", "with-dots.1_a"])
def test_a_released_model_is_found_by_its_name_with_colons(tenant: Any, suffix: str) -> None:
    name = release(tenant, suffix)
    model = tenant.client.models.retrieve(name)
    assert (model.id, model.owned_by) == (name, tenant.organization)
    assert model.model_extra["tunegate"]["job_id"].startswith("ftjob-")


@pytest.mark.parametrize(
    "name", ["gpt-9", "org/name", "ft:a:b::c", "käse käse", "a/../b", "x" * 500]
)
def test_an_unknown_model_is_a_404(tenant: Any, name: str) -> None:
    for call in (tenant.client.models.retrieve, tenant.client.models.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(name)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_another_organisations_model_looks_like_none(tenant: Any, stranger: Any) -> None:
    name = release(tenant)
    for call in (stranger.client.models.retrieve, stranger.client.models.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(name)
        assert caught.value.code == "model_not_found"
    for path in ("files", "files/adapter_config.json"):
        assert stranger.http.get(f"/v1/models/{name}/{path}").status_code == 404
    assert tenant.client.models.retrieve(name).id == name


def test_a_deleted_model_is_gone_with_its_bundle(tenant: Any) -> None:
    name = release(tenant)
    location = tenant.client.models.retrieve(name).model_extra["tunegate"]["job_id"]
    assert tenant.client.models.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        tenant.client.models.retrieve(name)
    assert tenant.installation.artifacts.list(f"released/{location}") == []


def test_a_base_model_cannot_be_deleted(tenant: Any) -> None:
    with pytest.raises(openai.PermissionDeniedError) as caught:
        tenant.client.models.delete(tenant.client.models.list().data[0].id)
    assert caught.value.code == "insufficient_permissions"


def test_a_released_model_can_be_tuned_further(tenant: Any) -> None:
    name = release(tenant)
    job_id = tenant.job(model=name)
    assert tenant.client.fine_tuning.jobs.retrieve(job_id).model == name
    with tenant.transaction() as session:
        job = JobRepository(session, None).get(job_id)
        assert (job.model, job.parent_model) == (base_of(tenant), name)


def test_a_stranger_cannot_tune_a_released_model_further(tenant: Any, stranger: Any) -> None:
    name = release(tenant)
    with pytest.raises(openai.NotFoundError) as caught:
        stranger.job(model=name)
    assert caught.value.code == "model_not_found"


def test_a_model_of_a_base_that_is_gone_cannot_be_tuned_further(tenant: Any) -> None:
    name = release(tenant)
    with tenant.transaction() as session:
        session.get_one(ReleasedModel, name).base_model = "withdrawn-base"
    with pytest.raises(openai.BadRequestError) as caught:
        tenant.job(model=name)
    assert caught.value.param == "model"
    assert "withdrawn-base is no longer offered" in caught.value.message


def test_the_files_of_a_released_model_are_listed_and_downloaded(tenant: Any) -> None:
    name = release(tenant)
    listed = tenant.http.get(f"/v1/models/{name}/files").json()["data"]
    assert listed == [{"path": path, "bytes": len(FILES[path])} for path in sorted(FILES)]
    for path, content in FILES.items():
        answer = tenant.http.get(f"/v1/models/{name}/files/{path}")
        assert (answer.status_code, answer.content) == (200, content)


@pytest.mark.parametrize("path", ["none.json", "..%2f..%2f..%2fpepper", "tokenizer", "%2e%2e/x"])
def test_no_path_leads_out_of_a_bundle(local: Any, path: str) -> None:
    answer = local.http.get(f"/v1/models/{release(local)}/files/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", sorted(OPERATOR_FILES))
def test_the_operators_part_of_a_bundle_cannot_be_downloaded(tenant: Any, path: str) -> None:
    name = release(tenant)
    assert tenant.http.get(f"/v1/models/{name}/files/{path}").status_code == 404
