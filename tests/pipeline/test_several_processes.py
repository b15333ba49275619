"""Two processes that share a job (gloo, CPU) do what one does."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jobspec.spec import JobSpec


def run_child(spec: JobSpec, work: Path, launcher: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The events of one attempt, run as the supervisor runs it."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "spec.json").write_text(spec.model_dump_json())
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            "-m",
            "workers.pipeline",
            str(work / "spec.json"),
            "--work",
            str(work),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_torchrun_starts_the_same_job(make_spec, tmp_path: Path):
    spec = make_spec()
    alone = run_child(spec, tmp_path / "alone")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    shared = run_child(spec, tmp_path / "shared", launcher)
    losses = [
        [event["objective"] for event in events if event["event"] == "metrics"]
        for events in (alone, shared)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def shared_by(spec: JobSpec, processes: int) -> JobSpec:
    return spec.model_copy(update={"model": spec.model.model_copy(update={"processes": processes})})


@pytest.mark.slow
@pytest.mark.parametrize(
    "defense",
    [
        {"scheduler": {"name": "bds", "alignment_rows": 12}, "perturbation": {"mode": "none"}},
        {
            "scheduler": {"name": "bds", "alignment_rows": 12},
            "perturbation": {"mode": "joint", "strength": 0.1, "scales": [0.5]},
        },
        {"scheduler": {"name": "lisa"}, "perturbation": {"mode": "none"}},
    ],
    ids=["bds", "bds+panacea", "lisa"],
)
def test_two_processes_end_with_the_tensors_of_one(make_spec, tmp_path: Path, defense: Any):
    spec = make_spec(defense=defense)
    events = {n: run_child(shared_by(spec, n), tmp_path / str(n)) for n in (1, 2)}
    states = {
        n: load_file(
            sorted((tmp_path / str(n) / "checkpoints").iterdir())[-1] / "state.safetensors"
        )
        for n in (1, 2)
    }
    assert set(states[1]) == set(states[2])
    for name, expected in states[1].items():
        if name != "random":
            torch.testing.assert_close(states[2][name], expected, rtol=2e-4, atol=1e-5, msg=name)
    losses = {
        n: [event["objective"] for event in found if event["event"] == "metrics"]
        for n, found in events.items()
    }
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert events[2][-1]["event"] == "result"
    assert sum(event["event"] == "result" for event in events[2]) == 1


@pytest.mark.slow
def test_two_processes_resume_where_two_stopped(make_spec, tmp_path: Path):
    spec = shared_by(make_spec(), 2)
    whole = run_child(spec, tmp_path / "whole")
    oldest = sorted((tmp_path / "whole" / "checkpoints").iterdir())[0]
    shutil.copytree(oldest, tmp_path / "resumed" / "checkpoints" / oldest.name)
    resumed = run_child(spec, tmp_path / "resumed")
    first = [event["train_loss"] for event in whole if event["event"] == "metrics"]
    rest = [event["train_loss"] for event in resumed if event["event"] == "metrics"]
    assert 0 < len(rest) < len(first)
    assert rest == pytest.approx(first[-len(rest) :], rel=1e-4)


def test_a_process_that_is_lost_ends_the_job(tmp_path: Path):
    code = (
        "import os, sys, time\n"
        "from workers.pipeline import ranks\n"
        "ranks._start = lambda n: __import__('subprocess').Popen(['false'])\n"
        "ranks.POLL_SECONDS = 0.05\n"
        "with ranks.other_ranks(2, lambda: os._exit(10)):\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 10
