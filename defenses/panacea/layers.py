"""Where a perturbation acts: its share per layer, and what it does to the effective matrices."""

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


def layer_coefficients(eps: Mapping[str, Tensor]) -> LayerCoefficients:
    """Safety coefficients c_k = ||eps_k||_2^2 / ||eps||_2^2 of the decoder layers.

    eps: tensors by parameter name, as in named_parameters of a peft model. ||eps|| is rho up to
    the norm guard. Idea: Panacea, arXiv 2501.18100; formula derived.
    """
    squares = {name: float(tensor.detach().double().square().sum()) for name, tensor in eps.items()}
    total = sum(squares.values()) or 1.0
    by_layer: dict[int, float] = {}
    by_module: dict[str, float] = {}
    by_factor: dict[str, float] = {}
    for name, square in squares.items():
        layer = _LAYER.search(name)
        adapter = _FACTOR.search(name)
        number = int(layer[1]) if layer else -1
        module = adapter["module"] if adapter else name.removesuffix(".weight").rsplit(".", 1)[-1]
        factor = adapter["factor"] if adapter else "other"
        share = square / total
        by_layer[number] = by_layer.get(number, 0.0) + share
        by_module[module] = by_module.get(module, 0.0) + share
        by_factor[factor] = by_factor.get(factor, 0.0) + share
    return LayerCoefficients(dict(sorted(by_layer.items())), by_module, by_factor)


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
