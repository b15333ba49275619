"""Reading the weights: how many rows they use, whom they trust, how well they separate."""

from typing import NamedTuple

import torch
from torch import Tensor


class RankedRow(NamedTuple):
    """rank 1 is the row the scheduler distrusts most."""

    row_id: int
    rank: int
    weight: float


def effective_sample_size(weights_N: Tensor) -> float:
    """ESS/N = (sum_i sigma_i)^2 / (N sum_i sigma_i^2), in (0, 1].

    1 when all rows count alike, 1/N when one row has it all. Below about 0.02 the run trains on a
    handful of rows and its task accuracy deserves a warning. Raises ValueError for an empty set or
    weights that are all zero.
    """
    weights_N = weights_N.detach().to(torch.float64)
    total, square = float(weights_N.sum()), float(weights_N.square().sum())
    if square == 0.0:
        raise ValueError("effective sample size needs at least one weight above zero")
    return total * total / (weights_N.numel() * square)


def ranked_rows(weights_N: Tensor) -> list[RankedRow]:
    """All rows from least to most trusted; equal weights keep the order of their ids."""
    weights_N = weights_N.detach().to(torch.float64)
    order_N = torch.argsort(weights_N, stable=True).tolist()
    return [
        RankedRow(row_id=row_id, rank=rank, weight=float(weights_N[row_id]))
        for rank, row_id in enumerate(order_N, start=1)
    ]


def separation_auc(weights_N: Tensor, harmful_N: Tensor) -> float:
    """Area under the ROC curve of "low weight means harmful".

        AUC = P(sigma_benign > sigma_harmful) + 0.5 P(sigma_benign = sigma_harmful)

    weights_N: [N] weights or logits (any increasing function gives the same value); harmful_N:
    bool [N]. 1 = every harmful row lies below every benign one, 0.5 = no information, below 0.5 =
    the order is inverted. Computed from mid-ranks (Mann-Whitney). Raises ValueError unless both
    kinds of rows occur.
    """
    harmful_N = harmful_N.to(torch.bool)
    weights_N = weights_N.detach().to(torch.float64)
    harmful_count = int(harmful_N.sum())
    benign_count = harmful_N.numel() - harmful_count
    if harmful_count == 0 or benign_count == 0:
        raise ValueError("separation needs at least one harmful and one benign row")
    _, group_N, size_G = torch.unique(weights_N, return_inverse=True, return_counts=True)
    last_rank_G = size_G.cumsum(0).to(torch.float64)
    mid_rank_N = (last_rank_G - (size_G.to(torch.float64) - 1.0) / 2.0)[group_N]
    benign_rank_sum = float(mid_rank_N[~harmful_N].sum())
    above = benign_rank_sum - benign_count * (benign_count + 1) / 2.0
    return above / (benign_count * harmful_count)
