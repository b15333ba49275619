"""Where a perturbation acts: its share per layer, and what it does to the effective matrices."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")
_FACTOR = re.compile(r"\.(?P<module>[^.]+)\.lora_(?P<factor>[AB])\.")


class LayerCoefficients(NamedTuple):
    """Shares of ||eps||^2; each of the three splits sums to 1, or to 0 for eps = 0.

    by_layer: decoder layer number -> c_k; layer -1 holds tensors outside the decoder layers.
    by_module: module kind ("q_proj", ...) -> share. by_factor: "A", "B", or "other".
    """

    by_layer: dict[int, float]
    by_module: dict[str, float]
    by_factor: dict[str, float]


def layer_number(name: str) -> int:
    """Decoder layer of a parameter or module by its name; -1 outside the decoder layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def layer_coefficients(eps: Mapping[str, Tensor]) -> LayerCoefficients:
    """Safety coefficients c_k = ||eps_k||_2^2 / ||eps||_2^2 of the decoder layers.

    eps: tensors by parameter name, as in named_parameters of a peft model. ||eps|| is rho up to
    the norm guard. Idea: Panacea, arXiv 2501.18100; formula derived.
    """
    squares = _squares(eps)
    total = sum(squares.values()) or 1.0
    by_layer: dict[int, float] = {}
    by_module: dict[str, float] = {}
    by_factor: dict[str, float] = {}
    for name, square in squares.items():
        number = layer_number(name)
        adapter = _FACTOR.search(name)
        module = adapter["module"] if adapter else name.removesuffix(".weight").rsplit(".", 1)[-1]
        factor = adapter["factor"] if adapter else "other"
        share = square / total
        by_layer[number] = by_layer.get(number, 0.0) + share
        by_module[module] = by_module.get(module, 0.0) + share
        by_factor[factor] = by_factor.get(factor, 0.0) + share
    return LayerCoefficients(dict(sorted(by_layer.items())), by_module, by_factor)


class CoefficientAverage:
    """Mean of c_k over steps, because one batch's eps is a noisy witness.

        mean c_k = (1/S) sum over the last S steps of ||eps_k||^2 / ||eps||^2

    The training loop calls add(eps) once a step from first_averaged_step on; a step without an eps
    adds nothing. The state is a flat mapping of CPU tensors, enough to continue bit for bit.
    Source: derived from Panacea, arXiv 2501.18100.
    """

    def __init__(self) -> None:
        self._sums: dict[int, float] = {}
        self._steps = 0

    def add(self, eps: Mapping[str, Tensor]) -> None:
        """Count the coefficients of one step's eps."""
        for layer, share in layer_coefficients(eps).by_layer.items():
            self._sums[layer] = self._sums.get(layer, 0.0) + share
        self._steps += 1

    def result(self) -> dict[int, float] | None:
        """Layer number -> mean c_k, summing to 1; None before the first step."""
        if self._steps == 0:
            return None
        return {layer: total / self._steps for layer, total in sorted(self._sums.items())}

    def state(self) -> dict[str, Tensor]:
        """layers int64 [K], sums float64 [K], steps int64 []."""
        layers = sorted(self._sums)
        return {
            "layers": torch.tensor(layers, dtype=torch.int64),
            "sums": torch.tensor([self._sums[k] for k in layers], dtype=torch.float64),
            "steps": torch.tensor(self._steps),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what state() gave."""
        layers, sums = state["layers"].tolist(), state["sums"].tolist()
        self._sums = dict(zip(layers, sums, strict=True))
        self._steps = int(state["steps"])


def first_averaged_step(total_steps: int, share: float = 0.1) -> int:
    """First step (from 0) of the last `share` of the steps, at least one step."""
    # Rounded first: 0.1 * 30 is a little more than 3.
    return max(total_steps - max(1, math.ceil(round(share * total_steps, 9))), 0)


def effective_change_norms(
    parameters: Mapping[str, Tensor],
    eps: Mapping[str, Tensor],
    scaling: float,
    scale: float = 1.0,
) -> dict[str, float]:
    """Frobenius norm of what the perturbation adds to each adapted matrix.

        Delta = (alpha/r) [ (B + e_B)(A + e_A) - B A ] = (alpha/r) [ e_B (A + e_A) + B e_A ],
        e = scale * eps,  A: [r, in], B: [out, r],  scaling = alpha/r

    Returns module name -> ||Delta||_F. With U = [e_B, B] and V = [A + e_A; e_A] the norm is
    sqrt(tr((U^T U)(V V^T))), so no [out, in] matrix is formed (derived). Modules whose factors are
    not both matrices in eps are left out.
    """
    norms: dict[str, float] = {}
    for name_A in eps:
        name_B = name_A.replace(".lora_A.", ".lora_B.")
        if name_B == name_A or name_B not in eps or eps[name_A].dim() != 2:
            continue
        A, B = parameters[name_A].detach().double(), parameters[name_B].detach().double()
        e_A, e_B = eps[name_A].detach().double() * scale, eps[name_B].detach().double() * scale
        U, V = torch.cat([e_B, B], dim=1), torch.cat([A + e_A, e_A], dim=0)
        square = ((U.T @ U) * (V @ V.T)).sum().clamp(min=0.0)
        norms[name_A.split(".lora_A.")[0]] = abs(scaling) * float(square.sqrt())
    return norms


def _squares(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """||.||_F^2 of each tensor, fetched from the device at once."""
    if not tensors:
        return {}
    found = [tensor.detach().double().square().sum() for tensor in tensors.values()]
    together = torch.stack([square.to(found[0].device) for square in found]).tolist()
    return dict(zip(tensors, together, strict=True))
