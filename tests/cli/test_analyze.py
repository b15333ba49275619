"""`tunegate analyze`: files, exit codes, and what the pipeline's process reads."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from service.cli.analyze import analyze
from service.cli.output import CommandError, Ended
from workers.pipeline.analysis import question_key
from workers.pipeline.analysis_input import local_spec
from workers.pipeline.failure import PipelineFailure

REPOSITORY = Path(__file__).parents[2]
RISK = {"mu": 1.0, "baselines": [0.01, 0.1]}

app = typer.Typer()
app.command()(analyze)


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEGATE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs the command with a request; returns exit code, stdout and error."""

    def run(kind: str, request: Any, *arguments: str) -> tuple[int, str, str]:
        path = tmp_path / "request.json"
        path.write_text(request if isinstance(request, str) else json.dumps(request))
        common = [kind, "--input", str(path), "--out", str(tmp_path / "out")]
        return invoke(*common, *arguments)

    return run


def invoke(*arguments: str) -> tuple[int, str, str]:
    previous = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    done = CliRunner().invoke(app, list(arguments))
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), previous, strict=True):
        signal.signal(number, handler)
    error = done.exception
    code = error.exit_code if isinstance(error, CommandError | Ended) else done.exit_code
    return code, done.stdout, str(error) if isinstance(error, CommandError) else done.stderr


def test_an_answer_leaves_result_table_and_page(call: Any, tmp_path: Path) -> None:
    code, shown, notes = call("privacy.risk", RISK, "--seed", "5")
    assert code == 0
    assert "bounding the attack" in notes
    assert "worst_case: " in shown
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["kind"], result["seed"]) == ("privacy.risk", 5)
    # Closed form of mu-GDP: Phi(Phi^-1(x) + 1).
    assert [risk["max_success"] for risk in result["risks"]] == [
        pytest.approx(0.0923622, abs=1e-6),
        pytest.approx(0.3891437, abs=1e-6),
    ]
    assert pq.read_table(tmp_path / "out" / "curve.parquet").num_rows > 10
    assert (tmp_path / "out" / "index.html").read_text().startswith("<!doctype html>")
    assert not (tmp_path / "out" / "work").exists()


def test_the_result_is_json_on_request(call: Any, tmp_path: Path) -> None:
    code, shown, _ = call("privacy.risk", RISK, "--json")
    assert code == 0
    assert json.loads(shown) == json.loads((tmp_path / "out" / "result.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "KIND is missing"),
        (("privacy.risk",), "--input is missing"),
        (("privacy.risk", "--input", "/no/such/file", "--out", "OUT"), "no such file"),
        (("privacy.nothing", "--input", "INPUT", "--out", "OUT"), "known: "),
        (("privacy.risk", "--input", "INPUT", "--out", "OUT", "--file", "x"), "NAME=PATH"),
    ],
)
def test_bad_usage_ends_with_3_before_anything_is_made(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "request.json").write_text("{}")
    places = {"INPUT": str(tmp_path / "request.json"), "OUT": str(tmp_path / "out")}
    code, _, error = invoke(*(places.get(part, part) for part in arguments))
    assert code == 3
    assert words in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "request_", "words"),
    [
        ("privacy.risk", {"mu": -1}, "mu: "),
        ("privacy.risk", {"mu": 1, "rho": 1}, "exactly one of"),
        ("privacy.risk", {"mu": 1, "sigma": 1}, "sigma: "),
        ("privacy.risk", "[1]", "expected an object"),
        ("privacy.risk", "{", "not valid JSON"),
        ("attribution.final_model", {"targets": [{"prompt": "a", "completion": " "}]}, "targets.0"),
        (
            "attribution.final_model",
            {"targets": [{"prompt": "a", "completion": "b"}]},
            "name a job, or give",
        ),
    ],
)
def test_bad_input_ends_with_3_and_names_the_field(
    call: Any, tmp_path: Path, kind: str, request_: Any, words: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("{}")
    code, _, error = call(kind, request_)
    assert code == 3
    assert words in error
    assert not (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bundle", "EMPTY", "--training-file", "FILE"), "adapter_model.safetensors"),
        (("--bundle", "EMPTY"), "--training-file"),
        (("--bundle", "EMPTY", "--training-file", "/no/such/file"), "there is no file"),
        (("--file", "optimizer_state=/no/such/file"), "optimizer_state: there is no file"),
    ],
)
def test_a_job_or_file_that_is_not_there_ends_with_3(
    call: Any, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}")
    places = {"EMPTY": str(tmp_path / "empty"), "FILE": str(tmp_path / "rows.jsonl")}
    request = {"targets": [{"prompt": "a", "completion": "b"}]}
    code, _, error = call(
        "attribution.final_model", request, *(places.get(part, part) for part in arguments)
    )
    assert code == 3
    assert words in error


def test_kinds_are_listed(tmp_path: Path) -> None:
    code, shown, _ = invoke("--list")
    assert code == 0
    assert "privacy.calibrate" in shown
    code, shown, _ = invoke("--list", "--json")
    described = {kind["kind"]: kind for kind in json.loads(shown)}
    assert described["privacy.risk"]["example"]["steps"] == 1000


def test_the_command_loads_no_method() -> None:
    code = (
        "import sys\n"
        "from service.cli.analyze import _check_usage, _list\n"
        "_list(True)\n"
        "heavy = {'numpy', 'scipy', 'torch', 'pyarrow', 'dp_accounting'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def read(kind: str, source: Path, **options: Any) -> Any:
    asked = {"files": {}, "bundle": None, "training_file": None, "base": None, "catalogue": None}
    return local_spec(kind, source, **{**asked, "seed": 0, **options})


def test_files_are_found_beside_the_request(tmp_path: Path) -> None:
    (tmp_path / "round.npz").write_bytes(b"PK")
    (tmp_path / "policy.npz").write_bytes(b"PK")
    request = tmp_path / "request.yaml"
    request.write_text("buffer: round.npz\ntarget: {kind: return}\n")
    spec = read("attribution.online_rl", request, files={"policy": tmp_path / "policy.npz"})
    assert spec.files == {"buffer": tmp_path / "round.npz", "policy": tmp_path / "policy.npz"}
    assert spec.request["buffer"] == "round.npz"
    assert spec.request["policy"] == str(tmp_path / "policy.npz")


def test_a_bundle_is_found_where_a_run_leaves_it(
    tmp_path: Path, tiny_catalogue: Path, chat_file: Path
) -> None:
    bundle = tmp_path / "run" / "quarantine"
    bundle.mkdir(parents=True)
    (bundle / "adapter_model.safetensors").write_bytes(b"weights")
    report = {"job_id": "local", "model": {"name": "tiny"}}
    (bundle / "report.json").write_text(json.dumps(report))
    request = tmp_path / "request.json"
    request.write_text("{}")
    options = {"training_file": chat_file, "catalogue": tiny_catalogue}
    spec = read("attribution.final_model", request, bundle=tmp_path / "run", **options)
    assert spec.job.bundle == bundle
    assert (spec.job.job_id, spec.job.base.name) == ("local", "tiny")
    with pytest.raises(PipelineFailure, match="--base: 'other' is no folder"):
        read("attribution.final_model", request, bundle=bundle, base="other", **options)


def test_partial_results_belong_to_one_question_and_its_files(tmp_path: Path) -> None:
    request, data = tmp_path / "request.json", tmp_path / "round.npz"
    request.write_text(json.dumps({"buffer": "round.npz"}))
    data.write_bytes(b"one")
    first = question_key(read("attribution.online_rl", request))
    assert question_key(read("attribution.online_rl", request)) == first
    assert question_key(read("attribution.online_rl", request, seed=1)) != first
    data.write_bytes(b"two")
    assert question_key(read("attribution.online_rl", request)) != first


def test_dates_of_yaml_are_refused_in_words(tmp_path: Path) -> None:
    request = tmp_path / "request.yaml"
    request.write_text("mu: 2020-01-01\n")
    with pytest.raises(PipelineFailure, match="not JSON serializable"):
        read("privacy.risk", request)


@pytest.mark.slow
def test_ctrl_c_leaves_a_state_that_the_next_run_goes_on_from(call: Any, tmp_path: Path) -> None:
    program = (
        "import sys, typer\n"
        "from service.cli.analyze import analyze\n"
        "from service.cli.output import Ended\n"
        "app = typer.Typer(pretty_exceptions_enable=False)\n"
        "app.command()(analyze)\n"
        "try:\n"
        "    app()\n"
        "except Ended as ending:\n"
        "    sys.exit(ending.exit_code)\n"
    )
    request = {
        "experiment": "frozen_lake",
        "seeds": 3,
        "rounds": 4,
        "arms": ["ppo"],
        "ppo": {"n_steps": 512},
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    out = tmp_path / "out"
    process = subprocess.Popen(
        [
            sys.executable, "-c", program, "attribution.online_rl",
            "--input", str(tmp_path / "request.json"), "--out", str(out),
        ],
        cwd=REPOSITORY, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if list(out.glob("work/*/partial/*.json")) or line.startswith("publishing"):
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "run again with --out" in rest
    assert not (out / "result.json").exists()
    assert list(out.glob("work/*/partial/*.json"))
    code, _, _ = call("attribution.online_rl", request)
    assert code == 0
    assert (out / "result.json").is_file()
    assert not (out / "work").exists()


@pytest.mark.slow
def test_rows_behind_a_completion_are_told_from_a_bundle(
    call: Any, tmp_path: Path, tiny_catalogue: Path, chat_file: Path
) -> None:
    import torch

    from jobspec.catalogue import load_catalogue
    from workers.pipeline.models import attach_adapter, load_base

    entry = load_catalogue(tiny_catalogue).default
    base = load_base(entry, tmp_path / "cache")
    adapted = attach_adapter(base.model, entry.lora, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.02, generator=generator)
    bundle = tmp_path / "run" / "released"
    adapted.save_pretrained(bundle)
    base.tokenizer.save_pretrained(bundle)
    report = {"job_id": "local", "model": {"name": "tiny"}}
    (bundle / "report.json").write_text(json.dumps(report))
    request = {"targets": [{"prompt": "Say number 3", "completion": "Number 3"}]}
    code, _, error = call(
        "attribution.final_model", request, "--bundle", str(tmp_path / "run"),
        "--training-file", str(chat_file), "--catalogue", str(tiny_catalogue),
    )  # fmt: skip
    assert code == 0, error
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["job_id"], result["n_rows"]) == ("local", 16)
    assert pq.read_table(tmp_path / "out" / "scores.parquet").num_rows >= 16
