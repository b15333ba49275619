"""Vendi scores: how many distinct responses a pool is worth."""

import math

import numpy as np
from numpy.typing import NDArray

from evaluators.diversity.similarity import non_zero

# Eigenvalues below this are rounding of exact zeros and would break q < 1 and the logarithm.
_EIGENVALUE_FLOOR = 1e-12


def vendi_score(e_n_D: NDArray[np.floating], q: float = 1.0) -> float | None:
    """Effective number of distinct responses, between 1 and n.

    lambda = eigenvalues of K/n with K_ij = e_i . e_j;
    VS_1 = exp(-sum lambda ln lambda), VS_q = (sum lambda^q)^(1/(1-q)), VS_inf = 1/max lambda.

    Uses the smaller of the n x n and D x D Gram matrices, which share their non-zero eigenvalues.
    Zero vectors are excluded; None when fewer than two remain. Raises ValueError for q <= 0.
    Vendi score of Friedman and Dieng, arXiv 2210.02410; order q after Pasarkar and Dieng.
    """
    return vendi_scores(e_n_D, (q,))[0]


def vendi_scores(e_n_D: NDArray[np.floating], orders: tuple[float, ...]) -> list[float | None]:
    """`vendi_score` of several orders from one decomposition."""
    for q in orders:
        if not q > 0:
            raise ValueError(f"the order q must be positive, got {q}")
    e_n_D = non_zero(e_n_D)
    n, width = e_n_D.shape
    if n < 2:
        return [None] * len(orders)
    gram = e_n_D @ e_n_D.T if n <= width else e_n_D.T @ e_n_D
    eigenvalues = np.linalg.eigvalsh(gram / n)
    positive = eigenvalues[eigenvalues > _EIGENVALUE_FLOOR]
    return [_of_order(positive, q) for q in orders]


def _of_order(eigenvalues: NDArray[np.float64], q: float) -> float:
    if math.isinf(q):
        return float(1.0 / eigenvalues.max())
    if q == 1.0:
        return float(np.exp(-(eigenvalues * np.log(eigenvalues)).sum()))
    return float((eigenvalues**q).sum() ** (1.0 / (1.0 - q)))
