"""Golden values: computed in float64 by an independent script; the released Panacea training step
(arXiv 2501.18100), with its naming defects repaired, gave the same gradient and perturbation."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from defenses.panacea.perturbation import (
    NonFiniteGradientError,
    PanaceaGradients,
    adaptive_perturbation,
    apply_perturbation,
    combine_gradients,
    global_norm,
    panacea_gradients,
    perturbed_parameters,
    post_hoc_perturbation,
    relative_rho,
)

Q0_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
V1_B = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_golden(actual: Any, expected: Any, atol: float = 1e-9) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(actual, f64(expected), rtol=0, atol=atol)


class Quadratic:
    """g = |w - (1, -2)|^2 / 2,  h = w^T diag(2, 0.5) w / 2,  at w = (0.6, -0.8)."""

    def __init__(self) -> None:
        self.w = f64([0.6, -0.8]).requires_grad_()
        self.parameters = {"w": self.w}

    def task_loss(self) -> Tensor:
        return (self.w - f64([1.0, -2.0])).square().sum() / 2

    def harmful_loss(self) -> Tensor:
        return (f64([2.0, 0.5]) * self.w.square()).sum() / 2

    def step(self, **settings: Any) -> PanaceaGradients:
        chosen = {"rho": 1.0, "strength": 0.1, **settings}
        return panacea_gradients(self.task_loss, self.harmful_loss, self.parameters, **chosen)


@pytest.fixture
def quadratic() -> Quadratic:
    return Quadratic()


def step_of(tiny: Any, ft: Any, harmful: Any, **settings: Any) -> PanaceaGradients:
    chosen = {"rho": 1.0, "strength": 1e-3, **settings}
    return panacea_gradients(
        lambda: tiny.token_mean_loss(ft),
        lambda: tiny.token_mean_loss(harmful),
        tiny.trainable,
        **chosen,
    )


def gradient_of(tiny: Any, rows: Any) -> dict[str, Tensor]:
    parameters = tiny.trainable
    gradients = torch.autograd.grad(tiny.token_mean_loss(rows), list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


def test_quadratic_perturbation_is_the_golden_one(quadratic: Quadratic) -> None:
    step = quadratic.step()
    assert_golden(step.harmful_gradient_norm, 1.2649110640673518, atol=1e-14)
    assert_golden(step.perturbation["w"], [0.9486832230505197, -0.3162277410168399], atol=1e-14)


def test_quadratic_task_gradient_is_the_golden_one(quadratic: Quadratic) -> None:
    assert_golden(quadratic.step(strength=0.0).direction["w"], [-0.4, 1.2], atol=1e-14)


def test_quadratic_harmful_gradient_is_the_golden_one(quadratic: Quadratic) -> None:
    step = quadratic.step(clamp=1.0, on_clamp="released", strength=1.0)
    assert_golden(step.direction["w"] - f64([-0.4, 1.2]), [1.2, -0.4], atol=1e-14)


def test_quadratic_direction_is_the_golden_one(quadratic: Quadratic) -> None:
    assert_golden(
        quadratic.step().direction["w"], [-0.589736644610104, 1.215811387050842], atol=1e-14
    )


def test_quadratic_descent_step_arrives_at_the_golden_point(quadratic: Quadratic) -> None:
    direction = quadratic.step().direction["w"]
    arrived = quadratic.w.detach() - 0.05 * direction
    assert_golden(arrived, [0.6294868322305052, -0.8607905693525422], atol=1e-14)


def test_quadratic_harmful_loss_rises_to_the_golden_value(quadratic: Quadratic) -> None:
    step = quadratic.step()
    assert_golden(step.harmful_loss, 0.52, atol=1e-14)
    assert_golden(step.perturbed_harmful_loss, 2.709910817812035, atol=1e-14)


def test_quadratic_harmful_loss_rises_by_its_slope_and_half_its_curvature(
    quadratic: Quadratic,
) -> None:
    step = quadratic.step()
    expansion = 0.52 + 1.2649110640673518 + 1.85 / 2
    assert step.perturbed_harmful_loss == pytest.approx(expansion, abs=1e-6)


def test_quadratic_gradient_difference_is_rho_times_hessian_times_unit_gradient(
    quadratic: Quadratic,
) -> None:
    step = quadratic.step(strength=1.0)
    gained = quadratic.w.detach() - f64([1.0, -2.0]) - step.direction["w"]
    unit = f64([1.2, -0.4]) / 1.2649110640673518
    torch.testing.assert_close(gained, f64([2.0, 0.5]) * unit, rtol=0, atol=1e-6)


def test_quadratic_perturbed_harmful_gradient_is_the_golden_one(quadratic: Quadratic) -> None:
    with apply_perturbation(quadratic.parameters, quadratic.step().perturbation):
        (gradient,) = torch.autograd.grad(quadratic.harmful_loss(), [quadratic.w])
    assert_golden(gradient, [3.0973664461010393, -0.55811387050842], atol=1e-14)


def test_quadratic_gradient_difference_is_the_golden_one(quadratic: Quadratic) -> None:
    strong, none = quadratic.step(strength=1.0), quadratic.step(strength=0.0)
    gained = none.direction["w"] - strong.direction["w"]
    assert_golden(gained, [1.89737, -0.15811], atol=5e-6)


def test_losses_on_the_tiny_model_are_the_golden_ones(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    losses = torch.cat([tiny.row_losses(ft_rows), tiny.row_losses(harmful_rows)]).detach()
    golden = [2.9552063473457797, 3.2514146240738575, 3.6421406691640468, 3.2562958028518003]
    assert_golden(losses, golden)


def test_gradients_on_the_tiny_model_have_the_golden_norms(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    task, harmful = gradient_of(tiny, ft_rows), gradient_of(tiny, harmful_rows)
    inner = sum(float((task[name] * harmful[name]).sum()) for name in task)
    assert sum(tensor.numel() for tensor in task.values()) == 384
    assert_golden(global_norm(task), 2.6127734841484878, atol=1e-7)
    assert_golden(global_norm(harmful), 2.6190097527745886, atol=1e-7)
    assert_golden(inner, -0.11365598909862329, atol=1e-7)


def test_perturbation_on_the_tiny_model_is_the_golden_one(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    eps = step_of(tiny, ft_rows, harmful_rows).perturbation
    first = [-0.055335684038054896, -0.031249625440112776, -0.0026091250734901774]
    last = [-0.022818706629934696, -0.0344984451675558, -0.022204054722112725]
    assert_golden(global_norm(eps), 0.9999999618176312)
    assert_golden(eps[Q0_A].flatten()[:3], first, atol=1e-8)
    assert_golden(eps[V1_B].flatten()[:3], last, atol=1e-8)


def test_direction_on_the_tiny_model_is_the_golden_one(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    step = step_of(tiny, ft_rows, harmful_rows)
    first = [0.35788880599545, 0.3036672922627815, 0.20495982793122874]
    last = [-0.041935236840822884, -0.0319770587928814, -0.04097486956146173]
    assert_golden(step.perturbed_harmful_loss, 4.281687752985149, atol=1e-8)
    assert_golden(global_norm(step.direction), 2.6130722021370953, atol=1e-7)
    assert_golden(step.direction[Q0_A].flatten()[:3], first, atol=1e-7)
    assert_golden(step.direction[V1_B].flatten()[:3], last, atol=1e-7)


def test_perturbed_harmful_gradient_has_the_golden_norm(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    eps = step_of(tiny, ft_rows, harmful_rows).perturbation
    with apply_perturbation(tiny.trainable, eps):
        norm = global_norm(gradient_of(tiny, harmful_rows))
    assert_golden(norm, 3.124601736880159, atol=1e-7)


@pytest.mark.parametrize(
    ("strength", "norm"), [(1.0, 4.867064806396148), (10.0, 39.41933040883912)]
)
def test_direction_grows_with_strength_as_the_golden_values_say(
    tiny: Any, ft_rows: Any, harmful_rows: Any, strength: float, norm: float
) -> None:
    step = step_of(tiny, ft_rows, harmful_rows, strength=strength)
    assert_golden(global_norm(step.direction), norm, atol=1e-5)


def test_one_optimiser_step_and_the_perturbation_give_the_golden_losses(
    tiny: Any, ft_rows: Any, harmful_rows: Any, safe_rows: Any
) -> None:
    parameters = tiny.trainable
    optimizer = torch.optim.AdamW(parameters.values(), lr=2e-5, weight_decay=0.1)
    step = step_of(tiny, ft_rows, harmful_rows)
    for name, parameter in parameters.items():
        parameter.grad = step.direction[name]
    torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
    optimizer.step()

    def losses(*groups: Any) -> list[float]:
        with torch.no_grad():
            return [float(tiny.token_mean_loss(rows)) for rows in groups]

    assert_golden(losses(ft_rows, harmful_rows), [3.102688057809, 3.449103699459], atol=1e-8)
    with apply_perturbation(parameters, step.perturbation):
        after = losses(ft_rows, harmful_rows, safe_rows)
    assert_golden(after, [3.016564953527, 4.281814131717, 4.255421968437], atol=1e-8)


def test_a_step_equals_the_published_pseudo_code_line_by_line(
    tiny: Any, make_tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    other, rho, strength = make_tiny(), 1.0, 0.3
    w = other.trainable

    def backward(rows: Any) -> dict[str, Tensor]:
        other.token_mean_loss(rows).backward()
        kept = {name: p.grad.clone() for name, p in w.items()}
        other.model.zero_grad()
        return kept

    task, harmful = backward(ft_rows), backward(harmful_rows)
    norm = torch.sqrt(sum(tensor.square().sum() for tensor in harmful.values()))
    eps = {name: rho * tensor / (norm + 1e-7) for name, tensor in harmful.items()}
    saved = {name: p.detach().clone() for name, p in w.items()}
    with torch.no_grad():
        for name, p in w.items():
            p.add_(eps[name])
    perturbed = backward(harmful_rows)
    with torch.no_grad():
        for name, p in w.items():
            p.copy_(saved[name])

    step = step_of(tiny, ft_rows, harmful_rows, rho=rho, strength=strength)
    for name, direction in step.direction.items():
        expected = task[name] - strength * (perturbed[name] - harmful[name])
        torch.testing.assert_close(direction, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(step.perturbation[name], eps[name], rtol=0, atol=1e-13)


def test_harmful_loss_rises_by_rho_times_its_gradient_norm_for_small_rho(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    step = step_of(tiny, ft_rows, harmful_rows, rho=1e-4)
    rise = step.perturbed_harmful_loss - step.harmful_loss
    assert rise / (1e-4 * step.harmful_gradient_norm) == pytest.approx(1.0, abs=5e-3)


@pytest.mark.parametrize(
    ("rho", "ratio", "tolerance"),
    [(1e-4, 1.001409, 2e-6), (1e-2, 1.1407, 1e-4), (0.1, 1.3417, 1e-4), (1.0, 0.3179, 1e-4)],
)
def test_first_order_law_bends_with_rho_as_the_golden_ratios_say(
    tiny: Any, ft_rows: Any, harmful_rows: Any, rho: float, ratio: float, tolerance: float
) -> None:
    step = step_of(tiny, ft_rows, harmful_rows, rho=rho)
    rise = step.perturbed_harmful_loss - step.harmful_loss
    assert rise / (rho * step.harmful_gradient_norm) == pytest.approx(ratio, abs=tolerance)


tensors = st.lists(st.integers(-5000, 5000).map(lambda n: n / 1000), min_size=1, max_size=6).map(
    f64
)


@given(
    gradients=st.dictionaries(st.sampled_from("abcd"), tensors, min_size=1),
    rho=st.integers(0, 900).map(lambda n: n / 100),
)
@settings(deadline=None, max_examples=60)
def test_perturbation_has_norm_rho_up_to_the_guard(
    gradients: dict[str, Tensor], rho: float
) -> None:
    n = global_norm(gradients)
    norm = global_norm(adaptive_perturbation(gradients, rho))
    assert norm == pytest.approx(rho * n / (n + 1e-7), rel=1e-12, abs=1e-300)


def test_zero_harmful_gradient_gives_no_perturbation() -> None:
    eps = adaptive_perturbation({"w": torch.zeros(3)}, 1.0)
    assert torch.equal(eps["w"], torch.zeros(3))


def test_perturbation_is_no_alias_of_the_gradient() -> None:
    gradient = torch.tensor([3.0, 4.0])
    eps = adaptive_perturbation({"w": gradient}, 1.0)
    gradient.zero_()
    torch.testing.assert_close(eps["w"], torch.tensor([0.6, 0.8]))


def test_scaling_the_harmful_loss_leaves_the_perturbation_unchanged(quadratic: Quadratic) -> None:
    scaled = panacea_gradients(
        quadratic.task_loss,
        lambda: 7.0 * quadratic.harmful_loss(),
        quadratic.parameters,
        rho=1.0,
        strength=0.1,
    )
    torch.testing.assert_close(
        scaled.perturbation["w"], quadratic.step().perturbation["w"], rtol=0, atol=1e-6
    )


def test_zero_strength_gives_the_task_gradient_exactly(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    step = step_of(tiny, ft_rows, harmful_rows, strength=0.0)
    for name, gradient in gradient_of(tiny, ft_rows).items():
        assert torch.equal(step.direction[name], gradient)


def test_parameters_are_restored_bit_for_bit_in_float32(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    tiny.model.float()
    before = {name: tensor.detach().clone() for name, tensor in tiny.trainable.items()}
    step_of(tiny, ft_rows, harmful_rows)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.trainable.items())


def test_parameters_are_restored_when_the_second_harmful_pass_fails(quadratic: Quadratic) -> None:
    calls: Iterator[int] = iter(range(2))

    def failing() -> Tensor:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return quadratic.harmful_loss()

    with pytest.raises(RuntimeError, match="out of memory"):
        panacea_gradients(quadratic.task_loss, failing, quadratic.parameters, rho=1.0, strength=0.1)
    assert torch.equal(quadratic.w.detach(), f64([0.6, -0.8]))


def test_gradient_buffers_of_the_parameters_are_left_alone(quadratic: Quadratic) -> None:
    quadratic.w.grad = f64([5.0, 6.0])
    quadratic.step()
    assert torch.equal(quadratic.w.grad, f64([5.0, 6.0]))


def test_a_parameter_outside_both_losses_gets_zeros(quadratic: Quadratic) -> None:
    quadratic.parameters["idle"] = torch.ones(2, dtype=torch.float64, requires_grad=True)
    step = quadratic.step()
    assert torch.equal(step.direction["idle"], f64([0.0, 0.0]))
    assert torch.equal(step.perturbation["idle"], f64([0.0, 0.0]))


def test_released_clamp_adds_the_harmful_gradient_exactly(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    step = step_of(tiny, ft_rows, harmful_rows, clamp=4.0, strength=0.5, on_clamp="released")
    task, harmful = gradient_of(tiny, ft_rows), gradient_of(tiny, harmful_rows)
    assert step.clamped
    for name, direction in step.direction.items():
        assert torch.equal(direction, task[name] + 0.5 * harmful[name])


def test_dropping_the_term_beyond_the_clamp_leaves_the_task_gradient(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    step = step_of(tiny, ft_rows, harmful_rows, clamp=4.0, strength=0.5, on_clamp="drop_term")
    assert step.clamped
    for name, gradient in gradient_of(tiny, ft_rows).items():
        assert torch.equal(step.direction[name], gradient)


def test_default_clamp_is_not_reached_on_the_tiny_model(
    tiny: Any, ft_rows: Any, harmful_rows: Any
) -> None:
    assert not step_of(tiny, ft_rows, harmful_rows).clamped


@pytest.mark.parametrize("rho", range(2, 11))
def test_default_clamp_is_not_reached_at_larger_radii_either(
    tiny: Any, ft_rows: Any, harmful_rows: Any, rho: int
) -> None:
    # An independent float64 script found h(w + eps) at about 4.0 to 4.7 for rho from 2 to 10.
    step = step_of(tiny, ft_rows, harmful_rows, rho=float(rho))
    assert not step.clamped
    assert 3.9 <= step.perturbed_harmful_loss <= 4.75


def test_released_clamp_equals_the_autograd_gradient_of_the_minimum() -> None:
    quadratic = Quadratic()
    step = quadratic.step(clamp=2.0, on_clamp="released")
    w = quadratic.w
    shifted = (w.detach() + step.perturbation["w"]).requires_grad_()
    perturbed_h = (f64([2.0, 0.5]) * shifted.square()).sum() / 2
    (hp,) = torch.autograd.grad(torch.clamp(perturbed_h, max=2.0), [shifted])
    (g,) = torch.autograd.grad(quadratic.task_loss(), [w])
    (h,) = torch.autograd.grad(quadratic.harmful_loss(), [w])
    torch.testing.assert_close(step.direction["w"], g - 0.1 * (hp - h))


def test_combining_without_the_perturbed_gradient_needs_a_clamp() -> None:
    with pytest.raises(ValueError, match="unless the step is clamped"):
        combine_gradients({"w": torch.ones(1)}, {"w": torch.ones(1)}, None, 0.1)


@pytest.mark.parametrize("bad_call", [0, 1])
def test_a_harmful_gradient_that_is_not_finite_skips_the_perturbation(
    quadratic: Quadratic, bad_call: int
) -> None:
    calls = iter(range(2))

    def harmful() -> Tensor:
        factor = math.nan if next(calls) == bad_call else 1.0
        return factor * quadratic.harmful_loss()

    step = panacea_gradients(
        quadratic.task_loss, harmful, quadratic.parameters, rho=1.0, strength=0.1
    )
    assert step.skipped
    assert step.perturbation is None
    assert torch.equal(step.direction["w"], quadratic.w.detach() - f64([1.0, -2.0]))
    assert torch.equal(quadratic.w.detach(), f64([0.6, -0.8]))


def test_a_perturbation_from_a_gradient_that_is_not_finite_is_refused() -> None:
    with pytest.raises(NonFiniteGradientError):
        adaptive_perturbation({"w": torch.tensor([1.0, math.inf])}, 1.0)


def test_post_hoc_perturbation_follows_the_mean_gradient_of_all_batches(
    tiny: Any, harmful_rows: Any
) -> None:
    batches = [lambda row=row: tiny.token_mean_loss([row]) for row in harmful_rows]
    result = post_hoc_perturbation(tiny.trainable, batches, 1.0)
    together = adaptive_perturbation(gradient_of(tiny, harmful_rows), 1.0)
    assert result.batch_count == 2
    for name, eps in result.perturbation.items():
        torch.testing.assert_close(eps, together[name], rtol=1e-4, atol=1e-6)


def test_post_hoc_perturbation_leaves_out_and_counts_broken_batches(quadratic: Quadratic) -> None:
    def broken() -> Tensor:
        return math.nan * quadratic.harmful_loss()

    result = post_hoc_perturbation(
        quadratic.parameters, [broken, quadratic.harmful_loss, broken], 1.0
    )
    assert (result.batch_count, result.skipped_batches) == (1, 2)
    assert_golden(result.perturbation["w"], [0.9486832230505197, -0.3162277410168399], atol=1e-14)
    assert_golden(result.harmful_loss, 0.52, atol=1e-14)


@pytest.mark.parametrize(("batches", "message"), [(0, "not be empty"), (2, "none of 2")])
def test_post_hoc_perturbation_without_a_usable_batch_is_refused(
    quadratic: Quadratic, batches: int, message: str
) -> None:
    losses: list[Callable[[], Tensor]] = [lambda: math.nan * quadratic.harmful_loss()] * batches
    with pytest.raises(NonFiniteGradientError, match=message):
        post_hoc_perturbation(quadratic.parameters, losses, 1.0)


def random_adapter(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    w = {name: 0.01 * torch.randn(64, 32, generator=generator) for name in ("a", "b")}
    eps = adaptive_perturbation(
        {name: torch.randn(64, 32, generator=generator) for name in w}, 2e-4 * 64
    )
    return w, eps


def test_scale_zero_returns_the_adapter_bit_for_bit() -> None:
    w, eps = random_adapter()
    w["a"][0, 0] = -0.0
    copies = perturbed_parameters(w, eps, 0.0)
    assert all(copies[name].numpy().tobytes() == w[name].numpy().tobytes() for name in w)


def test_scaled_perturbation_is_added_once() -> None:
    w, eps = random_adapter()
    half = perturbed_parameters(w, eps, 0.5)
    torch.testing.assert_close(half["a"], w["a"] + 0.5 * eps["a"])


def test_perturbed_copies_do_not_touch_the_adapter() -> None:
    w, eps = random_adapter()
    before = w["a"].clone()
    perturbed_parameters(w, eps)["a"].zero_()
    assert torch.equal(w["a"], before)


def test_applied_perturbation_ends_with_its_block() -> None:
    w, eps = random_adapter()
    before = {name: tensor.clone() for name, tensor in w.items()}
    with apply_perturbation(w, eps, 0.75):
        assert torch.equal(w["a"], perturbed_parameters(before, eps, 0.75)["a"])
    assert all(torch.equal(w[name], before[name]) for name in w)


def test_subtracting_a_stored_perturbation_is_off_by_at_most_one_ulp() -> None:
    w, eps = random_adapter()
    for name, tensor in w.items():
        moved = tensor + eps[name]
        back = moved - eps[name]
        ulp = torch.finfo(torch.float32).eps * torch.maximum(tensor.abs(), moved.abs())
        assert bool(((back - tensor).abs() <= ulp).all())
        assert not torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subtracting_a_stored_perturbation_misses_about_one_element_in_25(
    dtype: torch.dtype,
) -> None:
    # An independent script counted 4 % for |w| near 0.01 and |eps| near 2e-4.
    w, eps = random_adapter()
    missed = torch.cat(
        [
            ((tensor + change) - change != tensor).flatten()
            for tensor, change in ((w[name].to(dtype), eps[name].to(dtype)) for name in w)
        ]
    )
    assert float(missed.double().mean()) == pytest.approx(0.04, abs=0.015)


def test_relative_rho_is_a_share_of_the_adapter_norm() -> None:
    w = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert relative_rho(w) == pytest.approx(0.15)
    assert relative_rho(w, fraction=0.2) == pytest.approx(1.0)
