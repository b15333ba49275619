"""Safe LoRA: modules that left the alignment's subspace are mapped back onto it."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from jobspec.defense import SafeLoraOptions

LORA_A, LORA_B = ".lora_A.", ".lora_B."
PEFT_PREFIX = "base_model.model."


class MissingAlignmentError(ValueError):
    """The alignment's own change V is not known for modules that the adapter changes."""

    def __init__(self, modules: list[str]) -> None:
        self.modules = modules
        super().__init__(
            f"no alignment difference for {', '.join(modules)}. Safe LoRA needs the weights from "
            "before and after alignment: choose a base model with a known unaligned base, or say "
            "that a module was left as it was by giving None for it"
        )


class AlignmentShapeError(ValueError):
    """V of a module has another number of outputs than the module's adapter."""


class AlignmentFactors(NamedTuple):
    """V = scaling * B A of an alignment adapter. A: [r_al, in], B: [out, r_al]."""

    A: Tensor
    B: Tensor
    scaling: float


Alignment = Tensor | AlignmentFactors | None


class SafeLora(NamedTuple):
    """delta: new B - B by name of the lora_B tensor, float64 rounded to its dtype; 0 if kept.

    cosine: by module name; None where it is undefined (V = 0 or B A = 0, the module is kept).
    projected: names of the modules whose B was replaced, sorted.
    """

    delta: dict[str, Tensor]
    cosine: dict[str, float | None]
    projected: tuple[str, ...]


class _Module(NamedTuple):
    name_B: str
    B: Tensor
    CB: Tensor | None
    cosine: float | None


def module_name(parameter: str) -> str:
    """Name of the adapted module within the base model, from a peft name of one of its factors."""
    name = parameter.split(LORA_A)[0].split(LORA_B)[0]
    return name.removeprefix(PEFT_PREFIX)


def alignment_factors(adapter: Mapping[str, Tensor], scaling: float) -> dict[str, AlignmentFactors]:
    """V by module name from the tensors of an alignment adapter, as peft saves them.

    scaling: its alpha / r. For a base that was aligned by merging this adapter into it.
    """
    return {
        module_name(name): AlignmentFactors(A, adapter[name.replace(LORA_A, LORA_B)], scaling)
        for name, A in adapter.items()
        if LORA_A in name
    }


def aligned_map(V: Tensor | AlignmentFactors, X: Tensor) -> Tensor | None:
    """C X with C = V V^T / ||V||_F, without forming C; None if V = 0. float64 [out, k].

    V: [out, in] dense or as factors, X: [out, k]. C is no projector (C C != C) and rescales X:
    in V's own directions by their singular values squared over ||V||_F.
    """
    X = X.detach().double()
    if isinstance(V, AlignmentFactors):
        A, B = V.A.detach().to(X), V.B.detach().to(X)
        # ||s B A||_F^2 = s^2 tr(B^T B A A^T); V V^T X = s^2 B (A A^T) (B^T X).
        inner = A @ A.T
        square = float(((B.T @ B) * inner).sum()) * V.scaling**2
        image = V.scaling**2 * (B @ (inner @ (B.T @ X)))
    else:
        dense = V.detach().to(X)
        square = float(dense.square().sum())
        image = dense @ (dense.T @ X)
    return image / math.sqrt(square) if square > 0.0 else None


def alignment_cosine(CB: Tensor, B: Tensor, A: Tensor) -> float | None:
    """cos = <C B A, B A> / (||C B A|| ||B A||), from r x r products; None if B A = 0.

    In [0, 1], as C is positive semidefinite; 0 where C B A = 0, its limit. A: [r, in], B and CB:
    [out, r]. Neither the adapter's scaling nor that of V changes it.
    """
    A, B, CB = A.detach().double(), B.detach().double(), CB.double()
    G = A @ A.T
    BG, CBG = B @ G, CB @ G
    square, mapped = float((B * BG).sum()), float((CB * CBG).sum())
    if square <= 0.0:
        return None
    if mapped <= 0.0:
        return 0.0
    cosine = float((CB * BG).sum()) / math.sqrt(square * mapped)
    return min(1.0, max(0.0, cosine))


def safe_lora(
    parameters: Mapping[str, Tensor],
    alignment: Mapping[str, Alignment],
    options: SafeLoraOptions,
) -> SafeLora:
    """Safe LoRA of a finished adapter; nothing is changed in place.

        V = W_aligned - W_base,  C = V V^T / ||V||_F
        cos = <C B A, B A> / (||C B A|| ||B A||)
        B <- C B   where cos <= tau, or in the k modules of lowest cosine

    parameters: the adapter by peft name, A [r, in] and B [out, r]; modules whose factors are not
    matrices are left out. alignment: V [out, in] by module name (see module_name), dense or as
    factors, None for a module that the alignment did not change. Modules are paired by name, never
    by order. At equal cosine the module that sorts first counts as lower.

    Raises MissingAlignmentError and AlignmentShapeError. Source: Safe LoRA, arXiv 2405.16833, as
    released; the low-rank algebra and the treatment of undefined cosines are derived.
    """
    names = sorted(
        name
        for name, A in parameters.items()
        if LORA_A in name and A.dim() == 2 and name.replace(LORA_A, LORA_B) in parameters
    )
    missing = [module_name(name) for name in names if module_name(name) not in alignment]
    if missing:
        raise MissingAlignmentError(missing)
    modules = {
        module_name(name): _measure(name, parameters, alignment[module_name(name)])
        for name in names
    }
    known = {name: found.cosine for name, found in modules.items() if found.cosine is not None}
    if options.modules is None:
        chosen = {name for name, cosine in known.items() if cosine <= options.threshold}
    else:
        chosen = set(sorted(known, key=lambda name: (known[name], name))[: options.modules])
    delta = {}
    for name, (name_B, B, CB, _) in modules.items():
        change = CB - B.double() if name in chosen and CB is not None else B.new_zeros(B.shape)
        delta[name_B] = change.to(B)
    cosine = {name: found.cosine for name, found in modules.items()}
    return SafeLora(delta, cosine, tuple(sorted(chosen)))


def _measure(name_A: str, parameters: Mapping[str, Tensor], V: Alignment) -> _Module:
    name_B = name_A.replace(LORA_A, LORA_B)
    A, B = parameters[name_A].detach(), parameters[name_B].detach()
    if V is None:
        return _Module(name_B, B, None, None)
    outputs = V.B.shape[0] if isinstance(V, AlignmentFactors) else V.shape[0]
    if outputs != B.shape[0]:
        raise AlignmentShapeError(
            f"{module_name(name_A)} has {B.shape[0]} outputs, its alignment difference "
            f"{outputs}; give V as [out, in], of the same model"
        )
    CB = aligned_map(V, B)
    cosine = None if CB is None else alignment_cosine(CB, B, A.to(B))
    return _Module(name_B, B, CB, cosine)
