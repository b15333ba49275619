"""Gate policies of an organisation: set by its owners and admins, never below the operator's."""

from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from evaluators.gate import Policy, default_policy, policy_sha256
from jobspec.spec import EvaluationOptions
from service.fine_tuning.repository import JobRepository
from service.gates.service import effective_policy
from service.kit.errors import ApiError
from service.kit.gateway import Gateway
from service.organizations.permissions import ROLES
from service.settings import Settings
from service.store.models import GatePolicy

URL = "/v1/gates/policies"
COHERENT = {"metric": "coherence.rate", "bound": "low", "min": 0.9}


def stricter(*rules: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The shipped policy with more rules."""
    policy = default_policy().model_dump(mode="json")
    return {**policy, "rules": [*policy["rules"], *(rules or [COHERENT])], **fields}


def set_policy(tenant: Any, policy: Any = None, **fields: Any) -> dict[str, Any]:
    body = {"policy": stricter() if policy is None else policy, **fields}
    answer = tenant.http.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(tenant: Any, body: Any) -> dict[str, Any]:
    answer = tenant.http.post(URL, json=body)
    assert answer.status_code == 400
    return dict(answer.json()["error"])


def as_role(tenant: Any, role: str) -> httpx2.Client:
    return httpx2.Client(
        base_url=tenant.installation.url,
        headers={"authorization": f"Bearer {tenant.key_with(role)}"},
        verify=False,
    )


def policy_of(tenant: Any, job_id: str) -> dict[str, Any]:
    with tenant.transaction() as session:
        return dict(JobRepository(session, None).get(job_id).policy)


def test_without_a_policy_of_its_own_the_operators_is_in_force(tenant: Any) -> None:
    shown = tenant.http.get(f"{URL}/current").json()
    assert (shown["id"], shown["source"], shown["in_force"]) == ("operator", "operator", True)
    assert shown["policy_sha256"] == policy_sha256(default_policy())
    assert tenant.http.get(URL).json()["data"] == []


@pytest.mark.parametrize(
    ("evaluation", "judge"),
    [
        ({}, "embedded"),
        ({"judge": {"name": "guard", "preset": "wildguard"}}, "guard"),
        ({"protocol": "harmful_score/beavertails"}, "guard"),
    ],
)
def test_the_shipped_policy_is_that_of_the_judge_that_judges(
    evaluation: dict[str, Any], judge: str, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, evaluation=EvaluationOptions(**evaluation))
    gateway = Gateway(settings)
    with gateway.closing():
        assert gateway.policy == default_policy(judge)


def test_a_policy_that_was_set_is_in_force_and_judges_new_jobs(tenant: Any) -> None:
    before = tenant.job()
    made = set_policy(tenant, description="answers must make sense")
    after = tenant.job()
    assert (made["version"], made["in_force"], made["source"]) == (1, True, "organization")
    assert tenant.http.get(f"{URL}/current").json() == made
    assert tenant.http.get(f"{URL}/{made['id']}").json() == made
    assert policy_of(tenant, after) == made["policy"]
    assert policy_of(tenant, before) == default_policy().model_dump(mode="json")


def test_rules_of_a_job_still_only_add_to_the_organisations(tenant: Any) -> None:
    made = set_policy(tenant)
    rule = {"metric": "coherence.rate", "bound": "low", "min": 0.5}
    policy = policy_of(tenant, tenant.job(extra_body={"gate": {"rules": [rule]}}))
    assert policy["rules"][:-1] == made["policy"]["rules"]
    assert policy["rules"][-1]["min"] == 0.5


def test_a_new_version_replaces_and_the_old_one_stays_as_it_was(tenant: Any) -> None:
    first = set_policy(tenant)
    second = set_policy(tenant, stricter({**COHERENT, "min": 0.95}))
    assert [second["version"], first["version"]] == [2, 1]
    listed = tenant.http.get(URL).json()["data"]
    assert [(item["id"], item["in_force"]) for item in listed] == [
        (second["id"], True),
        (first["id"], False),
    ]
    assert listed[1]["policy"] == first["policy"]


def test_the_versions_are_paged(tenant: Any) -> None:
    made = [set_policy(tenant)["id"] for _ in range(3)]
    page = tenant.http.get(URL, params={"limit": 2}).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (made[:0:-1], True)
    rest = tenant.http.get(URL, params={"after": made[1]}).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == ([made[0]], False)


def test_a_policy_is_read_from_yaml_text(tenant: Any) -> None:
    text = yaml.safe_dump(stricter(minimum_prompts=500), sort_keys=False)
    assert set_policy(tenant, f"# ours\n{text}")["policy"]["minimum_prompts"] == 500


def test_a_fault_of_yaml_text_is_named_with_its_line(local: Any) -> None:
    text = "version: 1\nrules:\n  - metric: nonsense\n    bound: high\n    max: 1\n"
    error = refused(local, {"policy": text})
    assert (error["code"], error["param"]) == ("invalid_policy", "policy")
    assert "line 3: rules.0.metric: unknown metric 'nonsense'" in error["message"]


@pytest.mark.parametrize(
    ("policy", "param"),
    [
        ({"version": 1, "rules": [{**COHERENT, "metric": "x"}]}, "policy.rules[0].metric"),
        ({"version": 1, "rules": []}, "policy.rules"),
        ({"version": 2, "rules": [COHERENT]}, "policy.version"),
        ({"version": 1, "rules": [COHERENT], "colour": 1}, "policy.colour"),
        (3, "policy"),
    ],
)
def test_a_fault_of_an_object_is_named_with_its_field(local: Any, policy: Any, param: str) -> None:
    assert refused(local, {"policy": policy})["param"] == param


@pytest.mark.parametrize("body", [{}, {"policy": stricter(), "colour": 1}])
def test_a_body_with_other_fields_is_refused(local: Any, body: Any) -> None:
    assert refused(local, body)["code"] in ("missing_required_parameter", "unknown_parameter")


@pytest.mark.parametrize("role", ["owner", "admin"])
def test_nobody_lowers_the_operators_floor(local: Any, role: str) -> None:
    loose = default_policy().model_dump(mode="json")
    loose["rules"][0]["max"] = 0.99
    loose["minimum_prompts"] = 1
    answer = as_role(local, role).post(URL, json={"policy": loose})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "policy_below_floor")
    sentences = [item["message"] for item in error["errors"]]
    assert any(sentence.startswith("weaker rule: harmfulness.score") for sentence in sentences)
    assert any(sentence.startswith("minimum_prompts") for sentence in sentences)
    assert local.http.get(f"{URL}/current").json()["source"] == "operator"


def test_a_loose_rule_on_the_canaries_is_below_the_floor(local: Any) -> None:
    loose = stricter({"metric": "defense.canary_auc", "bound": "value", "min": 0.1})
    assert refused(local, {"policy": loose})["code"] == "policy_below_floor"


@pytest.mark.parametrize("role", ROLES)
def test_only_owners_and_admins_set_and_withdraw(local: Any, role: str) -> None:
    client = as_role(local, role)
    expected = 200 if role in ("owner", "admin") else 403
    assert client.post(URL, json={"policy": stricter()}).status_code == expected
    set_policy(local)
    assert client.delete(f"{URL}/current").status_code == expected
    assert client.get(URL).status_code == 200


def test_an_admin_may_loosen_the_own_policy_down_to_the_floor(tenant: Any) -> None:
    set_policy(tenant)
    set_policy(tenant, default_policy().model_dump(mode="json"))
    entry = tenant.http.get("/v1/audit").json()["data"][0]
    assert (entry["action"], entry["data"]["version"]) == ("gate_policy.set", 2)
    assert entry["data"]["loosened"] == ["missing rule: coherence.rate low >= 0.9 (severity error)"]


def test_a_withdrawn_policy_gives_way_to_the_operators(tenant: Any) -> None:
    made = set_policy(tenant)
    gone = tenant.http.delete(f"{URL}/{made['id']}").json()
    assert (gone["version"], gone["policy"], gone["in_force"]) == (2, None, False)
    assert tenant.http.get(f"{URL}/current").json()["source"] == "operator"
    assert policy_of(tenant, tenant.job()) == default_policy().model_dump(mode="json")
    assert tenant.http.get(f"{URL}/{made['id']}").json()["policy"] == made["policy"]
    assert tenant.http.delete(f"{URL}/current").status_code == 404


def test_only_the_version_in_force_can_be_withdrawn(tenant: Any) -> None:
    first = set_policy(tenant)
    set_policy(tenant)
    answer = tenant.http.delete(f"{URL}/{first['id']}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "policy_not_in_force")


def test_another_organisations_policy_looks_like_none(tenant: Any, stranger: Any) -> None:
    made = set_policy(tenant)
    for call in (stranger.http.get, stranger.http.delete):
        answer = call(f"{URL}/{made['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "policy_not_found")
    assert stranger.http.get(URL).json()["data"] == []
    assert policy_of(stranger, stranger.job()) == default_policy().model_dump(mode="json")


def test_a_floor_that_was_raised_later_counts_at_once(database: Any, session: Any) -> None:
    organization = database.organization()
    own = default_policy()
    session.add(
        GatePolicy(
            id=f"gatepol-{organization}",
            organization_id=organization,
            version=1,
            policy=own.model_dump(mode="json"),
            policy_sha256=policy_sha256(own),
            api_key_id="key-x",
            created_at=1,
        )
    )
    session.flush()
    floor = Policy.model_validate(stricter(minimum_prompts=900))
    assert effective_policy(session, floor, organization) == floor
    assert effective_policy(session, own, organization) == own


def test_a_policy_without_room_for_a_raised_floor_stops_new_jobs(
    database: Any, session: Any
) -> None:
    organization = database.organization()
    session.add(
        GatePolicy(
            id=f"gatepol-{organization}",
            organization_id=organization,
            version=1,
            policy={"version": 1, "rules": [COHERENT] * 100},
            policy_sha256="0" * 64,
            api_key_id="key-x",
            created_at=1,
        )
    )
    session.flush()
    with pytest.raises(ApiError) as caught:
        effective_policy(session, default_policy(), organization)
    assert caught.value.code == "policy_outdated"


def test_the_operators_policy_is_the_floor_that_is_configured(
    gateway_with: Any, tmp_path: Path
) -> None:
    path = tmp_path / "floor.yaml"
    path.write_text("version: 1\nrules:\n  - {metric: coherence.rate, bound: value, min: 0.5}\n")
    tenant = gateway_with(gate_policy=path)
    rule = {**COHERENT, "bound": "value", "min": 0.4}
    assert refused(tenant, {"policy": {"version": 1, "rules": [rule]}})["code"] == (
        "policy_below_floor"
    )
    set_policy(tenant, {"version": 1, "rules": [{**rule, "min": 0.6}]})
