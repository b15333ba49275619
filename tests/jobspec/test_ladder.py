"""The example configurations for large models are jobs that the pipeline would accept."""

from pathlib import Path

import pytest

from jobspec.catalogue import load_catalogue
from jobspec.defense import PerturbationOptions, SchedulerOptions
from jobspec.local import load_local_spec

LADDER = Path(__file__).parents[2] / "examples" / "ladder"


@pytest.mark.parametrize("name", ["qwen2-7b", "gemma2-9b", "llama2-7b"])
def test_a_large_model_example_has_the_papers_settings(name: str, tmp_path: Path):
    for file in ("catalogue.yaml", f"{name}.yaml"):
        (tmp_path / file).write_text((LADDER / file).read_text())
    for file in ("training.jsonl", "validation.jsonl"):
        (tmp_path / file).touch()
    spec = load_local_spec(tmp_path / f"{name}.yaml")
    lora, scheduler = spec.model.lora, spec.defense.scheduler
    assert (lora.rank, lora.alpha, lora.targets) == (32, 4, ("q_proj", "k_proj", "v_proj"))
    assert (lora.learning_rate, lora.weight_decay, lora.batch_size) == (1e-5, 0.1, 10)
    assert (spec.model.dtype, lora.gradient_checkpointing) == ("bfloat16", True)
    assert isinstance(scheduler, SchedulerOptions)
    assert (scheduler.learning_rate, scheduler.alignment_rows) == (5e-3, 1000)
    assert isinstance(spec.defense.perturbation, PerturbationOptions)
    assert (spec.defense.perturbation.rho, spec.defense.perturbation.strength) == (1.0, 1e-3)


def test_the_shipped_catalogue_has_the_same_large_models_switched_off():
    shipped = {entry.name: entry for entry in load_catalogue().models}
    for entry in load_catalogue(LADDER / "catalogue.yaml").models:
        assert shipped[entry.name].source == entry.source
        assert shipped[entry.name].lora == entry.lora
        assert not shipped[entry.name].enabled
