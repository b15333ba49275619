"""The options of the defenses: names, unions, and bounds that keep a request harmless."""

from typing import Any

import pytest
from pydantic import ValidationError

from jobspec.defense import DefenseOptions, DefenseRequest, PerturbationOptions, SchedulerOptions


@pytest.mark.parametrize(
    "name", ["bds", "none", "mix", "lisa", "constrained_sft", "seal", "prefilter"]
)
def test_a_name_stands_for_the_options_of_that_method(name: str):
    by_name = DefenseRequest(scheduler=name).resolve()
    by_options = DefenseRequest.model_validate({"scheduler": {"name": name}}).resolve()
    assert by_name == by_options
    assert by_name.scheduler.name == name


@pytest.mark.parametrize(
    "mode", ["joint", "post_hoc", "none", "random_noise", "safe_lora", "antidote"]
)
def test_a_mode_stands_for_the_options_of_that_change(mode: str):
    by_name = DefenseRequest(perturbation=mode).resolve()
    assert by_name == DefenseRequest.model_validate({"perturbation": {"mode": mode}}).resolve()
    assert by_name.perturbation.mode == mode


def test_options_survive_json():
    options = DefenseRequest(scheduler="lisa", perturbation="antidote").resolve()
    assert DefenseOptions.model_validate_json(options.model_dump_json()) == options


def test_without_a_name_the_options_are_those_of_bds():
    options = DefenseRequest.model_validate({"scheduler": {"form": "neural"}}).resolve()
    assert isinstance(options.scheduler, SchedulerOptions)
    assert options.scheduler.form == "neural"


@pytest.mark.parametrize(
    "scheduler",
    [
        "unknown",
        {"name": "unknown"},
        {"name": "mix", "transform": "softmax"},
        {"name": "lisa", "alignment_steps": 200, "user_steps": 1},
        {"learning_rate": 1e-12},
        {"betas": [0.9, 1.0]},
        {"clip": 1e9},
    ],
)
def test_options_out_of_bounds_are_refused(scheduler: Any):
    with pytest.raises(ValidationError):
        DefenseRequest.model_validate({"scheduler": scheduler})


@pytest.mark.parametrize(
    "scales", [[], [0.5, 0.1], [0.1, 0.1], [-0.1, 0.5], [0.0, 5.0], [i / 100 for i in range(40)]]
)
def test_scales_are_few_ascending_and_at_most_four(scales: list[float]):
    with pytest.raises(ValidationError, match="scales"):
        PerturbationOptions(scales=tuple(scales))


def test_the_perturbation_can_not_be_made_to_teach_the_harmful_rows():
    released = PerturbationOptions(mode="joint", on_clamp="released")
    assert released.strength <= 1e-2
    with pytest.raises(ValidationError, match="learns the harmful rows"):
        PerturbationOptions(mode="joint", on_clamp="released", strength=10.0)
    with pytest.raises(ValidationError, match="clamp"):
        PerturbationOptions(mode="joint", clamp=1e-9)
