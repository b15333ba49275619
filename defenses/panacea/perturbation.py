"""The adaptive perturbation eps, and the training gradient that prepares the model for it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

OnClamp = Literal["drop_term", "released"]
LossClosure = Callable[[], Tensor]
SumTensors = Callable[[dict[str, Tensor]], None]
SumValue = Callable[[float], float]

NORM_GUARD = 1e-7


class NonFiniteGradientError(ValueError):
    """The harmful loss has a NaN or infinite gradient, so no perturbation can be taken from it."""


class PanaceaGradients(NamedTuple):
    """One joint step.

    direction: d, what the optimiser descends; one fresh tensor per parameter.
    perturbation: eps of this step, or None if it was skipped (keep the previous one then).
    task_loss, harmful_loss, perturbed_harmful_loss: g(w), h(w), h(w + eps), nats; the last is NaN
    when skipped.
    harmful_gradient_norm: global norm of grad h(w).
    clamped: h(w + eps) went beyond the clamp. skipped: a harmful gradient was not finite, d = grad
    g. The caller counts both.
    """

    direction: dict[str, Tensor]
    perturbation: dict[str, Tensor] | None
    task_loss: float
    harmful_loss: float
    perturbed_harmful_loss: float
    harmful_gradient_norm: float
    clamped: bool
    skipped: bool


class PostHocPerturbation(NamedTuple):
    """eps from the mean harmful gradient, the mean of h over the batches used, and their counts."""

    perturbation: dict[str, Tensor]
    harmful_loss: float
    harmful_gradient_norm: float
    batch_count: int
    skipped_batches: int


def global_norm(tensors: Mapping[str, Tensor]) -> float:
    """sqrt(sum over tensors of ||.||_F^2): all tensors read as one vector."""
    norms = [torch.linalg.vector_norm(tensor.detach()) for tensor in tensors.values()]
    if not norms:
        return 0.0
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).double().norm())


def relative_rho(parameters: Mapping[str, Tensor], fraction: float = 0.03) -> float:
    """rho = fraction * ||w||_2, for an adapter of another size than the paper's (derived).

    Release's rho = 1 is about 3% of the norm of a fresh rank-32 adapter on q, k, v of a 7B model.
    """
    return fraction * global_norm(parameters)


def adaptive_perturbation(harmful_gradients: Mapping[str, Tensor], rho: float) -> dict[str, Tensor]:
    """First-order maximiser of h(w + eps) within ||eps||_2 <= rho.

        eps = rho * grad h / ( ||grad h||_2 + 1e-7 )

    One global norm over all tensors: the gradient itself spreads rho over layers and factors.
    Fresh tensors, so later changes to gradients can't reach them. A zero gradient gives eps = 0.
    Raises NonFiniteGradientError. Source: Panacea, arXiv 2501.18100.
    """
    norm = global_norm(harmful_gradients)
    if not math.isfinite(norm):
        raise NonFiniteGradientError(
            "the gradient of the harmful loss is not finite; skip the perturbation for this batch"
        )
    factor = rho / (norm + NORM_GUARD)
    return {name: gradient.detach() * factor for name, gradient in harmful_gradients.items()}


def combine_gradients(
    task: Mapping[str, Tensor],
    harmful: Mapping[str, Tensor],
    harmful_perturbed: Mapping[str, Tensor] | None,
    strength: float,
    *,
    clamped: bool = False,
    on_clamp: OnClamp = "drop_term",
) -> dict[str, Tensor]:
    """Descent direction of the joint objective, eps held constant.

        d = grad g(w) - lambda ( grad h(w + eps) - grad h(w) )

    strength is lambda. harmful_perturbed may be None only when clamped. Beyond the clamp the
    release's min(h, clamp) makes grad h(w + eps) vanish and d = grad g + lambda grad h(w), which
    teaches the harmful rows a little ("released"); "drop_term" gives d = grad g (derived).
    """
    if clamped and on_clamp == "drop_term":
        return {name: gradient.detach().clone() for name, gradient in task.items()}
    if clamped:
        return {name: g.detach().add(harmful[name], alpha=strength) for name, g in task.items()}
    if harmful_perturbed is None:
        raise ValueError("harmful_perturbed is needed unless the step is clamped")
    return {
        name: g.detach().sub(harmful_perturbed[name] - harmful[name], alpha=strength)
        for name, g in task.items()
    }


def panacea_gradients(
    task_loss: LossClosure,
    harmful_loss: LossClosure,
    parameters: Mapping[str, Tensor],
    *,
    rho: float,
    strength: float,
    clamp: float = 5.0,
    on_clamp: OnClamp = "drop_term",
    reduce: SumTensors | None = None,
    reduce_value: SumValue | None = None,
) -> PanaceaGradients:
    """One step of  max_w max_{||eps|| <= rho} lambda ( h(w + eps) - h(w) ) - g(w).

        G = grad g(w);  Hg = grad h(w);  eps = rho Hg / (||Hg|| + 1e-7)
        Hp = grad h(w + eps), the same harmful batch
        d = G - lambda (Hp - Hg)

    task_loss and harmful_loss are called for g once and h twice; both must answer for the same
    batch each time. Composed with BDS, task_loss returns bds_objective. parameters: the trainable
    tensors by name; they are perturbed in place for the second harmful pass and come back bit for
    bit, also after an error. Their .grad is neither read nor written; the caller clips d, puts it
    there and steps. Differentiating rho ||grad h|| shows the reading: the model walks to where the
    harmful loss is steep, so that a small step ruins it.

    Several processes: each closure returns its process's share of g or h (the shares add up to the
    whole; a process without rows returns a constant 0), reduce adds tensors up over the processes
    in place, and reduce_value a number. eps, d, the clamp and the skip are then those of the whole
    batch, and every process makes the same calls in the same order.

    Source: Panacea, arXiv 2501.18100; copying back instead of subtracting, the skip and
    on_clamp="drop_term" are derived.
    """
    sums = _Sums(reduce, reduce_value)
    task_value, task = sums.gradients(task_loss, parameters)
    harmful_value, harmful = sums.gradients(harmful_loss, parameters)
    norm = global_norm(harmful)

    def without_perturbation() -> PanaceaGradients:
        return PanaceaGradients(
            task, None, task_value, harmful_value, math.nan, norm, clamped=False, skipped=True
        )

    if not math.isfinite(norm):
        return without_perturbation()
    eps = adaptive_perturbation(harmful, rho)
    with apply_perturbation(parameters, eps):
        loss = harmful_loss()
        perturbed_value = sums.value(float(loss.detach()))
        clamped = perturbed_value > clamp
        harmful_perturbed = None if clamped else sums.gradient(loss, parameters)
    if harmful_perturbed is not None and not math.isfinite(global_norm(harmful_perturbed)):
        return without_perturbation()
    direction = combine_gradients(
        task, harmful, harmful_perturbed, strength, clamped=clamped, on_clamp=on_clamp
    )
    return PanaceaGradients(
        direction,
        eps,
        task_value,
        harmful_value,
        perturbed_value,
        norm,
        clamped=clamped,
        skipped=False,
    )


def post_hoc_perturbation(
    parameters: Mapping[str, Tensor],
    harmful_losses: Iterable[LossClosure],
    rho: float,
    *,
    reduce: SumTensors | None = None,
    reduce_value: SumValue | None = None,
) -> PostHocPerturbation:
    """eps for a finished adapter: the mean gradient of h over all batches, then one step of rho.

        eps = rho * mean_k grad h_k(w) / ( ||mean_k grad h_k(w)||_2 + 1e-7 )

    Not Panacea (nothing prepares the model for it) but its cheap ablation. Give batches of equal
    size for a mean over rows. Batches with a gradient that is not finite are left out and counted.
    Several processes: each gives its own batches, as many as it has, and the sums are added up once
    at the end, by reduce in place and by reduce_value. Raises NonFiniteGradientError if no batch is
    left. Source: derived.
    """
    sums = _Sums(reduce, reduce_value)
    alone = _Sums(None, None)
    total = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    loss_sum, used, skipped = 0.0, 0, 0
    for harmful_loss in harmful_losses:
        value, gradients = alone.gradients(harmful_loss, parameters)
        if not math.isfinite(global_norm(gradients)):
            skipped += 1
            continue
        for name, gradient in gradients.items():
            total[name] += gradient
        loss_sum += value
        used += 1
    total = sums.tensors(total)
    loss_sum = sums.value(loss_sum)
    used, skipped = round(sums.value(float(used))), round(sums.value(float(skipped)))
    if used == 0:
        raise NonFiniteGradientError(
            f"none of {skipped} harmful batches gave a finite gradient; check the adapter's weights"
            if skipped
            else "no harmful batch was given; the harmful set must not be empty"
        )
    mean = {name: gradient / used for name, gradient in total.items()}
    return PostHocPerturbation(
        adaptive_perturbation(mean, rho), loss_sum / used, global_norm(mean), used, skipped
    )


def perturbed_parameters(
    parameters: Mapping[str, Tensor], eps: Mapping[str, Tensor], scale: float = 1.0
) -> dict[str, Tensor]:
    """Copies of w + scale * eps; scale 0 copies w bit for bit. Tensors without an eps stay."""
    return {
        name: (
            tensor.detach().add(eps[name].to(tensor), alpha=scale)
            if scale != 0.0 and name in eps
            else tensor.detach().clone()
        )
        for name, tensor in parameters.items()
    }


@contextmanager
def apply_perturbation(
    parameters: Mapping[str, Tensor], eps: Mapping[str, Tensor], scale: float = 1.0
) -> Iterator[None]:
    """w + scale * eps in place while the block runs, then the saved w again, bit for bit.

    Subtracting eps instead would leave some elements off by one unit in the last place.
    """
    changed = {name: tensor for name, tensor in parameters.items() if scale != 0.0 and name in eps}
    saved = {name: tensor.detach().clone() for name, tensor in changed.items()}
    try:
        with torch.no_grad():
            for name, tensor in changed.items():
                tensor.add_(eps[name].to(tensor), alpha=scale)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in changed.items():
                tensor.copy_(saved[name])


class _Sums(NamedTuple):
    """Losses and gradients summed over processes, or of this process alone."""

    reduce: SumTensors | None
    reduce_value: SumValue | None

    def value(self, value: float) -> float:
        return value if self.reduce_value is None else self.reduce_value(value)

    def tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.reduce is None:
            return tensors
        # autograd may give two parameters one tensor; summed in place it would count twice.
        summed = {name: tensor.clone() for name, tensor in tensors.items()}
        self.reduce(summed)
        return summed

    def gradients(
        self, closure: LossClosure, parameters: Mapping[str, Tensor]
    ) -> tuple[float, dict[str, Tensor]]:
        loss = closure()
        return self.value(float(loss.detach())), self.gradient(loss, parameters)

    def gradient(self, loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.reduce is not None and not loss.requires_grad:
            own = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        else:
            own = _differentiate(loss, parameters)
        return self.tensors(own)


def _differentiate(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(parameters.items(), gradients, strict=True)
    }
