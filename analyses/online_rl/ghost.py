"""Inner products of per-record gradients without the gradients: the ghost dot product.

Linear layer, input x (F), gradient at the output g (O): a record's weight gradient is g x', its
bias gradient g. With P (O, F) and b (O) the gradients of a target that all records share,
<record, target> = g' P x + g' b, evaluated as ((G P) * X).sum(1) + G b: n O F multiply-adds and
memory n (O + F). A sequence of T tokens sums over t; a convolution is the same over its patches.
LoRA needs nothing of its own: its A and B are linear layers. (Brief of the method, 2.4.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from analyses.context import AnalysisError


class Shift(nn.Module):
    """A bare parameter that is the same for every record, such as log sigma of a Gaussian policy.

    As a layer of its own its per-record gradient is the gradient at its output.
    """

    def __init__(self, width: int, value: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((width,), value))

    def forward(self, records: int) -> Tensor:
        return self.bias.expand(records, -1)


class Captured(NamedTuple):
    """A layer's inputs X and the gradients G at its outputs; (n, F) and (n, O), or (n, T, .)."""

    inputs: Tensor | None
    gradients: Tensor


Layers = Mapping[str, nn.Module]
Gradients = Mapping[str, Mapping[str, Tensor]]


def scored_layers(model: nn.Module, skip: Sequence[str] = ("value_net",)) -> dict[str, nn.Module]:
    """Trainable linear, convolution and Shift layers by name, but those whose name has a skip.

    Raises AnalysisError where there is none.
    """
    found: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | Shift)
        and any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        and not any(part in name for part in skip)
    }
    if not found:
        raise AnalysisError("the policy has no trainable linear or convolution layer to score by")
    for name, module in found.items():
        if isinstance(module, nn.Conv2d) and (
            module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str)
        ):
            raise AnalysisError(
                f"layer {name}: a convolution with groups, named or non-zero padding is not scored"
            )
    return found


def unscored_parameters(
    model: nn.Module, layers: Layers, skip: Sequence[str] = ("value_net",)
) -> list[str]:
    """Trainable parameters that scored_layers leaves out and skip does not explain."""
    inside = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and id(parameter) not in inside
        and not any(part in name for part in skip)
    ]


def capture(
    layers: Layers, forward: Callable[[], Sequence[Tensor]]
) -> tuple[list[dict[str, Captured]], list[dict[str, dict[str, Tensor]]]]:
    """Run forward once; for each scalar that it returns, X and G of every layer, and the scalar's
    gradient in every layer's parameters ("weight", "bias").

    Layers that a scalar does not reach are absent from its dict. Raises AnalysisError for a layer
    that is called twice, whose records' gradients would not be one product.
    """
    seen: dict[str, tuple[Tensor | None, Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[object, ...], Tensor], None]:
        def hook(_module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> None:
            if name in seen:
                raise AnalysisError(f"layer {name} is used twice in one pass; it cannot be scored")
            first = inputs[0]
            seen[name] = (first.detach() if isinstance(first, Tensor) else None, output)

        return hook

    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    try:
        scalars = list(forward())
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name in layers if name in seen and seen[name][1].requires_grad]
    outputs = [seen[name][1] for name in names]
    parameters = [
        (name, kind, parameter)
        for name in names
        for kind, parameter in layers[name].named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    captured, totals = [], []
    for place, scalar in enumerate(scalars):
        wanted = [*outputs, *(parameter for _, _, parameter in parameters)]
        grads = torch.autograd.grad(
            scalar, wanted, retain_graph=place < len(scalars) - 1, allow_unused=True
        )
        captured.append(
            {
                name: _rows(layers[name], seen[name][0], grad)
                for name, grad in zip(names, grads, strict=False)
                if grad is not None
            }
        )
        total: dict[str, dict[str, Tensor]] = {}
        for (name, kind, _), grad in zip(parameters, grads[len(outputs) :], strict=True):
            if grad is not None:
                total.setdefault(name, {})[kind] = grad
        totals.append(total)
    return captured, totals


def _rows(layer: nn.Module, inputs: Tensor | None, gradients: Tensor) -> Captured:
    """One row per record: (n, F) of vectors, (n, T, F) of sequences and of patches."""
    if isinstance(layer, nn.Conv2d):
        assert inputs is not None
        patches = functional.unfold(
            inputs,
            cast(tuple[int, int], layer.kernel_size),
            cast(tuple[int, int], layer.dilation),
            cast(tuple[int, int], layer.padding),
            cast(tuple[int, int], layer.stride),
        )
        return Captured(patches.transpose(1, 2), gradients.flatten(2).transpose(1, 2))
    if inputs is None or gradients.ndim <= 2:
        return Captured(inputs, gradients)
    n = len(gradients)
    return Captured(
        inputs.reshape(n, -1, inputs.shape[-1]), gradients.reshape(n, -1, gradients.shape[-1])
    )


def products(captured: Mapping[str, Captured], target: Gradients) -> Tensor:
    """<gradient of record i, target> summed over layers, shape (n,), at least float32."""
    parts = []
    for name, (inputs, gradients) in captured.items():
        of_layer = target.get(name, {})
        G = _wide(gradients)
        if "weight" in of_layer and inputs is not None:
            P = of_layer["weight"].flatten(1).to(G.dtype)
            parts.append(((G @ P) * _wide(inputs)).flatten(1).sum(dim=1))
        if "bias" in of_layer:
            summed = G if G.ndim == 2 else G.sum(dim=1)
            parts.append(summed @ of_layer["bias"].to(G.dtype))
    if not parts:
        raise AnalysisError(
            "no layer carries a gradient of both the target and the records: nothing can be scored"
        )
    return torch.stack(parts).sum(dim=0)


def inner(first: Mapping[str, Captured], second: Mapping[str, Captured], layers: Layers) -> Tensor:
    """<gradient of record i in first, of the same record in second>, shape (n,).

    Vectors: (g1.g2) (x.x + 1 with a bias). Sequences: by the gradients themselves, or by the
    tokens' Gram matrices where these are smaller.
    """
    parts = []
    for name in first:
        if name not in second:
            continue
        X, G1, G2 = first[name].inputs, _wide(first[name].gradients), _wide(second[name].gradients)
        kinds = {
            kind for kind, p in layers[name].named_parameters(recurse=False) if p.requires_grad
        }
        if G1.ndim == 2:
            scale = torch.zeros_like(G1[:, 0])
            if X is not None and "weight" in kinds:
                scale = scale + _wide(X).square().sum(dim=1)
            if "bias" in kinds:
                scale = scale + 1
            parts.append((G1 * G2).sum(dim=1) * scale)
            continue
        if "bias" in kinds:
            parts.append((G1.sum(dim=1) * G2.sum(dim=1)).sum(dim=1))
        if X is None or "weight" not in kinds:
            continue
        X = _wide(X)
        if G1.shape[2] * X.shape[2] <= G1.shape[1] ** 2:
            parts.append((weight_gradients(X, G1) * weight_gradients(X, G2)).sum(dim=(1, 2)))
        else:
            parts.append(((G1 @ G2.mT) * (X @ X.mT)).sum(dim=(1, 2)))
    return torch.stack(parts).sum(dim=0)


def weight_gradients(inputs_NTF: Tensor, gradients_NTO: Tensor) -> Tensor:
    """The records' weight gradients themselves, (n, O, F); for the low rank of LoRA."""
    return gradients_NTO.mT @ inputs_NTF


def norm(target: Gradients) -> float:
    """Euclidean norm of a gradient over all scored layers."""
    squares = [_wide(g).square().sum() for of_layer in target.values() for g in of_layer.values()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def add(total: dict[str, dict[str, Tensor]], more: Gradients, weight: float = 1.0) -> None:
    """total += weight * more, in place."""
    for name, of_layer in more.items():
        for kind, gradient in of_layer.items():
            mine = total.setdefault(name, {})
            mine[kind] = gradient * weight + mine[kind] if kind in mine else gradient * weight


def chunks(n: int, size: int) -> Iterable[slice]:
    """Slices that cover 0..n-1."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
