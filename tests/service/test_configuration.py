"""Settings, and what importing the gateway costs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from evaluators.gate import PolicyError
from service.app import create_app
from service.kit.ids import new_id
from service.settings import Settings


def test_everything_lives_in_the_data_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUNEGATE_DATA_DIR", raising=False)
    settings = Settings.load()
    assert settings.data_dir == tmp_path / ".tunegate"
    assert settings.database == f"sqlite:///{tmp_path}/.tunegate/tunegate.db"
    assert settings.artifacts == f"file://{tmp_path}/.tunegate/artifacts"
    assert settings.broker == "filesystem://"


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEGATE_DATABASE_URL", "postgresql://u:p@h/d")
    monkeypatch.setenv("TUNEGATE_EVALUATION", json.dumps({"harmful_prompts": 5}))
    monkeypatch.setenv("TUNEGATE_REQUIRE_DEFENSE", "true")
    settings = Settings.load()
    assert settings.database == "postgresql+psycopg://u:p@h/d"
    assert settings.evaluation.harmful_prompts == 5
    assert settings.require_defense


def test_the_cache_follows_the_xdg_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert Settings.load().cache_dir == Path("/somewhere/tunegate")


@pytest.mark.parametrize(
    ("name", "value"), [("max_attempts", 0), ("lease_seconds", -1), ("port", 70000)]
)
def test_a_setting_out_of_bounds_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings(**{name: value})


def test_a_gate_policy_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 2\nrules: []\n")
    with pytest.raises(PolicyError, match="version"):
        create_app(Settings(data_dir=tmp_path, gate_policy=policy))


def test_importing_the_gateway_loads_nothing_heavy() -> None:
    code = "import sys, service.app; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    roots = {name.partition(".")[0] for name in loaded}
    heavy = {"torch", "transformers", "alembic", "openai", "numpy", "celery", "defenses", "workers"}
    assert roots & heavy == set()
    assert {name for name in loaded if name.startswith("evaluators.")} <= {
        "evaluators.gate",
        "evaluators.gate.floor",
        "evaluators.gate.policy",
        "evaluators.gate.shortfall",
        "evaluators.gate.verdict",
        "evaluators.metric",
    }


def test_ids_are_unique_and_carry_their_kind() -> None:
    made = {new_id("ftjob") for _ in range(1000)}
    assert len(made) == 1000
    assert all(one.startswith("ftjob-") and len(one) == 30 for one in made)
    assert new_id("ftckpt").startswith("ftckpt_")


def test_event_ids_sort_by_time() -> None:
    made = [new_id("ftevent") for _ in range(1000)]
    assert made == sorted(made)
