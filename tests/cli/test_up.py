"""`tunegate up`: everything starts, everything stops, and a job goes the whole way."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

# Enough prompts for a verdict under the policy below, few enough for a test. Four steps of a random
# model separate no canaries, so the policy says that it does not ask for it.
EVALUATION = json.dumps(
    {
        "harmful_prompts": 4,
        "safe_lookalikes": 4,
        "benign_prompts": 2,
        "open_ended_prompts": 2,
        "open_ended_samples": 2,
        "search_prompts": 2,
        "sweep_prompts": 2,
        "sweep_conditions": 2,
        "utility_rows": 2,
        "max_new_tokens": 4,
    }
)
POLICY = """
version: 1
minimum_prompts: 1
# A model made of random numbers often says nothing, or one word.
maximum_unresolved: 1.0
maximum_one_word: 1.0
rules:
  - {metric: harmfulness.score_plus, bound: value, max: 1.0}
  - {metric: defense.canary_auc, bound: value, min: 0.0, severity: warning}
"""


def ready(process: Any) -> dict[str, str]:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return dict(json.loads(line))


def children(process: Any) -> list[psutil.Process]:
    return list(psutil.Process(process.pid).children(recursive=True))


def test_the_first_start_shows_a_key_and_the_second_does_not(cli: Any) -> None:
    first = cli.start("up", "--port", "0", "--json")
    shown = ready(first)
    assert shown["key"].startswith("sk-tg-")
    client = OpenAI(base_url=f"{shown['url']}/v1", api_key=shown["key"])
    assert client.models.list().data
    made = cli.run("keys", "create", "--organization", "acme", "--role", "member", "--json")
    assert OpenAI(
        base_url=f"{shown['url']}/v1", api_key=json.loads(made.stdout)["key"]
    ).models.list()
    programs = children(first)
    assert len(programs) == 3
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 0
    assert not any(program.is_running() for program in programs)
    assert set(ready(cli.start("up", "--port", "0", "--json"))) == {"url"}


def test_a_data_folder_is_served_once(cli: Any) -> None:
    ready(cli.start("up", "--port", "0", "--json"))
    second = cli.run("up", "--port", "0")
    assert second.returncode == 3
    assert "already served" in second.stderr


def test_a_port_in_use_is_told_in_words(cli: Any) -> None:
    url = ready(cli.start("up", "--port", "0", "--json"))["url"]
    other = cli.run(
        "up", "--port", url.rpartition(":")[2], TUNEGATE_DATA_DIR=str(cli.data_dir / "other")
    )
    assert other.returncode == 3
    assert "--port" in other.stderr
    # A first key that nobody saw would lock its owner out.
    again = ready(
        cli.start("up", "--port", "0", "--json", TUNEGATE_DATA_DIR=str(cli.data_dir / "other"))
    )
    assert again["key"].startswith("sk-tg-")


def test_a_crashed_part_is_started_again(cli: Any, eventually: Any) -> None:
    process = cli.start("up", "--port", "0", "--json")
    ready(process)
    before = {program.pid for program in children(process)}
    gateway = next(item for item in children(process) if "uvicorn" in item.cmdline())
    gateway.kill()
    eventually(lambda: len({item.pid for item in children(process)} - before) == 1)


def test_after_kill_9_nothing_is_left(cli: Any, eventually: Any) -> None:
    process = cli.start("up", "--port", "0", "--json")
    ready(process)
    programs = children(process)
    process.kill()
    eventually(lambda: not any(program.is_running() for program in programs))


def test_the_gateway_runs_alone_with_a_dispatcher(cli: Any, eventually: Any) -> None:
    cli.run("db", "upgrade")
    process = cli.start("serve", "--port", "0", "--with-dispatcher", "--json")
    url = ready(process)["url"]

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    eventually(answers)


@pytest.mark.slow
def test_a_job_goes_from_upload_to_a_released_model(
    cli: Any, tmp_path: Path, tiny_catalogue: Path, chat_file: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    process = cli.start(
        "up",
        "--port",
        "0",
        "--json",
        TUNEGATE_CATALOGUE=str(tiny_catalogue),
        TUNEGATE_GATE_POLICY=str(policy),
        TUNEGATE_EVALUATION=EVALUATION,
        TUNEGATE_CHECKPOINTS='{"every_steps": 2}',
        TUNEGATE_WORKER_THREADS="1",
    )
    shown = ready(process)
    client = OpenAI(base_url=f"{shown['url']}/v1", api_key=shown["key"])
    with chat_file.open("rb") as rows:
        file = client.files.create(file=rows, purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=file.id,
        suffix="numbers",
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}},
    )
    reach = {"TUNEGATE_URL": shown["url"], "TUNEGATE_API_KEY": shown["key"]}
    watched = cli.run("jobs", "watch", job.id, "--json", **reach)
    finished = json.loads(watched.stdout)
    assert finished["error"] is None, watched.stderr
    assert (watched.returncode, finished["status"]) == (0, "succeeded")
    model = finished["fine_tuned_model"]
    assert model.startswith("ft:tiny:default:numbers:")
    assert client.models.retrieve(model).id == model
    content = client.files.content(finished["result_files"][0]).text
    assert content.startswith(
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy,"
    )
    assert client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert "New fine-tuned model created" in watched.stderr
    assert json.loads(cli.run("jobs", "list", "--json", **reach).stdout)[0]["id"] == job.id
    assert json.loads(cli.run("jobs", "show", job.id, "--json", **reach).stdout)["report"]
    assert cli.run("jobs", "cancel", job.id, **reach).returncode == 3
