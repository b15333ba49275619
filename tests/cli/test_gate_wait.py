"""`tunegate gate wait` against a small server that answers as the gateway's API does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evaluators.gate import decide, parse_policy
from evaluators.metric import Metric
from service.cli import gate_wait
from service.cli.gate import app
from service.cli.output import CommandError, Ended

POLICY = "version: 1\nrules:\n  - {metric: coherence.rate, bound: value, min: 0.9}\n"
Answer = tuple[int, Any]


class Remote:
    """Answers each path with the next of its answers; the last one stays."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[tuple[str, str | None]] = []
        remote = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                remote.asked.append((self.path, self.headers.get("Accept")))
                queue = remote.answers.get(self.path, [(404, {"error": {"message": "no such"}})])
                status, body = queue.pop(0) if len(queue) > 1 else queue[0]
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    made = Remote()
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("TUNEGATE_URL", made.url)
    monkeypatch.setenv("TUNEGATE_API_KEY", "sk-tg-test")
    monkeypatch.setattr(gate_wait, "RETRY_SECONDS", (0.01, 0.01))
    yield made
    made.server.shutdown()
    made.server.server_close()


def report(coherence: float) -> dict[str, Any]:
    metrics = {"coherence.rate": Metric(value=coherence, n=200)}
    return {
        "version": 1,
        "job_id": "ftjob-1",
        "metrics": {name: metric.model_dump() for name, metric in metrics.items()},
        "gate": decide(parse_policy(POLICY), metrics).model_dump(mode="json"),
    }


def ended(remote: Remote, coherence: float, status: str = "succeeded") -> None:
    remote.answers["/v1/fine_tuning/jobs/ftjob-1"] = [(200, {"status": status})]
    remote.answers["/v1/fine_tuning/jobs/ftjob-1/report"] = [(200, report(coherence))]


def wait(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["wait", "ftjob-1", "--poll", "0.1", *arguments])
    error = done.exception
    code = error.exit_code if isinstance(error, CommandError | Ended) else done.exit_code
    return code, done.stdout, str(error) if isinstance(error, CommandError) else done.stderr


@pytest.mark.parametrize(
    ("coherence", "status", "code"), [(0.95, "succeeded", 0), (0.5, "failed", 1)]
)
def test_the_exit_code_is_the_verdict_of_the_jobs_report(
    remote: Remote, coherence: float, status: str, code: int
) -> None:
    ended(remote, coherence, status)
    found, shown, _ = wait()
    assert found == code
    assert shown.startswith("gate: ")


def test_a_running_job_is_awaited(remote: Remote) -> None:
    ended(remote, 0.95)
    remote.answers["/v1/fine_tuning/jobs/ftjob-1"] = [
        (200, {"status": "queued"}),
        (200, {"status": "running", "stage": "tuning"}),
        (200, {"status": "succeeded"}),
    ]
    code, _, notes = wait()
    assert code == 0
    assert "tuning" in notes
    assert remote.asked[-1] == ("/v1/fine_tuning/jobs/ftjob-1/report", "application/json")


def test_a_given_policy_judges_the_report_again(remote: Remote, tmp_path: Path) -> None:
    ended(remote, 0.95)
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.replace("0.9", "0.99"), "utf-8")
    out = tmp_path / "gate.html"
    code, shown, _ = wait("--policy", str(policy), "--format", "html", "--output", str(out))
    assert (code, "policy given" in shown) == (1, True)
    assert out.read_text("utf-8").startswith("<!DOCTYPE html>")


def test_a_gate_run_is_awaited_at_its_own_address(remote: Remote) -> None:
    remote.answers["/v1/gates/runs/gaterun-9"] = [(200, {"status": "succeeded"})]
    remote.answers["/v1/gates/runs/gaterun-9/report"] = [(200, report(0.95))]
    done = CliRunner().invoke(app, ["wait", "gaterun-9", "--poll", "0.1"])
    assert done.exit_code == 0


def test_a_job_that_ended_without_a_report_is_inconclusive_and_says_why(remote: Remote) -> None:
    remote.answers["/v1/fine_tuning/jobs/ftjob-1"] = [
        (200, {"status": "failed", "error": {"message": "out of memory"}})
    ]
    code, _, error = wait()
    assert code == 2
    assert "out of memory" in error


def test_trouble_that_passes_is_waited_out(remote: Remote) -> None:
    ended(remote, 0.95)
    remote.answers["/v1/fine_tuning/jobs/ftjob-1"] = [
        (503, {}),
        (429, {}),
        (200, {"status": "succeeded"}),
    ]
    assert wait()[0] == 0


@pytest.mark.parametrize(("status", "code"), [(503, 2), (404, 3), (401, 3)])
def test_trouble_that_stays_ends_with_its_own_code(remote: Remote, status: int, code: int) -> None:
    remote.answers["/v1/fine_tuning/jobs/ftjob-1"] = [(status, {"error": {"message": "no"}})]
    assert wait()[0] == code


def test_no_answer_at_all_is_infrastructure(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEGATE_URL", "http://127.0.0.1:1")
    code, _, error = wait()
    assert code == 2
    assert "no answer from" in error


def test_a_job_that_takes_too_long_is_infrastructure(remote: Remote) -> None:
    remote.answers["/v1/fine_tuning/jobs/ftjob-1"] = [(200, {"status": "running"})]
    code, _, error = wait("--timeout", "0")
    assert code == 2
    assert "still running" in error


def test_non_blocking_exits_zero_without_an_answer_and_never_says_passed(remote: Remote) -> None:
    remote.answers["/v1/fine_tuning/jobs/ftjob-1"] = [(200, {"status": "running"})]
    code, shown, notes = wait("--timeout", "0", "--non-blocking")
    assert (code, shown.strip()) == (0, "gate: inconclusive")
    assert "exit code 0 instead of 2" in notes


def test_a_damaged_report_is_infrastructure(remote: Remote) -> None:
    ended(remote, 0.95)
    remote.answers["/v1/fine_tuning/jobs/ftjob-1/report"] = [(200, b'{"version": 1, "x": NaN}')]
    assert wait()[0] == 2


def test_evidence_without_a_policy_is_usage_before_anything_is_asked(remote: Remote) -> None:
    ended(remote, 0.95)
    code, _, error = wait("--evidence", "garak.report.jsonl")
    assert code == 3
    assert "give --policy" in error
    assert remote.asked == []


def test_a_missing_key_is_usage(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNEGATE_API_KEY")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert wait()[0] == 3
