"""The same mathematics on a model without an adapter: every linear weight of the layers moves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from defenses.losses import response_token_mean_nll
from defenses.panacea.layers import effective_change_norms, layer_coefficients
from defenses.panacea.perturbation import (
    adaptive_perturbation,
    apply_perturbation,
    global_norm,
    panacea_gradients,
    perturbed_parameters,
)

PROMPT_LENGTH = 3
LAYER_MODULES = {
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
}  # fmt: skip


class Merged:
    """The tiny Llama with its adapter merged; its linear weights are trainable."""

    def __init__(self, tiny: Any) -> None:
        self.model = tiny.model.merge_and_unload()
        linear = {n for n, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        self.weights: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            chosen = name.removesuffix(".weight") in linear
            parameter.requires_grad_(chosen)
            if chosen:
                self.weights[name] = parameter

    def loss(self, rows: list[list[int]]) -> Tensor:
        ids = torch.tensor(rows)
        labels = ids.clone()
        labels[:, :PROMPT_LENGTH] = -100
        return response_token_mean_nll(self.model, ids, torch.ones_like(ids), labels)

    def step(self, ft: Any, harmful: Any, **settings: Any) -> Any:
        chosen = {"rho": 0.5, "strength": 0.1, **settings}
        return panacea_gradients(
            lambda: self.loss(ft), lambda: self.loss(harmful), self.weights, **chosen
        )


@pytest.fixture
def merged(tiny: Any) -> Merged:
    return Merged(tiny)


def test_a_merged_model_loses_what_its_adapter_form_loses(
    make_tiny: Any, merged: Merged, ft_rows: Any
) -> None:
    expected = float(make_tiny().token_mean_loss(ft_rows).detach())
    assert float(merged.loss(ft_rows).detach()) == pytest.approx(expected, abs=1e-12)


def test_the_direction_on_merged_weights_is_the_equation(
    merged: Merged, ft_rows: Any, harmful_rows: Any
) -> None:
    weights = list(merged.weights.values())

    def gradient(rows: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(merged.loss(rows), weights)

    task, harmful = gradient(ft_rows), gradient(harmful_rows)
    step = merged.step(ft_rows, harmful_rows)
    with apply_perturbation(merged.weights, step.perturbation):
        perturbed = gradient(harmful_rows)
    for found, g, h, hp in zip(step.direction.values(), task, harmful, perturbed, strict=True):
        torch.testing.assert_close(found, g - 0.1 * (hp - h), rtol=0, atol=1e-13)


def test_merged_weights_move_by_rho_in_all(merged: Merged, ft_rows: Any, harmful_rows: Any) -> None:
    step = merged.step(ft_rows, harmful_rows)
    n = step.harmful_gradient_norm
    assert global_norm(step.perturbation) == pytest.approx(0.5 * n / (n + 1e-7), rel=1e-12)


def test_the_harmful_loss_of_merged_weights_rises(
    merged: Merged, ft_rows: Any, harmful_rows: Any
) -> None:
    step = merged.step(ft_rows, harmful_rows, rho=1e-3)
    rise = step.perturbed_harmful_loss - step.harmful_loss
    assert rise / (1e-3 * step.harmful_gradient_norm) == pytest.approx(1.0, abs=0.02)


def test_merged_weights_come_back_bit_for_bit_in_float32(
    merged: Merged, ft_rows: Any, harmful_rows: Any
) -> None:
    merged.model.float()
    before = {name: tensor.detach().clone() for name, tensor in merged.weights.items()}
    step = merged.step(ft_rows, harmful_rows)
    with apply_perturbation(merged.weights, step.perturbation, 0.25):
        assert not any(torch.equal(t, before[name]) for name, t in merged.weights.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in merged.weights.items())


def test_coefficients_of_merged_weights_are_split_by_layer_and_module(
    merged: Merged, ft_rows: Any, harmful_rows: Any
) -> None:
    eps = merged.step(ft_rows, harmful_rows).perturbation
    found = layer_coefficients(eps)
    assert list(found.by_layer) == [-1, 0, 1]
    assert set(found.by_module) == LAYER_MODULES
    assert found.by_factor == pytest.approx({"other": 1.0})
    of_layer_0 = {name: tensor for name, tensor in eps.items() if ".layers.0." in name}
    share = (global_norm(of_layer_0) / global_norm(eps)) ** 2
    assert found.by_layer[0] == pytest.approx(share, rel=1e-9)


def test_merged_weights_have_no_factor_change(
    merged: Merged, ft_rows: Any, harmful_rows: Any
) -> None:
    eps = merged.step(ft_rows, harmful_rows).perturbation
    assert effective_change_norms(merged.weights, eps, scaling=1.0) == {}


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_effective_change_is_what_merging_the_perturbed_adapter_adds(
    make_tiny: Any, harmful_rows: Any, scale: float
) -> None:
    tiny, moved = make_tiny(), make_tiny()
    parameters = tiny.trainable
    gradients = torch.autograd.grad(tiny.token_mean_loss(harmful_rows), list(parameters.values()))
    eps = adaptive_perturbation(dict(zip(parameters, gradients, strict=True)), 1.0)
    norms = effective_change_norms(parameters, eps, scaling=4 / 2, scale=scale)
    with torch.no_grad():
        for name, tensor in perturbed_parameters(parameters, eps, scale).items():
            moved.trainable[name].copy_(tensor)
    before, after = (dict(Merged(each).model.named_parameters()) for each in (tiny, moved))
    for module, norm in norms.items():
        name = module.removeprefix("base_model.model.") + ".weight"
        assert norm == pytest.approx(float((after[name] - before[name]).norm()), abs=1e-12)
