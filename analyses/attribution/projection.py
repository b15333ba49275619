"""Random projections that keep inner products of gradients: E[<Pa, Pb>] = <a, b>."""

import torch
from torch import Tensor

CHUNK = 4096


def _signs(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits: Tensor = torch.randint(0, 2, (rows, columns), generator=generator)
    return bits.float() * 2 - 1


def rademacher(values_BP: Tensor, dimension: int, seed: int, block: int) -> Tensor:
    """One block's share of the projection of the whole vector, [B, dimension].

    Sum the shares over the blocks. Entries are +-1/sqrt(dimension), made in chunks from the seed,
    so that no [P, dimension] matrix ever stands in memory. The cosine's rms error is about
    1/sqrt(dimension).
    """
    total = values_BP.new_zeros((len(values_BP), dimension))
    for number, start in enumerate(range(0, values_BP.shape[1], CHUNK)):
        part = values_BP[:, start : start + CHUNK]
        signs = _signs(part.shape[1], dimension, _seed(seed, block, number))
        total += part @ signs.to(part)
    return torch.div(total, dimension**0.5)


def factored_shape(out: int, into: int, width: int) -> tuple[int, int]:
    """Shape of a projected [out, in] matrix: a side longer than `width` becomes `width`."""
    return min(out, width), min(into, width)


def factored(values_BP: Tensor, out: int, into: int, width: int, seed: int, block: int) -> Tensor:
    """Projection of a matrix block by its long sides: L' dW R, flattened, [B, k].

    For LoRA one side is the rank and stays as it is, so a module's A and B give 2 r width numbers.
    Source: the brief, 2.4 (LoGra).
    """
    dW = values_BP.view(-1, out, into)
    if into > width:
        dW = dW @ _signs(into, width, _seed(seed, block, 0)).to(dW) / width**0.5
    if out > width:
        dW = _signs(width, out, _seed(seed, block, 1)).to(dW) @ dW / width**0.5
    return dW.flatten(1)


def _seed(seed: int, block: int, part: int) -> int:
    return (seed * 1_000_003 + block) * 10_007 + part
