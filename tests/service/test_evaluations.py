"""Calibration of a scorer, and homogeneity of released models, over HTTP."""

import io
import itertools
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import openai
import pytest

from evaluators.diversity.store import ANSWERS, write_answers
from service.evaluations import service as evaluations
from service.evaluations.stored_answers import AnswersCache
from service.fine_tuning.repository import JobRepository
from service.store.models import ReleasedModel

_SECONDS = itertools.count()
CALIBRATION = "/v1/evaluations/calibration"
HOMOGENEITY = "/v1/models/homogeneity"


class Letters:
    """One direction a letter: texts that begin alike are the same."""

    def __init__(self, name: str = "letters/mean/1", dimension: int = 26) -> None:
        self.id, self.dimension = name, dimension

    def embed(self, texts: Sequence[str]) -> Any:
        e_N_D = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            if text.strip():
                e_N_D[row, (ord(text[0]) - ord("a")) % self.dimension] = 1
        return e_N_D


def bundle(
    answers: dict[str, list[str]],
    embedder: Letters | None = None,
    refused: dict[str, list[bool]] | None = None,
) -> bytes:
    buffer = io.BytesIO()
    write_answers(buffer, answers, embedder or Letters(), refused)
    return buffer.getvalue()


def release(tenant: Any, content: bytes | None = None) -> str:
    """What a worker writes when a gate has passed, with stored answers where given."""
    job_id = tenant.job()
    with tenant.transaction() as session:
        job = JobRepository(session, None).get(job_id)
        name = f"ft:{job.model}:{tenant.organization}::{secrets.token_hex(4)}"
        location = f"released/{job_id}/1"
        files = {"adapter_config.json": b"{}"} | ({} if content is None else {ANSWERS: content})
        for path, data in files.items():
            tenant.installation.artifacts.put_stream(f"{location}/{path}", [data])
        session.add(
            ReleasedModel(
                id=name,
                organization_id=job.organization_id,
                job_id=job_id,
                base_model=job.model,
                location=location,
                manifest_sha256=secrets.token_hex(32),
                # Models of one second are listed by name.
                created_at=job.created_at + next(_SECONDS),
            )
        )
    return name


def compared(tenant: Any, **query: Any) -> Any:
    answer = tenant.http.get(HOMOGENEITY, params=query, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def calibrated(tenant: Any, **body: Any) -> Any:
    # A loaded machine may take longer than the client's default.
    answer = tenant.http.post(CALIBRATION, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def items(count: int = 60) -> list[dict[str, Any]]:
    return [
        {"query": f"q{i % 12}", "labels": [1 + i % 5, 3, 1 + (i // 5) % 5], "score": i % 7}
        for i in range(count)
    ]


def test_a_scorer_is_compared_with_its_raters(tenant: Any) -> None:
    found = calibrated(tenant, items=items())
    assert (found["object"], found["items"], found["queries"]) == (
        "evaluation.calibration", 60, 12,
    )  # fmt: skip
    full = found["subsets"][0]
    assert (full["family"], full["n"]) == ("full", 60)
    assert full["spearman"]["low"] <= full["spearman"]["value"] <= full["spearman"]["high"]
    assert calibrated(tenant, items=items()) == found


def test_preferences_are_compared_too(local: Any) -> None:
    rows = [
        {"query": "q", "labels": {"strongly_1": i % 3, "similar": 2}, "score_1": i, "score_2": 1}
        for i in range(20)
    ]
    found = calibrated(local, kind="pairwise", items=rows)
    assert found["disagreement"]["p_disagree"] > 0
    assert found["subsets"][0]["pearson"]["value"] is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [*items(5), {"query": "q", "labels": [9, 9], "score": 1}]}, "items[5].labels"),
        ({"items": items(3)}, "items"),
        ({"items": [{**row, "score": None} for row in items(5)]}, "items[0].score"),
        ({"items": items(5), "kind": "triple"}, "kind"),
        ({"items": items(5), "levels": 1}, "levels"),
        ({"items": items(5), "seed": -1}, "seed"),
        ({"items": items(5), "rounds": 10}, "rounds"),
        ({"items": "none"}, "items"),
        ({}, "items"),
        ({"items": [items(1)[0]] * 2001}, "items"),
    ],
)
def test_a_wrong_request_names_the_item_and_field(
    local: Any, body: dict[str, Any], param: str
) -> None:
    answer = local.http.post(CALIBRATION, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_the_message_counts_items_and_not_lines(local: Any) -> None:
    rows = [*items(5), {"query": "", "labels": [1, 2], "score": 1}]
    message = local.http.post(CALIBRATION, json={"items": rows}).json()["error"]["message"]
    assert message.startswith("Item 6: ")


def test_a_body_that_is_too_large_is_refused(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.evaluations.endpoints.MAX_BODY_BYTES", 100)
    assert local.http.post(CALIBRATION, json={"items": items()}).status_code == 413


def test_too_many_at_once_are_sent_away(local: Any) -> None:
    with evaluations.turn(), evaluations.turn():
        for answer in (
            local.http.post(CALIBRATION, json={"items": items(5)}),
            local.http.get(HOMOGENEITY),
        ):
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "evaluations_busy"
            assert answer.headers["retry-after"] == "5"
    assert local.http.get(HOMOGENEITY).status_code == 200


@pytest.mark.parametrize("role", ["owner", "admin", "member", "auditor", "ci"])
def test_every_role_may_look(local: Any, role: str) -> None:
    headers = {"authorization": f"Bearer {local.key_with(role)}"}
    assert local.http.get(HOMOGENEITY, headers=headers).status_code == 200
    body = {"items": items(5)}
    answer = local.http.post(CALIBRATION, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200


def test_without_a_key_nobody_may(local: Any) -> None:
    headers = {"authorization": "Bearer none"}
    assert local.http.get(HOMOGENEITY, headers=headers).status_code == 401
    assert local.http.post(CALIBRATION, json={}, headers=headers).status_code == 401


def test_released_models_are_compared_by_their_stored_answers(tenant: Any) -> None:
    first = release(tenant, bundle({"open-0001": ["a1", "b1"], "open-0002": ["c1", "c2"]}))
    second = release(tenant, bundle({"open-0001": ["a2", "z1"], "open-0002": ["d1", "d2"]}))
    found = compared(tenant)
    assert (found["object"], found["models"], found["queries"]) == (
        "model.homogeneity", [first, second], 2,
    )  # fmt: skip
    # Query 1: one of four pairs is alike, query 2: none. Inside: 0 and 1 for both models.
    assert found["matrix"] == [pytest.approx([0.5, 0.125]), pytest.approx([0.125, 0.5])]
    assert found["low"][0][1] <= 0.125 <= found["high"][0][1]
    assert found["mixing"]["5"] is None
    pair = found["similar_pairs"][0]
    assert (pair["query_id"], pair["text"], pair["other_text"]) == ("open-0001", "a1", "a2")
    assert (pair["model"], pair["other_model"]) == (first, second)
    assert pair["query"].startswith("Write a short scene")
    assert found["embedder"]["embedder_id"] == "letters/mean/1"
    assert found["embedder"]["calibrated"] is False
    assert found["not_measured"] == []


def test_models_are_chosen_by_name_in_that_order(tenant: Any) -> None:
    names = [release(tenant, bundle({"q": [letter, letter]})) for letter in "abc"]
    found = compared(tenant, models=[names[2], names[0], names[2]])
    assert found["models"] == [names[2], names[0]]
    assert found["similar_pairs"][0]["query"] is None


def test_models_without_answers_are_listed_with_the_reason(tenant: Any) -> None:
    good = release(tenant, bundle({"q": ["a", "b"]}))
    bare, broken = release(tenant), release(tenant, b"PAR1 no table")
    other = release(tenant, bundle({"q": ["a", "b"]}, Letters("other", 9)))
    also = release(tenant, bundle({"q": ["a", "c"]}))
    base = tenant.client.models.list().data[0].id
    found = compared(tenant, models=[good, bare, broken, other, also, base])
    assert found["models"] == [good, also]
    reasons = {entry["model"]: entry["reason"] for entry in found["not_measured"]}
    assert set(reasons) == {bare, broken, other, base}
    assert "no answers" in reasons[bare]
    assert "cannot be read" in reasons[broken]
    assert "other, 9 wide" in reasons[other]
    assert "base model" in reasons[base]


def test_refusals_can_be_left_out(tenant: Any) -> None:
    refused = {"q": [True, False, False]}
    first = release(tenant, bundle({"q": ["no", "a", "b"]}, refused=refused))
    second = release(tenant, bundle({"q": ["no", "c", "d"]}, refused=refused))
    with_them = compared(tenant, models=[first, second])
    without = compared(tenant, models=[first, second], refusals=False)
    assert with_them["matrix"][0][1] == pytest.approx(1 / 9)
    assert without["matrix"][0][1] == pytest.approx(0)
    assert (with_them["refusals"], without["refusals"]) == (True, False)


def test_no_released_model_is_an_empty_matrix(tenant: Any) -> None:
    found = compared(tenant)
    assert (found["models"], found["matrix"], found["embedder"]) == ([], [], None)


def test_pairs_can_be_limited(tenant: Any) -> None:
    for letter in "ab":
        release(tenant, bundle({f"q{i}": [letter, "x"] for i in range(4)}))
    assert len(compared(tenant)["similar_pairs"]) == 4
    assert len(compared(tenant, pairs=1)["similar_pairs"]) == 1
    assert compared(tenant, pairs=0)["similar_pairs"] == []


def test_another_organisations_model_is_neither_found_nor_compared(
    tenant: Any, stranger: Any
) -> None:
    name = release(tenant, bundle({"q": ["a", "b"]}))
    assert compared(stranger)["models"] == []
    answer = stranger.http.get(HOMOGENEITY, params={"models": name})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_a_deleted_model_is_gone_from_the_comparison(tenant: Any) -> None:
    name = release(tenant, bundle({"q": ["a", "b"]}))
    assert compared(tenant)["models"] == [name]
    tenant.client.models.delete(name)
    assert compared(tenant)["models"] == []


def test_only_the_newest_models_are_compared_unless_named(
    tenant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations, "MAX_MODELS", 2)
    names = [release(tenant, bundle({"q": ["a", letter]})) for letter in "bcd"]
    found = compared(tenant)
    assert found["models"] == names[1:]
    assert [entry["model"] for entry in found["not_measured"]] == names[:1]
    answer = tenant.http.get(HOMOGENEITY, params={"models": names})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "models")


def test_too_many_answers_are_refused(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "MAX_ANSWERS", 3)
    for letter in "ab":
        release(local, bundle({"q": ["x", letter]}))
    answer = local.http.get(HOMOGENEITY)
    assert answer.status_code == 400
    assert "4 stored answers; at most 3" in answer.json()["error"]["message"]


def test_a_file_that_is_too_large_is_not_read(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.evaluations.stored_answers.MAX_FILE_BYTES", 10)
    name = release(local, bundle({"q": ["a", "b"]}))
    assert compared(local)["not_measured"][0]["model"] == name


@pytest.mark.parametrize(("name", "value"), [("pairs", -1), ("pairs", 101), ("refusals", "maybe")])
def test_a_wrong_parameter_is_named(local: Any, name: str, value: Any) -> None:
    answer = local.http.get(HOMOGENEITY, params={name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_the_name_is_no_model_for_the_other_routes(local: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        local.client.models.delete("homogeneity")


def test_the_cache_gives_its_least_used_entry_up() -> None:
    cache = AnswersCache(limit=10)
    kept: Any = object()
    cache.put("a", kept, 4)
    cache.put("b", kept, 4)
    assert cache.get("a") is kept
    cache.put("c", kept, 4)
    assert [cache.get(key) is kept for key in "abc"] == [True, False, True]
    cache.put("large", kept, 11)
    assert cache.get("large") is None
