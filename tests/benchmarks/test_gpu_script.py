import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "benchmarks/gpu/defense_steps.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script writes in its CPU mode, started as the README says, from another folder."""
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--shape", "tiny"]
    command += ["--rows", "2", "--tokens", "16", "--rounds", "1", "--output", "report.json"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_every_way_is_measured(report: dict[str, Any]):
    assert [(step["way"], step["failed"]) for step in report["steps"]] == [
        ("plain", None),
        ("two passes, full logits", None),
        ("mixing", None),
        ("bds", None),
        ("bds neural", None),
        ("panacea joint", None),
        ("panacea joint, bds", None),
    ]


def test_every_step_has_a_speed(report: dict[str, Any]):
    assert all(step["tokens_per_second"] > 0 for step in report["steps"])


def test_every_ratio_names_its_limit(report: dict[str, Any]):
    fields = {"name", "ratio", "target", "better", "met", "limit", "unit", "machine"}
    assert report["results"]
    assert all(set(line) == fields and line["limit"] for line in report["results"])


def test_a_shape_that_has_no_time_is_left_out_and_named():
    import torch

    from benchmarks.gpu.defense_steps import run

    short = run(["tiny", "tiny"], torch.device("cpu"), rows=2, tokens=8, rounds=1, minutes=0.01)
    assert short["left_out"] == ["tiny"]
