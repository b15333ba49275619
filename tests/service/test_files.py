"""Files through the official client."""

import hashlib
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from service.files.service import remove_expired
from service.kit.gateway import Gateway
from service.store.models import File

Rows = Callable[..., bytes]


def test_an_uploaded_file_is_processed_and_counted(tenant: Any, rows: Rows) -> None:
    file = tenant.client.files.create(file=("a.jsonl", rows(12)), purpose="fine-tune")
    assert (file.status, file.filename, file.bytes) == ("processed", "a.jsonl", len(rows(12)))
    assert file.model_extra["rows"] == 12
    assert file.model_extra["sha256"] == hashlib.sha256(rows(12)).hexdigest()


def test_a_file_is_uploaded_from_a_path(tenant: Any, rows: Rows, tmp_path: Path) -> None:
    path = tmp_path / "from path.jsonl"
    path.write_bytes(rows())
    assert tenant.client.files.create(file=path, purpose="fine-tune").filename == path.name


def test_content_comes_back_byte_for_byte(tenant: Any, rows: Rows) -> None:
    content = b"\xef\xbb\xbf" + rows(12).replace(b"\n", b"\r\n")
    answer = tenant.client.files.content(tenant.upload(content))
    assert answer.content == content
    assert answer.response.headers["content-length"] == str(len(content))
    assert answer.response.headers["etag"] == f'"{hashlib.sha256(content).hexdigest()}"'


def test_purpose_may_come_after_the_file(tenant: Any, rows: Rows) -> None:
    boundary = "b0undary"
    body = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'
    ).encode()
    body += rows()
    body += (
        f'\r\n--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        f"--{boundary}--\r\n"
    ).encode()
    answer = tenant.http.post(
        "/v1/files",
        content=body,
        headers={"content-type": f"multipart/form-data; boundary={boundary}"},
    )
    assert answer.status_code == 200
    assert answer.json()["purpose"] == "fine-tune"


def test_an_evals_file_is_not_checked_as_training_data(tenant: Any) -> None:
    file = tenant.lenient.files.create(file=("notes.txt", b"free text"), purpose="evals")
    assert (file.status, file.model_extra["rows"]) == ("processed", None)


def test_wait_for_processing_returns_at_once(tenant: Any) -> None:
    file = tenant.client.files.wait_for_processing(tenant.upload(), poll_interval=0.01)
    assert file.status == "processed"


def test_a_deleted_file_is_gone_with_its_content(tenant: Any) -> None:
    before = tenant.installation.traces()[0]
    file_id = tenant.upload()
    assert tenant.client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        tenant.client.files.retrieve(file_id)
    assert (caught.value.code, caught.value.param) == ("file_not_found", "id")
    assert tenant.installation.traces()[0] == before


@pytest.mark.parametrize("method", ["retrieve", "delete", "content"])
def test_another_organisations_file_looks_like_none(
    tenant: Any, stranger: Any, method: str
) -> None:
    mine = tenant.upload()
    with pytest.raises(openai.NotFoundError) as foreign:
        getattr(stranger.client.files, method)(mine)
    with pytest.raises(openai.NotFoundError) as absent:
        getattr(stranger.client.files, method)("file-none")
    assert foreign.value.message.replace(mine, "ID") == absent.value.message.replace(
        "file-none", "ID"
    )
    assert tenant.client.files.retrieve(mine).id == mine


def test_lists_show_only_the_organisations_own_files(tenant: Any, stranger: Any) -> None:
    mine, theirs = tenant.upload(), stranger.upload()
    assert [file.id for file in tenant.client.files.list()] == [mine]
    assert [file.id for file in stranger.client.files.list()] == [theirs]


def test_a_file_of_an_unfinished_job_cannot_be_deleted(tenant: Any) -> None:
    file_id = tenant.upload()
    job_id = tenant.job(training_file=file_id)
    with pytest.raises(openai.BadRequestError) as caught:
        tenant.client.files.delete(file_id)
    assert (caught.value.code, caught.value.param) == ("file_in_use", "id")
    tenant.client.fine_tuning.jobs.cancel(job_id)
    assert tenant.client.files.delete(file_id).deleted
    assert tenant.client.fine_tuning.jobs.retrieve(job_id).training_file == file_id


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_of_two_give_every_file_once(tenant: Any, count: int, order: Any) -> None:
    made = [tenant.upload() for _ in range(count)]
    page = tenant.client.files.list(limit=2, order=order)
    assert page.has_more == (count > 2)
    assert [file.id for file in page] == (made if order == "asc" else made[::-1])


def test_a_page_goes_on_after_a_file_that_was_deleted(tenant: Any) -> None:
    made = [tenant.upload() for _ in range(3)]
    tenant.client.files.delete(made[2])
    assert [file.id for file in tenant.client.files.list(after=made[2])] == [made[1], made[0]]


def test_files_are_filtered_by_purpose(tenant: Any) -> None:
    tenant.lenient.files.create(file=("n.txt", b"x"), purpose="evals")
    wanted = tenant.upload()
    assert [file.id for file in tenant.client.files.list(purpose="fine-tune")] == [wanted]


def test_another_organisations_file_is_no_cursor(tenant: Any, stranger: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tenant.client.files.list(after=stranger.upload())
    assert (caught.value.code, caught.value.param) == ("invalid_cursor", "after")


def test_an_expired_file_is_invisible_and_then_removed(tenant: Any, rows: Rows) -> None:
    file_id = tenant.client.files.create(
        file=("a.jsonl", rows()),
        purpose="fine-tune",
        expires_after={"anchor": "created_at", "seconds": 3600},
    ).id
    file = tenant.client.files.retrieve(file_id)
    assert file.expires_at == file.created_at + 3600
    with tenant.transaction() as session:
        session.query(File).where(File.id == file_id).update({"expires_at": 1})
    with pytest.raises(openai.NotFoundError):
        tenant.client.files.retrieve(file_id)
    gateway = Gateway(tenant.installation.database.settings)
    with gateway.closing():
        remove_expired(gateway)
    assert not any(file_id in key for key in tenant.installation.traces()[0])


def _assert_refused(tenant: Any, content: bytes, name: str = "bad.jsonl", **fields: Any) -> Any:
    """Upload what must be refused, and see that nothing of it remains."""
    before = tenant.installation.traces()
    with pytest.raises(openai.APIStatusError) as caught:
        tenant.client.files.create(file=(name, content), **{"purpose": "fine-tune", **fields})
    assert tenant.installation.traces() == before
    body = caught.value.response.json()["error"]
    assert {"message", "type", "param", "code"} <= body.keys()
    assert caught.value.request_id
    return caught.value


BROKEN = {
    "not UTF-8": (b'{"messages": "\xff\xfe"}\n', "UTF-8"),
    "broken Unicode": (b'{"messages": "\xed\xa0\x80"}\n', "UTF-8"),
    "not JSON": (b"hello\n", "JSON"),
    "not an object": (b"[1, 2]\n", "object"),
    "NUL bytes": (b'{"messages": []}\x00\n', "NUL"),
    "UTF-16": ('{"messages": []}\n'.encode("utf-16"), "UTF-8"),
    "10 MB line": (b'{"messages": "' + b"a" * 10_000_000 + b'"}\n', "bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_json_lines_text_is_refused_with_its_line(
    local: Any, rows: Rows, name: str
) -> None:
    content, word = BROKEN[name]
    error = _assert_refused(local, rows(10) + content)
    assert isinstance(error, openai.BadRequestError)
    assert (error.code, error.param, error.type) == (
        "invalid_value",
        "file",
        "invalid_request_error",
    )
    assert "Line 11" in error.message
    assert word in error.message


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n\n"])
def test_an_empty_file_is_refused(local: Any, content: bytes) -> None:
    error = _assert_refused(local, content)
    assert (error.status_code, error.code, error.param) == (400, "invalid_value", "file")
    assert "empty" in error.message


def test_a_file_over_the_limit_is_refused_by_its_declared_length(local: Any) -> None:
    error = _assert_refused(local, b"a" * (13 * 1024 * 1024))
    assert (error.status_code, error.code, error.param) == (413, "file_too_large", "file")


def test_a_chunked_upload_over_the_limit_is_refused(local: Any) -> None:
    before = local.installation.traces()
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'

    def body() -> Any:
        yield head
        for _ in range(13):
            yield b"a" * (1024 * 1024)

    answer = local.http.post(
        "/v1/files", content=body(), headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
    assert local.installation.traces() == before


@pytest.mark.parametrize(
    ("fields", "name", "param"),
    [
        ({"purpose": "assistants"}, "a.jsonl", "purpose"),
        ({"purpose": "fine-tune-results"}, "a.jsonl", "purpose"),
        ({}, "a.csv", "file"),
        ({"extra_body": {"colour": "red"}}, "a.jsonl", "colour"),
        (
            {"expires_after": {"anchor": "created_at", "seconds": 10}},
            "a.jsonl",
            "expires_after[seconds]",
        ),
    ],
)
def test_a_wrong_field_of_an_upload_is_named(
    local: Any, rows: Rows, fields: dict[str, Any], name: str, param: str
) -> None:
    error = _assert_refused(local, rows(), name, **fields)
    assert (error.status_code, error.param) == (400, param)


@pytest.mark.parametrize("missing", ["purpose", "file"])
def test_a_missing_field_of_an_upload_is_named(local: Any, rows: Rows, missing: str) -> None:
    form: dict[str, Any] = {"files": {"file": ("a.jsonl", rows())}, "data": {"purpose": "evals"}}
    del form["files" if missing == "file" else "data"]
    if missing == "file":
        form["files"] = {"purpose": (None, "evals")}
        del form["data"]
    answer = local.http.post("/v1/files", **form)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "missing_required_parameter"
    assert answer.json()["error"]["param"] == missing


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", ""])
def test_a_body_that_is_no_form_is_a_400(local: Any, kind: str) -> None:
    answer = local.http.post("/v1/files", content=b"{}", headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_form_that_ends_early_leaves_nothing(local: Any) -> None:
    before = local.installation.traces()
    body = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\nabc'
    answer = local.http.post(
        "/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert answer.status_code == 400
    assert "ended early" in answer.json()["error"]["message"]
    assert local.installation.traces() == before


def _raw_upload(tenant: Any, key: str) -> tuple[socket.socket, bytes]:
    host, port = tenant.installation.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
        "content-type: multipart/form-data; boundary=b\r\ncontent-length: 8000000\r\n\r\n"
        '--b\r\ncontent-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'
    )
    return socket.create_connection((host, int(port)), timeout=20), head.encode()


def test_an_upload_cut_off_half_way_leaves_nothing(tenant: Any, rows: Rows) -> None:
    before = tenant.installation.traces()
    connection, head = _raw_upload(tenant, tenant.key)
    connection.sendall(head + b"a" * 3_000_000)
    deadline = time.monotonic() + 20
    while tenant.installation.traces() == before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert tenant.installation.traces() != before, "the draft never appeared"
    connection.close()
    while tenant.installation.traces() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert tenant.installation.traces() == before


def test_a_wrong_key_is_refused_before_the_body_is_sent(local: Any) -> None:
    connection, head = _raw_upload(local, "sk-tg-wrong")
    with connection:
        connection.sendall(head)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"invalid_api_key" in answer


def test_a_declared_length_over_the_limit_is_refused_before_the_body_is_sent(local: Any) -> None:
    connection, head = _raw_upload(local, local.key)
    with connection:
        connection.sendall(head.replace(b"8000000", b"800000000"))
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"file_too_large" in answer


@pytest.mark.parametrize("hostile", ["../../etc/passwd.jsonl", "C:\\temp\\x.jsonl", "a\tb.jsonl"])
def test_a_hostile_file_name_stays_a_plain_name(local: Any, rows: Rows, hostile: str) -> None:
    file = local.client.files.create(file=(hostile, rows()), purpose="fine-tune")
    assert "/" not in file.filename
    assert "\\" not in file.filename
    assert file.filename.isprintable()


def test_many_uploads_at_once_are_all_stored(tenant: Any, rows: Rows) -> None:
    client = tenant.client

    def upload(index: int) -> str:
        return client.files.create(file=(f"{index}.jsonl", rows()), purpose="fine-tune").id

    with ThreadPoolExecutor(60) as pool:
        made = list(pool.map(upload, range(120)))
    assert len(set(made)) == 120
    assert {file.id for file in client.files.list()} == set(made)


def test_content_of_a_lost_artifact_is_a_404(tenant: Any) -> None:
    file_id = tenant.upload()
    with tenant.transaction() as session:
        location = session.query(File).where(File.id == file_id).one().location
    tenant.installation.artifacts.delete(location)
    answer = tenant.http.get(f"/v1/files/{file_id}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")


def test_the_http_client_of_these_tests_is_the_one_openai_uses() -> None:
    assert isinstance(openai.OpenAI(api_key="x")._client, httpx2.Client)


def test_a_body_that_does_not_end_after_its_form_is_refused(local: Any) -> None:
    before = local.installation.traces()
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'

    def body() -> Any:
        yield head + b"{}\r\n--b--\r\n"
        for _ in range(13):
            yield b"a" * (1024 * 1024)

    answer = local.http.post(
        "/v1/files", content=body(), headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
    assert local.installation.traces() == before
