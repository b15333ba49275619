"""`tunegate gate`: exit codes and files, as a CI job sees them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evaluators.gate import Policy, decide, default_policy, parse_policy
from evaluators.metric import Metric
from service.cli.gate import app
from service.cli.output import CommandError, Ended

POLICY = "version: 1\nrules:\n  - {metric: coherence.rate, bound: value, min: 0.9}\n"


@pytest.fixture(autouse=True)
def no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def report(folder: Path, coherence: float | None) -> str:
    metrics = {"coherence.rate": Metric(value=coherence, n=200)}
    path = folder / "report.json"
    content = {
        "version": 1,
        "job_id": "ftjob-1",
        "metrics": {name: metric.model_dump() for name, metric in metrics.items()},
        "gate": decide(parse_policy(POLICY), metrics).model_dump(mode="json"),
    }
    path.write_text(json.dumps(content), "utf-8")
    return str(path)


def check(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["check", *arguments])
    error = done.exception
    code = error.exit_code if isinstance(error, CommandError | Ended) else done.exit_code
    return code, done.stdout, str(error) if isinstance(error, CommandError) else done.stderr


@pytest.mark.parametrize(
    ("coherence", "code", "verdict"),
    [(0.95, 0, "passed"), (0.5, 1, "failed"), (None, 2, "inconclusive")],
)
def test_the_exit_code_is_the_verdict(
    tmp_path: Path, coherence: float | None, code: int, verdict: str
) -> None:
    found, shown, notes = check("--report", report(tmp_path, coherence))
    assert (found, shown.splitlines()[0]) == (code, f"gate: {verdict}")
    assert "stored in the report" in notes


def test_a_given_policy_decides_again(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.replace("0.9", "0.99"), "utf-8")
    found, shown, _ = check("--report", report(tmp_path, 0.95), "--policy", str(policy))
    assert found == 1
    assert "policy given" in shown


@pytest.mark.parametrize("coherence", [0.5, None])
def test_non_blocking_tells_the_verdict_and_exits_zero(
    tmp_path: Path, coherence: float | None
) -> None:
    found, shown, notes = check("--report", report(tmp_path, coherence), "--non-blocking")
    assert found == 0
    assert "gate: passed" not in shown
    assert "non-blocking: exit code 0 instead of" in notes


def test_tolerated_failures_exit_zero_and_stay_failed(tmp_path: Path) -> None:
    found, shown, _ = check("--report", report(tmp_path, 0.5), "--max-failures", "1")
    assert (found, shown.splitlines()[0]) == (0, "gate: failed (tolerated by max-failures)")


def test_a_report_cannot_write_lines_of_its_own_into_the_log(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"version": 1, "metrics": {"a\n::set-output name=b::\x1b[2J": 1}}))
    code, _, error = check("--report", str(path))
    assert code == 2
    assert "set-output" in error
    assert not {"\n", "\x1b"} & set(error)


def test_an_absent_report_is_infrastructure(tmp_path: Path) -> None:
    assert check("--report", str(tmp_path / "none.json"))[0] == 2


def test_an_unknown_metric_in_the_policy_is_usage(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.replace("coherence.rate", "coherence.rat"), "utf-8")
    code, _, error = check(
        "--report", report(tmp_path, 0.95), "--policy", str(policy), "--non-blocking"
    )
    assert code == 3
    assert "unknown metric" in error


def test_json_and_another_format_need_a_file(tmp_path: Path) -> None:
    path, out = report(tmp_path, 0.95), tmp_path / "gate.xml"
    assert check("--report", path, "--json", "--format", "junit")[0] == 3
    code, shown, _ = check("--report", path, "--json", "--format", "junit", "--output", str(out))
    assert (code, json.loads(shown)["verdict"]) == (0, "passed")
    assert out.read_text("utf-8").startswith("<?xml")


def test_the_step_summary_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", "utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    check("--report", report(tmp_path, 0.5))
    assert summary.read_text("utf-8").startswith("before\n### gate: failed")


EVIDENCE_POLICY = """
version: 1
rules:
  - {metric: evidence.garak.dan.Dan_11_0.dan.DAN, bound: high, max: 0.1}
"""


def garak(folder: Path, passed: int, fails: int, complete: bool = True) -> str:
    counts = {"passed": passed, "fails": fails, "total_evaluated": passed + fails}
    rows: list[dict[str, Any]] = [
        {"entry_type": "init", "garak_version": "0.14.0"},
        {"entry_type": "eval", "probe": "dan.Dan_11_0", "detector": "dan.DAN", **counts},
        *([{"entry_type": "completion"}] if complete else []),
    ]
    path = folder / "garak.report.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("fails", "complete", "code"), [(0, True, 0), (90, True, 1), (0, False, 2)]
)
def test_evidence_counts_for_the_rules_of_a_policy(
    tmp_path: Path, fails: int, complete: bool, code: int
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(EVIDENCE_POLICY, "utf-8")
    evidence = garak(tmp_path, 100 - fails, fails, complete)
    arguments = ("--report", report(tmp_path, 0.95), "--policy", str(policy))
    found, _, words = check(*arguments, "--evidence", evidence)
    assert found == code
    assert ("no completion row" in words) == (not complete)
    assert check(*arguments)[0] == 2


def test_evidence_without_a_policy_is_usage(tmp_path: Path) -> None:
    arguments = ("--report", report(tmp_path, 0.95), "--evidence", garak(tmp_path, 10, 0))
    assert check(*arguments)[0] == 3


def test_evidence_that_no_rule_is_about_is_told(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY, "utf-8")
    code, shown, notes = check(
        "--report", report(tmp_path, 0.95), "--policy", str(policy),
        "--evidence", garak(tmp_path, 10, 0),
    )  # fmt: skip
    assert code == 0
    assert "no rule of the policy is about this evidence" in notes
    assert "evidence.garak.dan.Dan_11_0.dan.DAN: 0 [0, 0.2775], n = 10" in shown


def test_checking_a_report_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from service.cli.gate import app\n"
        f"try: app(['check', '--report', {report(tmp_path, 0.95)!r}, '--format', 'html'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'openai'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_the_parser_and_the_process_agree_on_usage(cli: Any) -> None:
    assert cli.run("gate", "check").returncode == 3


def test_the_schema_in_docs_is_the_policys() -> None:
    shown = CliRunner().invoke(app, ["schema"]).stdout
    stored = Path(__file__).parents[2] / "docs" / "policy.schema.json"
    assert stored.read_text("utf-8") == shown
    assert json.loads(shown) == Policy.model_json_schema()


@pytest.mark.parametrize("judge", ["embedded", "guard"])
def test_the_shipped_policies_are_valid_by_the_schema_in_docs(judge: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="a development dependency")
    stored = Path(__file__).parents[2] / "docs" / "policy.schema.json"
    validator = jsonschema.Draft202012Validator(json.loads(stored.read_text("utf-8")))
    policy = default_policy(judge).model_dump(mode="json")
    assert [error.message for error in validator.iter_errors(policy)] == []
    for metric in ("evidence.garak.x", "harm"):
        policy["rules"][0]["metric"] = metric
        assert validator.is_valid(policy) == (metric != "harm")
