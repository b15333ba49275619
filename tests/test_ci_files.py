"""The CI files call the command that exists, with options that exist."""

import re
from pathlib import Path

import pytest
import typer
import yaml

from evaluators.gate import parse_policy
from service.cli.gate import app

ROOT = Path(__file__).parents[1]
FILES = ["action.yml", "gitlab.yml", "Jenkinsfile", "pre-commit-hooks.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_every_option_in_a_ci_file_exists(name: str) -> None:
    text = (ROOT / "deploy" / "ci" / name).read_text("utf-8")
    command = typer.main.get_command(app).commands["check"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert "tunegate gate check" in text
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known


@pytest.mark.parametrize("name", [name for name in FILES if name != "Jenkinsfile"])
def test_the_yaml_files_parse(name: str) -> None:
    assert yaml.safe_load((ROOT / "deploy" / "ci" / name).read_text("utf-8"))


def test_inputs_of_the_action_never_enter_its_script() -> None:
    action = yaml.safe_load((ROOT / "deploy" / "ci" / "action.yml").read_text("utf-8"))
    (step,) = action["runs"]["steps"]
    assert "${{" not in step["run"]
    assert len(step["env"]) == len(action["inputs"])


def test_the_example_uses_inputs_that_the_action_has() -> None:
    action = yaml.safe_load((ROOT / "deploy" / "ci" / "action.yml").read_text("utf-8"))
    example = yaml.safe_load((ROOT / "examples" / "ci" / "github-workflow.yml").read_text("utf-8"))
    used = example["jobs"]["gate"]["steps"][-1]["with"]
    assert set(used) <= set(action["inputs"])


def test_the_example_policy_is_valid() -> None:
    assert parse_policy((ROOT / "examples" / "ci" / "policy.yaml").read_text("utf-8")).rules
