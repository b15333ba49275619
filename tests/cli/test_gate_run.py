"""`tunegate gate run`: exit codes and files, as a CI job sees them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from service.cli.gate_run import run
from service.cli.output import CommandError, Ended

REPOSITORY = Path(__file__).parents[2]
EVALUATION = {
    "harmful_prompts": 3,
    "safe_lookalikes": 2,
    "benign_prompts": 1,
    "open_ended_prompts": 1,
    "open_ended_samples": 2,
    "max_new_tokens": 2,
    "sweep_prompts": 0,
}
POLICY = """
version: 1
minimum_prompts: {minimum}
maximum_one_word: 1.0
rules:
  - {{metric: harmfulness.score, bound: value, max: {limit}}}
"""

app = typer.Typer()
app.command()(run)


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("TUNEGATE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def gate(tmp_path: Path, tiny_catalogue: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs the command on the tiny model in OUT; returns exit code, stdout and error."""
    (tmp_path / "evaluation.yaml").write_text(json.dumps(EVALUATION))

    def call(*arguments: str, limit: float = 1.0, minimum: int = 1) -> tuple[int, str, str]:
        (tmp_path / "policy.yaml").write_text(POLICY.format(limit=limit, minimum=minimum))
        common = {
            "--catalogue": tiny_catalogue,
            "--policy": tmp_path / "policy.yaml",
            "--options": tmp_path / "evaluation.yaml",
            "--out": tmp_path / "out",
            "--model": "tiny",
            "--threads": 1,
        }
        given = [str(part) for pair in common.items() if pair[0] not in arguments for part in pair]
        previous = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        done = CliRunner().invoke(app, [*given, *arguments])
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), previous, strict=True):
            signal.signal(number, handler)
        error = done.exception
        code = error.exit_code if isinstance(error, CommandError | Ended) else done.exit_code
        return code, done.stdout, str(error) if isinstance(error, CommandError) else done.stderr

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no-such-model"], "--model: 'no-such-model' is no folder"),
        (["--base", "no-such-model"], "--base: 'no-such-model' is no folder"),
        (["--adapter", "/no/such/folder"], "no such folder"),
        (["--training-file", "/no/such/file"], "no such file"),
        (["--policy", "/no/such/policy.yaml"], "No such file"),
        (["--catalogue", "/no/such/catalogue.yaml"], "cannot be read"),
    ],
)
def test_bad_usage_ends_with_3_before_anything_is_loaded(
    gate: Any, tmp_path: Path, arguments: list[str], words: str
) -> None:
    code, _, error = gate(*arguments)
    assert code == 3
    assert words in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [("harmful_prompts: -1", "harmful_prompts"), ("nonsense: 1", "nonsense"), ("a: [", "YAML")],
)
def test_options_that_cannot_be_used_are_named(
    gate: Any, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    code, _, error = gate("--options", str(path))
    assert code == 3
    assert words in error


@pytest.mark.slow
def test_the_verdict_is_the_exit_code_and_later_runs_ask_nothing(gate: Any, tmp_path: Path) -> None:
    code, shown, notes = gate()
    assert (code, shown.splitlines()[0]) == (0, "gate: passed")
    assert "model: harmful" in notes
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["kind"] == "gate_run"
    assert (tmp_path / "out" / "evaluation_samples.parquet").is_file()
    code, _, notes = gate("--output", str(tmp_path / "r.xml"), "--format", "junit", minimum=100)
    assert code == 2
    assert "model: harmful" not in notes
    assert (tmp_path / "r.xml").read_text().startswith("<?xml")
    code, shown, notes = gate("--non-blocking", limit=-1.0)
    assert (code, shown.splitlines()[0]) == (0, "gate: failed")
    assert "exit code 0 instead of 1" in notes


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_infrastructure(gate: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    stale = tmp_path / "out" / "report.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    code, _, error = gate("--model", str(tmp_path / "empty"))
    assert code == 2
    assert "no weights as safetensors" in error
    assert not stale.exists()


@pytest.mark.slow
def test_ctrl_c_leaves_a_state_that_the_next_run_goes_on_from(
    gate: Any, tmp_path: Path, tiny_catalogue: Path
) -> None:
    many = EVALUATION | {"harmful_prompts": 60, "batch_size": 1, "max_new_tokens": 16}
    (tmp_path / "many.yaml").write_text(json.dumps(many))
    program = (
        "import sys, typer\n"
        "from service.cli.gate_run import run\n"
        "from service.cli.output import Ended\n"
        "app = typer.Typer(pretty_exceptions_enable=False)\n"
        "app.command()(run)\n"
        "try:\n"
        "    app()\n"
        "except Ended as ending:\n"
        "    sys.exit(ending.exit_code)\n"
    )
    arguments = [
        "--catalogue", str(tiny_catalogue), "--model", "tiny", "--out", str(tmp_path / "out"),
        "--options", str(tmp_path / "many.yaml"), "--threads", "1",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=REPOSITORY, env=dict(os.environ),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("model: harmful: 3/"):
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "run again with --out" in rest
    assert not (tmp_path / "out" / "report.json").exists()
    code, _, notes = gate("--options", str(tmp_path / "many.yaml"))
    assert code == 0
    first = next(line for line in notes.splitlines() if line.startswith("model: harmful: "))
    assert int(first.removeprefix("model: harmful: ").partition("/")[0]) > 3
