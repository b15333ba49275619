from typing import Any

import pytest
import torch

from defenses.panacea.layers import (
    CoefficientAverage,
    effective_change_norms,
    first_averaged_step,
    layer_coefficients,
)
from defenses.panacea.perturbation import adaptive_perturbation, global_norm


@pytest.fixture
def eps(tiny: Any, harmful_rows: Any) -> dict[str, torch.Tensor]:
    parameters = tiny.trainable
    loss = tiny.token_mean_loss(harmful_rows)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return adaptive_perturbation(dict(zip(parameters, gradients, strict=True)), 1.0)


def test_layer_coefficients_on_the_tiny_model_are_the_golden_ones(
    eps: dict[str, torch.Tensor],
) -> None:
    # Independent float64 script: layer norms of eps 0.9004202555718408 and 0.4350210190223053.
    by_layer = layer_coefficients(eps).by_layer
    assert by_layer == pytest.approx({0: 0.9004202555718408**2, 1: 0.4350210190223053**2}, abs=1e-6)
    assert by_layer == pytest.approx({0: 0.81076, 1: 0.18924}, abs=5e-6)


def test_layer_norms_of_the_perturbation_are_the_golden_ones(eps: dict[str, torch.Tensor]) -> None:
    for layer, golden in ((0, 0.9004202555718408), (1, 0.4350210190223053)):
        of_layer = {name: t for name, t in eps.items() if f".layers.{layer}." in name}
        assert global_norm(of_layer) == pytest.approx(golden, abs=1e-9)


def test_each_split_of_the_perturbation_sums_to_one(eps: dict[str, torch.Tensor]) -> None:
    coefficients = layer_coefficients(eps)
    for split in coefficients:
        assert sum(split.values()) == pytest.approx(1.0, abs=1e-12)


def test_splits_name_the_modules_and_factors_of_the_adapter(eps: dict[str, torch.Tensor]) -> None:
    coefficients = layer_coefficients(eps)
    assert set(coefficients.by_module) == {"q_proj", "k_proj", "v_proj"}
    assert set(coefficients.by_factor) == {"A", "B"}


def test_tensors_outside_the_layers_are_counted_apart() -> None:
    coefficients = layer_coefficients(
        {"model.lm_head.weight": torch.ones(3), "model.layers.2.mlp.up_proj.weight": torch.ones(1)}
    )
    assert coefficients.by_layer == {-1: 0.75, 2: 0.25}
    assert coefficients.by_module == {"lm_head": 0.75, "up_proj": 0.25}


def test_zero_perturbation_has_zero_coefficients() -> None:
    coefficients = layer_coefficients(
        {"model.layers.0.q_proj.lora_A.default.weight": torch.zeros(2)}
    )
    assert coefficients.by_layer == {0: 0.0}


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_effective_change_equals_the_norm_of_the_full_matrices(
    tiny: Any, eps: dict[str, torch.Tensor], scale: float
) -> None:
    parameters = tiny.trainable
    norms = effective_change_norms(parameters, eps, scaling=2.0, scale=scale)
    module = "base_model.model.model.layers.1.self_attn.k_proj"
    A, B = (parameters[f"{module}.lora_{f}.default.weight"].detach() for f in "AB")
    e_A, e_B = (scale * eps[f"{module}.lora_{f}.default.weight"] for f in "AB")
    change = 2.0 * ((B + e_B) @ (A + e_A) - B @ A)
    assert len(norms) == 6
    assert norms[module] == pytest.approx(float(change.norm()), abs=1e-12)


def of_layers(*values: float) -> dict[str, torch.Tensor]:
    return {f"model.layers.{k}.q_proj.weight": torch.tensor([v]) for k, v in enumerate(values)}


def test_averaged_coefficients_are_the_mean_of_the_steps() -> None:
    average = CoefficientAverage()
    average.add(of_layers(1.0, 1.0))
    average.add(of_layers(0.0, 5.0))
    assert average.result() == {0: 0.25, 1: 0.75}


def test_an_average_of_no_step_is_none() -> None:
    assert CoefficientAverage().result() is None


def test_averaged_coefficients_sum_to_one(eps: dict[str, torch.Tensor]) -> None:
    average = CoefficientAverage()
    for factor in (1.0, 0.5, 3.0):
        average.add({name: t * (factor if ".0." in name else 1.0) for name, t in eps.items()})
    assert sum(average.result().values()) == pytest.approx(1.0, abs=1e-12)


def test_an_average_continues_from_its_state_bit_for_bit() -> None:
    steps = [of_layers(0.1, 0.7, 0.3), of_layers(0.9, 0.2, 0.6), of_layers(0.4, 0.4, 0.5)]
    whole, first, second = CoefficientAverage(), CoefficientAverage(), CoefficientAverage()
    for step in steps:
        whole.add(step)
    first.add(steps[0])
    second.load_state(first.state())
    for step in steps[1:]:
        second.add(step)
    assert second.result() == whole.result()


def test_the_state_of_an_empty_average_can_be_loaded() -> None:
    average = CoefficientAverage()
    average.load_state(CoefficientAverage().state())
    assert average.result() is None


@pytest.mark.parametrize(
    ("steps", "first"), [(400, 360), (30, 27), (25, 22), (10, 9), (3, 2), (1, 0), (0, 0)]
)
def test_the_average_covers_the_last_tenth_of_the_steps(steps: int, first: int) -> None:
    assert first_averaged_step(steps) == first
