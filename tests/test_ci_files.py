"""The CI files call commands and options that exist, and fit the schemas of their systems."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from evaluators.gate import parse_policy
from service.cli.gate import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy" / "ci"
EXAMPLES = ROOT / "examples" / "ci"
FILES = [
    *(DEPLOY / name for name in ("action.yml", "gitlab.yml", "Jenkinsfile")),
    DEPLOY / "pre-commit-hooks.yaml",
    EXAMPLES / "pre-commit-config.yaml",
]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
CALL = re.compile(r"tunegate gate (\w+)([^\n]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def options(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in parameter.opts}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_command_and_option_in_a_ci_file_exists(path: Path) -> None:
    calls = CALL.findall(path.read_text("utf-8"))
    assert calls
    for command, arguments in calls:
        assert set(OPTION.findall(arguments)) <= options(command)


def test_the_action_passes_options_that_its_command_has() -> None:
    script = (DEPLOY / "action.yml").read_text("utf-8").partition("run: |")[2]
    common, _, cases = script.partition('case "$COMMAND" in')
    for command in ("check", "run", "wait"):
        part = re.search(rf"\n +{command}\)\n(.*?)\n +;;", cases, re.DOTALL)
        assert part is not None
        assert f"tunegate gate {command} " in part[1]
        assert set(OPTION.findall(common + part[1])) <= options(command)


@pytest.mark.parametrize(
    "path", [*DEPLOY.glob("*.y*ml"), *EXAMPLES.glob("*.y*ml")], ids=lambda path: path.name
)
def test_the_yaml_files_parse(path: Path) -> None:
    assert yaml.safe_load(path.read_text("utf-8"))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("vendor.github-actions", DEPLOY / "action.yml"),
        ("vendor.github-workflows", EXAMPLES / "github-workflow.yml"),
        ("vendor.gitlab-ci", DEPLOY / "gitlab.yml"),
        ("vendor.gitlab-ci", EXAMPLES / "gitlab-ci.yml"),
    ],
)
def test_the_yaml_files_fit_the_schema_of_their_system(schema: str, path: Path) -> None:
    """By the copies of those schemas inside check-jsonschema; nothing is fetched."""
    pytest.importorskip("check_jsonschema", reason="a development dependency")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    extra = ["--data-transform", "gitlab-ci"] if "gitlab" in schema else []
    done = subprocess.run([*command, *extra, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("check", "name"),
    [("validate-manifest", "deploy/ci/pre-commit-hooks.yaml"),
     ("validate-config", "examples/ci/pre-commit-config.yaml")],
)  # fmt: skip
def test_the_hooks_are_what_pre_commit_reads(check: str, name: str) -> None:
    pytest.importorskip("pre_commit", reason="a development dependency")
    command = [sys.executable, "-m", "pre_commit", check, str(ROOT / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_inputs_of_the_action_never_enter_its_script() -> None:
    action = yaml.safe_load((DEPLOY / "action.yml").read_text("utf-8"))
    (step,) = action["runs"]["steps"]
    assert "${{" not in step["run"]
    assert len(step["env"]) == len(action["inputs"])


@pytest.mark.parametrize(
    ("inputs", "code", "called"),
    [
        (
            {"COMMAND": "check", "REPORT": "r.json", "EVIDENCE": "a b.jsonl\n\nc.json"},
            0,
            "gate check --report r.json {common} --evidence a b.jsonl --evidence c.json",
        ),
        (
            {"COMMAND": "run", "MODEL": "m", "OUT": "o", "ADAPTER": "a", "POLICY": "p.yaml"},
            0,
            "gate run --model m --out o {common} --policy p.yaml --adapter a",
        ),
        (
            {"COMMAND": "wait", "JOB": "ftjob-1", "TIMEOUT": "60", "NON_BLOCKING": "true"},
            0,
            "gate wait {common} --non-blocking --timeout 60 -- ftjob-1",
        ),
        ({"COMMAND": "rm"}, 3, ""),
    ],
)
def test_the_script_of_the_action_calls_the_command(
    tmp_path: Path, inputs: dict[str, str], code: int, called: str
) -> None:
    """A `tunegate` that writes down its arguments stands in for the real one."""
    action = yaml.safe_load((DEPLOY / "action.yml").read_text("utf-8"))
    (step,) = action["runs"]["steps"]
    recorder = tmp_path / "tunegate"
    recorder.write_text('#!/bin/sh\necho "$@"\n')
    recorder.chmod(0o755)
    given = dict.fromkeys(step["env"], "") | {
        "FORMAT": "junit", "OUTPUT": "g.xml", "MIN_SEVERITY": "error", "MAX_FAILURES": "0",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        env={**given, **inputs, "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    common = "--format junit --output g.xml --min-severity error --max-failures 0"
    assert (done.returncode, done.stdout.strip()) == (code, called.format(common=common))


def test_the_example_uses_inputs_that_the_action_has() -> None:
    action = yaml.safe_load((DEPLOY / "action.yml").read_text("utf-8"))
    example = yaml.safe_load((EXAMPLES / "github-workflow.yml").read_text("utf-8"))
    steps = [step for job in example["jobs"].values() for step in job["steps"]]
    used = [step["with"] for step in steps if step.get("uses", "").endswith("tunegate-gate")]
    assert {one.get("command", "check") for one in used} == {"check", "run", "wait"}
    assert all(set(one) <= set(action["inputs"]) for one in used)


def test_the_gitlab_example_extends_jobs_that_exist() -> None:
    template = yaml.safe_load((DEPLOY / "gitlab.yml").read_text("utf-8"))
    example = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text("utf-8"))
    extended = {job["extends"] for name, job in example.items() if name != "include"}
    assert extended == set(template)


def test_the_example_policy_is_valid() -> None:
    assert parse_policy((EXAMPLES / "policy.yaml").read_text("utf-8")).rules
