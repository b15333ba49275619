"""Solving (H + lambda I) x = q: conjugate gradients and LiSSA, with Gauss-Newton products."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from analyses.attribution.gradients import Blocks, BlockVectors, answer_logits
from analyses.attribution.rows import EncodedRow, batches, collate

Product = Callable[[Tensor], Tensor]
LISSA_SCALES = (10.0, 20.0, 50.0, 100.0, 150.0, 200.0, 300.0, 500.0, 1000.0, 3000.0, 10_000.0)


class Solution(NamedTuple):
    """x; residual: |(H + lambda I) x - q| / |q| as last seen."""

    x: Tensor
    residual: float


def flat(vectors: BlockVectors, index: int) -> Tensor:
    return torch.cat([part[index] for part in vectors])


def by_block(vectors_DP: Tensor, blocks: Blocks) -> BlockVectors:
    return list(torch.split(vectors_DP, [block.size for block in blocks], dim=1))


def conjugate_gradient(
    product: Product, q: Tensor, damping: float, *, iterations: int = 50, tolerance: float = 1e-3
) -> Solution:
    """x with (H + lambda I) x = q by conjugate gradients; product(v) = H v, H positive
    semi-definite."""
    x, r = torch.zeros_like(q), q.clone()
    p, size = r.clone(), float(q.norm())
    square = float(r @ r)
    for _ in range(iterations):
        if square**0.5 <= tolerance * size:
            break
        Ap = product(p) + damping * p
        alpha = square / float(p @ Ap)
        x = x + alpha * p
        r = r - alpha * Ap
        square, before = float(r @ r), square
        p = r + square / before * p
    return Solution(x, square**0.5 / size if size > 0 else 0.0)


def lissa(
    product: Product, q: Tensor, damping: float, *, scale: float, depth: int
) -> Tensor | None:
    """h <- q + h - (H h + lambda h) / sigma, `depth` times; h / sigma, or None if it diverges.

    product may use another batch of rows at each call. Source: the brief, 2.3 and 5.6 (the damping
    is added, not subtracted).
    """
    h, size = q.clone(), float(q.norm())
    for _ in range(depth):
        h = q + h - (product(h) + damping * h) / scale
        # Convergence is towards sigma (H + lambda I)^-1 q, which is no longer than this.
        if not float(h.norm()) <= 10.0 * scale / damping * size:
            return None
    return h / scale


def lissa_best_scale(
    product: Product, whole: Product, q: Tensor, damping: float, *, depth: int
) -> tuple[Solution, float]:
    """The smallest scale of the brief's list that converges; (solution, scale).

    product: of a batch; whole: of all rows, for the residual. A scale below half the largest
    eigenvalue diverges; the residual tells that before the norm.
    """
    found: tuple[Solution, float] | None = None
    for scale in LISSA_SCALES:
        x = lissa(product, q, damping, scale=scale, depth=depth)
        if x is None:
            continue
        residual = float((whole(x) + damping * x - q).norm() / q.norm())
        found = (Solution(x, residual), scale)
        if residual < 1.0:
            return found
    return found or (Solution(q / damping, float("inf")), float("nan"))


class GaussNewton:
    """H = (1/N) sum_i J_i' (Hess of the loss in the logits) J_i of all rows, for the adapter."""

    def __init__(
        self, model: Any, blocks: Blocks, rows: Sequence[EncodedRow], batch_size: int
    ) -> None:
        self._model, self._blocks, self._rows = model, blocks, rows
        self._batch_size = batch_size
        by_module = {id(block.weight): index for index, block in enumerate(blocks)}
        self._names = {
            by_module[id(parameter)]: name
            for name, parameter in model.named_parameters()
            if id(parameter) in by_module
        }

    def product(self, v: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """H v over the rows (None: all); v and the result are flat vectors.

        u_t = (diag p_t - p_t p_t') (J v)_t / tokens of the row; H v = (1/N) sum_i J_i' u_i.
        """
        chosen = list(range(len(self._rows))) if rows is None else list(rows)
        subset = [self._rows[index] for index in chosen]
        tangents = self._named(v)
        total = torch.zeros_like(v)
        for part in batches(subset, self._batch_size):
            total += self._batch([subset[index] for index in part], tangents)
        return total / len(subset)

    def _named(self, v: Tensor) -> dict[str, Tensor]:
        parts = by_block(v[None], self._blocks)
        return {
            self._names[index]: part.view_as(self._blocks[index].weight)
            for index, part in enumerate(parts)
        }

    def _batch(self, rows: Sequence[EncodedRow], tangents: dict[str, Tensor]) -> Tensor:
        batch = collate(rows, self._blocks[0].weight.device)
        place: list[Tensor] = []

        def logits(parameters: dict[str, Tensor]) -> Tensor:
            with _as_module(self._model, parameters):
                found, _, of_rows = answer_logits(self._model, batch)
            place[:] = [of_rows]
            return found

        weights = {self._names[i]: block.weight.detach() for i, block in enumerate(self._blocks)}
        # Fused attention has no forward derivative.
        with sdpa_kernel(SDPBackend.MATH):
            outcome: Any = torch.func.jvp(logits, (weights,), (tangents,))
            found, Jv = outcome
            leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
            with torch.enable_grad():
                again = logits(leaves)
        p = found.detach().softmax(1)
        counts = torch.bincount(place[0], minlength=len(rows)).clamp(min=1)[place[0]]
        u = p * (Jv - (p * Jv).sum(1, keepdim=True)) / counts[:, None]
        ordered = [leaves[self._names[index]] for index in range(len(self._blocks))]
        gradients = torch.autograd.grad(again, ordered, grad_outputs=u.detach())
        return torch.cat([gradient.flatten() for gradient in gradients])


class _as_module:  # noqa: N801 - reads as a statement
    """Puts other tensors in the place of a model's parameters for one block of code."""

    def __init__(self, model: Any, parameters: dict[str, Tensor]) -> None:
        self._model, self._parameters = model, parameters
        self._kept: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        for name, tensor in self._parameters.items():
            owner, _, attribute = name.rpartition(".")
            module = self._model.get_submodule(owner)
            self._kept.append((module, attribute, module._parameters.pop(attribute)))
            setattr(module, attribute, tensor)

    def __exit__(self, *_: object) -> None:
        for module, attribute, parameter in self._kept:
            delattr(module, attribute)
            module._parameters[attribute] = parameter
