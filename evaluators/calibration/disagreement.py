"""How much the raters of one item disagree, from their label counts."""

import numpy as np
from numpy.typing import NDArray

# The five options of a pairwise item, in order, and what each vote is worth for response 1.
PAIRWISE_OPTIONS = ("strongly_1", "slightly_1", "similar", "slightly_2", "strongly_2")
PAIRWISE_VALUES = (2.0, 1.0, 0.0, -1.0, -2.0)

Counts = NDArray[np.floating] | NDArray[np.integer]
Values = NDArray[np.float64]


def entropy(counts_N_L: Counts) -> Values:
    """H = -sum_l p_l log2 p_l, bits; p_l = c_l / n. Log base 2 follows from the paper's figures."""
    p_N_L = _shares(counts_N_L)
    logarithm_N_L = np.log2(p_N_L, out=np.zeros_like(p_N_L), where=p_N_L > 0)
    # Label order changes the last bits of a sum; equal counts must have equal entropy.
    terms_N_L = np.sort(p_N_L * logarithm_N_L, axis=1)
    return np.asarray(np.round(-terms_N_L.sum(1), 12) + 0.0)


def grouped(counts_N_5: Counts) -> NDArray[np.float64]:
    """The five pairwise options merged to {1 better, similar, 2 better}."""
    c = np.asarray(counts_N_5, dtype=np.float64)
    if c.ndim != 2 or c.shape[1] != 5:
        raise ValueError(f"pairwise items have five options, got counts of shape {c.shape}")
    return np.stack([c[:, 0] + c[:, 1], c[:, 2], c[:, 3] + c[:, 4]], axis=1)


def gini(counts_N_L: Counts) -> Values:
    """Gini impurity 1 - sum_l p_l^2: two votes drawn with replacement differ."""
    return np.asarray(1 - (_shares(counts_N_L) ** 2).sum(1))


def pairwise_disagreement(counts_N_L: Counts) -> Values:
    """(n^2 - sum_l c_l^2) / (n (n-1)) = gini n/(n-1): two different raters differ.

    NaN for n < 2.
    """
    return 1 - _agreement(counts_N_L)


def minority(counts_N_L: Counts) -> Values:
    """1 - max_l p_l: share of raters outside the most frequent label."""
    return np.asarray(1 - _shares(counts_N_L).max(1))


def fleiss_single(counts_N_L: Counts) -> Values:
    """(P_i - P_e) / (1 - P_e) of each item, P_i = (sum_l c_l^2 - n) / (n (n-1)).

    P_e = sum_l (pooled share of label l)^2 over all items, 1/L for one item, for which the pooled
    shares are its own. NaN for n < 2 or where every vote of all items is the same. Derived from
    Fleiss, Psychological Bulletin 76 (1971).
    """
    agreement_N, chance = _agreement(counts_N_L), _chance(counts_N_L)
    if chance >= 1:
        return np.full(len(agreement_N), np.nan)
    return np.asarray((agreement_N - chance) / (1 - chance))


def fleiss_kappa(counts_N_L: Counts) -> float | None:
    """Fleiss' kappa of all items together: the mean of `fleiss_single` where it is defined."""
    single_N = fleiss_single(counts_N_L)
    defined = single_N[np.isfinite(single_N)]
    return float(defined.mean()) if len(defined) else None


def p_disagree(counts_N_5: Counts) -> Values:
    """1 - (max(C_1, C_2) + C_tie/2) / C_total, C_1 and C_2 = strong + slight votes. [0, 0.5].

    A tie counts as half a vote for the winner, so raters who all say "similar" reach the highest
    value although they agree: read grouped entropy beside it. Artificial Hivemind, arXiv
    2510.22954.
    """
    votes_N_3 = grouped(counts_N_5)
    total_N = votes_N_3.sum(1)
    _check_totals(total_N)
    winner_N = np.maximum(votes_N_3[:, 0], votes_N_3[:, 2])
    return np.asarray(1 - (winner_N + votes_N_3[:, 1] / 2) / total_N)


def similar_share(counts_N_5: Counts) -> Values:
    """Share of raters who call the two responses similar."""
    votes_N_3 = grouped(counts_N_5)
    _check_totals(votes_N_3.sum(1))
    return np.asarray(votes_N_3[:, 1] / votes_N_3.sum(1))


def mean_rating(counts_N_L: Counts) -> Values:
    """Human score of an absolute item: the mean of its ratings 1..L."""
    c = np.asarray(counts_N_L, dtype=np.float64)
    return np.asarray(_shares(c) @ np.arange(1, c.shape[1] + 1))


def mean_preference(counts_N_5: Counts) -> Values:
    """Human score of a pairwise item: mean of 2, 1, 0, -1, -2; larger favours response 1. The
    coding is derived."""
    grouped(counts_N_5)
    return np.asarray(_shares(counts_N_5) @ np.asarray(PAIRWISE_VALUES))


def _shares(counts_N_L: Counts) -> NDArray[np.float64]:
    c = np.asarray(counts_N_L, dtype=np.float64)
    if c.ndim != 2 or c.shape[1] < 2:
        raise ValueError(f"label counts are a table of items by labels, got shape {c.shape}")
    total_N_1 = c.sum(1, keepdims=True)
    if (c < 0).any() or not np.isfinite(c).all():
        raise ValueError("label counts must be finite and not negative")
    _check_totals(total_N_1)
    return np.asarray(c / total_N_1)


def _check_totals(total: NDArray[np.floating]) -> None:
    if (total <= 0).any():
        raise ValueError("every item needs at least one rating")


def _agreement(counts_N_L: Counts) -> NDArray[np.float64]:
    c = np.asarray(counts_N_L, dtype=np.float64)
    _shares(c)
    n_N = c.sum(1)
    pairs_N = n_N * (n_N - 1)
    found_N = np.full(len(c), np.nan)
    np.divide((c**2).sum(1) - n_N, pairs_N, out=found_N, where=pairs_N > 0)
    return found_N


def _chance(counts_N_L: Counts) -> float:
    c = np.asarray(counts_N_L, dtype=np.float64)
    if len(c) == 1:
        return float(1 / c.shape[1])
    pooled_L = c.sum(0) / c.sum()
    return float((pooled_L**2).sum())
