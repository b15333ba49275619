"""Repairs in whole jobs on the tiny model: from the request to the bundle and back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workers.pipeline.failure import PipelineFailure
from workers.pipeline.run import run_job
from workers.pipeline.stored_perturbation import describe_perturbation, rescale_perturbation


def never() -> bool:
    return False


@pytest.fixture
def make(make_spec):
    """An undefended job with one repair, tried at scale 0.5."""

    def made(**repair):
        return make_spec(
            defense={
                "scheduler": {"name": "none"},
                "perturbation": {"scales": [0.5], **repair},
            }
        )

    return made


@pytest.mark.parametrize("mode", ["joint", "post_hoc", "random_noise", "antidote"])
def test_the_bundle_of_every_repair_can_be_shown_and_undone(
    make, recorder, tmp_path: Path, mode: str
):
    run_job(make(mode=mode), tmp_path / "work", recorder, never)
    bundle = tmp_path / "work" / "bundle"
    report = json.loads((bundle / "report.json").read_text())["defense"]["perturbation"]
    shown = describe_perturbation(bundle)
    assert (shown["mode"], shown["scale"]) == (mode, report["scale"])
    assert shown["norm"] == pytest.approx(report["norm"])
    rescale_perturbation(bundle, 0.0, tmp_path / "undone")
    undone = load_file(tmp_path / "undone" / "adapter_model.safetensors")
    before = load_file(bundle / "perturbation" / "adapter_before.safetensors")
    for name, tensor in before.items():
        assert torch.equal(undone[name.replace(".default.", ".")], tensor)


def test_a_joint_job_reports_the_average_of_its_last_steps(make, recorder, tmp_path: Path):
    report = run_job(make(mode="joint"), tmp_path / "work", recorder, never)
    found = report["defense"]["perturbation"]
    average = found["layer_coefficients_average"]
    assert set(average) == set(found["layer_coefficients"]) == {"0", "1"}
    assert sum(average.values()) == pytest.approx(1.0)
    assert found["eps_source"] == "last_step"
    assert set(found["counters"]) >= {"clamped_steps", "skipped_perturbations"}


def test_the_chart_of_two_equal_jobs_is_the_same(make, recorder, tmp_path: Path):
    charts = []
    for name in ("one", "two"):
        run_job(make(mode="joint"), tmp_path / name, recorder, never)
        charts.append((tmp_path / name / "bundle" / "perturbation" / "layers.svg").read_bytes())
    assert charts[0] == charts[1]


def test_safe_lora_on_a_base_without_known_alignment_ends_the_job(make, recorder, tmp_path: Path):
    with pytest.raises(PipelineFailure, match="not an aligned entry"):
        run_job(make(mode="safe_lora"), tmp_path / "work", recorder, never)
