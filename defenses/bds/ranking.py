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


def selected_rows(weights_N: Tensor, keep_share: float) -> list[int]:
    """Ids of the most trusted rows, ascending: what SEAL tunes on (arXiv 2410.07471).

    Keeps round(keep_share * N) rows, at least one, by descending weight (or logit, which gives
    the same rows); equal weights go by the lower id. Raises ValueError for an empty set or a share
    outside (0, 1].
    """
    row_count = weights_N.numel()
    if row_count == 0 or not 0.0 < keep_share <= 1.0:
        raise ValueError(
            f"selection needs rows and a share in (0, 1], got {row_count} rows and {keep_share}"
        )
    kept = max(1, round(keep_share * row_count))
    order_N = torch.argsort(weights_N.detach().to(torch.float64), descending=True, stable=True)
    return sorted(order_N[:kept].tolist())


def trusted_mass_share(weights_N: Tensor) -> float:
    """Share of the total weight that lies on rows with a weight of at least 1, in [0, 1].

        sum_{i: w_i >= 1} w_i / sum_i w_i

    weights_N: non-negative, mean 1 (softmax transform), so that 1 means "counts as much as in plain
    tuning". Near 1: the rows that lost weight hardly train the model any more. Equal weights give
    1: no row was distrusted; read it beside the effective sample size. A rounding error of 1e-9
    below 1 still counts as 1. Raises ValueError for an empty set or weights that are all zero.
    """
    weights_N = weights_N.detach().to(torch.float64)
    total = float(weights_N.sum())
    if total == 0.0:
        raise ValueError("the share of trusted mass needs at least one weight above zero")
    return float(weights_N[weights_N >= 1.0 - 1e-9].sum()) / total
