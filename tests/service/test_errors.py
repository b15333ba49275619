"""Answers that are no success: always OpenAI's error object, always with a request id."""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from fsspec.implementations.local import LocalFileSystem

from service.app import create_app
from service.kit.artifacts import ArtifactStore, StorageFull
from service.kit.errors import ApiError
from service.kit.gateway import ArtifactProbe
from service.settings import Settings
from service.store.database import upgrade


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/chat/completions", 404, "unknown_url"),
        ("GET", "/nothing", 404, "unknown_url"),
        ("PUT", "/v1/files", 405, "method_not_allowed"),
        ("DELETE", "/v1/fine_tuning/jobs", 405, "method_not_allowed"),
        ("GET", "/v1/files/a%00b", 400, "invalid_value"),
        ("GET", "/v1/files?after=%00", 400, "invalid_value"),
        ("GET", "/v1/files/none", 404, "file_not_found"),
        ("GET", "/v1/fine_tuning/jobs/none", 404, "job_not_found"),
        ("POST", "/v1/fine_tuning/jobs/none/cancel", 404, "job_not_found"),
        ("GET", "/v1/files?limit=0", 400, "invalid_value"),
        ("GET", "/v1/files?order=up", 400, "invalid_value"),
        ("GET", "/v1/fine_tuning/jobs?limit=99999999999999999999", 400, "invalid_value"),
    ],
)
def test_every_error_is_openais_object(
    tenant: Any, method: str, path: str, status: int, code: str
) -> None:
    answer = tenant.http.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert error.keys() == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req_")


def test_every_answer_has_the_headers_that_clients_know(local: Any) -> None:
    answers = [local.http.get("/v1/models") for _ in range(2)]
    for answer in answers:
        assert int(answer.headers["openai-processing-ms"]) >= 0
        assert answer.headers["openai-version"] == "2020-10-01"
        assert answer.headers["openai-organization"].startswith("org-")
    assert answers[0].headers["x-request-id"] != answers[1].headers["x-request-id"]


def test_the_request_id_reaches_the_client(tenant: Any) -> None:
    file = tenant.client.files.retrieve(tenant.upload())
    assert file._request_id.startswith("req_")


async def _ask(app: FastAPI, path: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get(path)


def _app_that_raises(tmp_path: Any, error: Exception) -> FastAPI:
    app = create_app(Settings(data_dir=tmp_path))

    @app.get("/v1/raises")
    def raises() -> None:
        raise error

    return app


def test_a_fault_of_ours_tells_nothing_and_is_not_repeated(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = _app_that_raises(tmp_path, RuntimeError("inner detail"))
    with caplog.at_level(logging.ERROR):
        answer = asyncio.run(_ask(app, "/v1/raises"))
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "inner detail" not in answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"] in caplog.text


def test_a_full_store_is_a_503_that_is_not_repeated(tmp_path: Any) -> None:
    app = _app_that_raises(tmp_path, StorageFull(28, "full"))
    answer = asyncio.run(_ask(app, "/v1/raises"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_full")
    assert answer.headers["x-should-retry"] == "false"


def test_a_database_without_tables_is_a_503_and_readiness_says_why(tmp_path: Any) -> None:
    app = create_app(Settings(data_dir=tmp_path))
    ready = asyncio.run(_ask(app, "/readyz"))
    assert ready.status_code == 503
    assert "tunegate db upgrade" in ready.json()["reasons"][0]
    assert ready.headers["retry-after"] == "1"
    assert asyncio.run(_ask(app, "/healthz")).status_code == 200


def test_readiness_is_told_without_a_key(tenant: Any) -> None:
    answer = httpx2.get(f"{tenant.installation.url}/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "reasons": []})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
def test_a_status_becomes_the_clients_exception(tmp_path: Any, status: int, kind: Any) -> None:
    error = ApiError(status, "the message", "the_code", "the_param")
    app = _app_that_raises(tmp_path, error)

    async def ask() -> None:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key="x",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(
                transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False)
            ),
        )
        await client.get("/raises", cast_to=object)

    with pytest.raises(kind) as caught:
        asyncio.run(ask())
    assert (caught.value.code, caught.value.param) == ("the_code", "the_param")
    assert "the message" in caught.value.message
    assert caught.value.request_id.startswith("req_")


def test_details_are_listed_beside_the_four_keys() -> None:
    error = ApiError(400, "m", details=[{"line": 3}]).body()["error"]
    assert error["errors"] == [{"line": 3}]


def test_an_async_client_walks_the_same_flow(tenant: Any, rows: Any) -> None:
    async def flow() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{tenant.installation.url}/v1",
            api_key=tenant.key,
            max_retries=0,
            _strict_response_validation=True,
        ) as client:
            file = await client.files.create(file=("a.jsonl", rows()), purpose="fine-tune")
            model = (await client.models.list()).data[0].id
            job = await client.fine_tuning.jobs.create(model=model, training_file=file.id)
            events = await client.fine_tuning.jobs.list_events(job.id)
            assert len(events.data) == 1
            return (await client.fine_tuning.jobs.cancel(job.id)).status

    assert asyncio.run(flow()) == "cancelled"


def test_the_openapi_document_describes_the_routes(local: Any) -> None:
    paths = local.http.get("/openapi.json").json()["paths"]
    assert {"/v1/files", "/v1/fine_tuning/jobs", "/v1/models"} <= paths.keys()


def test_every_reference_of_the_openapi_document_leads_somewhere(local: Any) -> None:
    document = local.http.get("/openapi.json")
    schemas = document.json()["components"]["schemas"]
    wanted = set(re.findall(r'"#/components/schemas/([^"]+)"', document.text))
    assert wanted <= schemas.keys()
    assert "defense" in schemas["JobRequest"]["properties"]


class Broken(LocalFileSystem):  # type: ignore[misc]
    """A file system that fails as remote ones do: with an error that is no OSError."""

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        raise RuntimeError("credentials expired")

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:
        raise RuntimeError("credentials expired")


def test_any_error_of_the_artifact_store_is_a_reason_not_to_be_ready(tmp_path: Any) -> None:
    settings = Settings(data_dir=tmp_path)
    upgrade(settings)
    app = create_app(settings)
    gateway = app.state.gateway
    gateway.artifacts = ArtifactStore(Broken(), str(tmp_path))
    gateway.artifact_probe = ArtifactProbe(gateway.artifacts)
    ready = asyncio.run(_ask(app, "/readyz"))
    assert ready.status_code == 503
    assert ready.json()["reasons"] == ["the artifact store cannot be written"]
    gateway.discard("files/x")


def test_readiness_writes_to_the_artifact_store_only_now_and_then(tmp_path: Path) -> None:
    store = ArtifactStore.from_url(tmp_path.as_uri())
    kept, fresh = ArtifactProbe(store, 3600.0), ArtifactProbe(store, 0.0)
    assert (kept.writable(), fresh.writable()) == (True, True)
    store._fs = Broken()
    assert (kept.writable(), fresh.writable()) == (True, False)
