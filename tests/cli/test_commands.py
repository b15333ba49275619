"""Help, errors, keys and the database: commands that need no running service."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


def test_importing_the_command_loads_nothing_heavy() -> None:
    program = (
        "import sys, service.cli.main;"
        "print([n for n in ('fastapi', 'sqlalchemy', 'celery', 'torch', 'openai', 'pydantic',"
        " 'uvicorn', 'rich.console') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        ["up"],
        ["serve"],
        ["worker"],
        ["run"],
        ["demo"],
        ["version"],
        ["models", "align"],
        ["jobs", "list"],
        ["jobs", "show"],
        ["jobs", "watch"],
        ["jobs", "cancel"],
        ["jobs", "log"],
        ["keys", "create"],
        ["keys", "list"],
        ["keys", "revoke"],
        ["db", "upgrade"],
        ["gate", "plan"],
        ["gate", "run"],
        ["gate", "wait"],
        ["evaluators", "scorecard"],
        ["evaluators", "fit-harm"],
        ["evaluators", "calibrate"],
        ["audit", "verify"],
        ["analyze"],
        ["retune"],
        ["perturbation", "show"],
        ["perturbation", "rescale"],
        ["scheduler", "score"],
    ],
)
def test_every_command_has_help_and_json(cli: Any, command: list[str]) -> None:
    done = cli.run(*command, "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["keys", "create"],
        ["keys", "create", "--organization", "acme", "--role", "king"],
        ["keys", "create", "--organization", "no spaces allowed"],
        ["keys", "revoke", "key-unknown"],
        ["worker", "--slots", "0"],
        ["run", "/no/such/spec.yaml", "--out", "/tmp/never"],
        ["jobs", "list"],
        ["jobs", "log", "ftjob-unknown"],
    ],
)
def test_bad_input_ends_with_3_and_without_a_traceback(cli: Any, arguments: list[str]) -> None:
    cli.run("db", "upgrade")
    done = cli.run(*arguments)
    assert done.returncode == 3
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


def test_a_wrong_setting_is_named(cli: Any) -> None:
    done = cli.run("db", "upgrade", TUNEGATE_PORT="many")
    assert done.returncode == 3
    assert "TUNEGATE_PORT" in done.stderr


def test_a_database_without_tables_says_what_to_do(cli: Any) -> None:
    done = cli.run("keys", "list")
    assert done.returncode == 2
    assert "tunegate db upgrade" in done.stderr


def test_a_service_that_is_not_there_is_told_in_one_line(cli: Any) -> None:
    done = cli.run(
        "jobs", "list", "--json", TUNEGATE_URL="http://127.0.0.1:9", TUNEGATE_API_KEY="sk-tg-x"
    )
    assert done.returncode == 2
    assert "http://127.0.0.1:9" in json.loads(done.stderr)["error"]["message"]


def test_a_new_key_is_printed_with_exactly_four_fields(cli: Any) -> None:
    cli.run("db", "upgrade")
    done = cli.run("keys", "create", "--organization", "acme", "--role", "admin", "--json")
    made = json.loads(done.stdout)
    assert set(made) == {"id", "key", "organization", "role"}
    assert (made["organization"], made["role"]) == ("acme", "admin")
    listed = json.loads(cli.run("keys", "list", "--json").stdout)
    assert [key["id"] for key in listed] == [made["id"]]
    assert made["key"] not in cli.run("keys", "list").stdout


def test_a_revoked_key_is_shown_as_such(cli: Any) -> None:
    cli.run("db", "upgrade")
    made = json.loads(cli.run("keys", "create", "--organization", "acme", "--json").stdout)
    assert json.loads(cli.run("keys", "revoke", made["id"], "--json").stdout)["revoked"] is True
    assert json.loads(cli.run("keys", "list", "--json").stdout)[0]["revoked_at"] is not None


def test_the_database_is_upgraded_again_without_harm(cli: Any) -> None:
    first, second = cli.run("db", "upgrade", "--json"), cli.run("db", "upgrade", "--json")
    assert json.loads(first.stdout) == json.loads(second.stdout)


def test_a_job_without_a_service_leaves_a_report(
    cli: Any, tmp_path: Path, tiny_catalogue: Path, chat_file: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    small = {"harmful_prompts": 4, "safe_lookalikes": 4, "benign_prompts": 2, "search_prompts": 2}
    small |= {"open_ended_prompts": 2, "open_ended_samples": 2, "max_new_tokens": 4}
    rule = {"metric": "harmfulness.score_plus", "bound": "value", "max": 1.0}
    spec.write_text(
        json.dumps(
            {
                "training_file": str(chat_file),
                "catalogue": str(tiny_catalogue),
                "cache_dir": str(tmp_path / "cache"),
                "evaluation": {**small, "utility_rows": 2},
                "hyperparameters": {"n_epochs": 1},
                "defense": {"scheduler": "none", "perturbation": "none"},
                "policy": {"version": 1, "rules": [rule]},
            }
        )
    )
    done = cli.run("run", str(spec), "--out", str(tmp_path / "out"), "--json")
    answer = json.loads(done.stdout)
    # Four prompts are fewer than a policy accepts that does not say otherwise.
    assert (done.returncode, answer["verdict"]) == (2, "inconclusive")
    assert json.loads(Path(answer["report"]).read_text())["gate"]["verdict"] == "inconclusive"
    assert (Path(answer["bundle"]) / "adapter_model.safetensors").is_file()
    assert "training loss" in done.stderr


def test_a_job_whose_rows_are_bad_ends_with_3(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps({"training_file": "rows.jsonl", "unknown_field": 1}))
    done = cli.run("run", str(spec), "--out", str(tmp_path / "out"))
    assert done.returncode == 3
    assert "unknown_field" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gateway_that_cannot_start_says_why_and_announces_nothing(
    cli: Any, tmp_path: Path
) -> None:
    wrong = tmp_path / "policy.yaml"
    wrong.write_text("rules: 3")
    done = cli.run("serve", "--port", "0", "--json", TUNEGATE_GATE_POLICY=str(wrong))
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot start" in done.stderr
    assert "Traceback" not in done.stderr
