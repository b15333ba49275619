"""Which items are of similar quality, and which ones raters disagree about."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluators.calibration.disagreement import entropy, p_disagree, similar_share
from evaluators.calibration.windows import SELECTORS, tukey_fences, within_queries

Kind = Literal["absolute", "pairwise"]
Family = Literal["full", "similar_quality", "disagreed", "alternative"]

TUKEY_K = (3.0, 2.5, 2.0, 1.5, 1.0, 0.5)
TOP_ENTROPY = (0.16, 0.14, 0.12, 0.10, 0.08, 0.06, 0.04, 0.02)
KEPT_SHARES = (0.95, 0.90, 0.85, 0.80, 0.75, 0.70, 0.65, 0.60)
# What Tukey's fences at k = 0.5 keep of normal scores, so the selectors can be compared with it.
SELECTED_SHARE = 0.8


class Subset(NamedTuple):
    """Places of some items of a table, ascending, and how they were chosen."""

    family: Family
    name: str
    parameter: float | None
    places: NDArray[np.int64]


def paper_subsets(
    kind: Kind,
    counts_N_L: NDArray[np.integer],
    human_N: NDArray[np.floating],
    queries: Sequence[str],
) -> list[Subset]:
    """All items, and the subsets of Artificial Hivemind, arXiv 2510.22954, section 5.

    absolute: similar quality by Tukey's fences on the human scores (k = 3 ... 0.5), disagreed by
    the top 16 ... 2 % of entropy with ties kept, and the alternative selectors of similar quality,
    over the whole list and within each query. pairwise: similar quality by the share of "similar"
    votes and disagreed by P_disagree, each the top 95 ... 60 %, ties by order.
    """
    found = [Subset("full", "all items", None, np.arange(len(human_N)))]
    if kind == "pairwise":
        similar_N, disagreed_N = similar_share(counts_N_L), p_disagree(counts_N_L)
        for share in KEPT_SHARES:
            places = highest(similar_N, share)
            found.append(Subset("similar_quality", "share of similar votes", share, places))
        for share in KEPT_SHARES:
            places = highest(disagreed_N, share)
            found.append(Subset("disagreed", "P_disagree", share, places))
        return found
    found += [
        Subset("similar_quality", "Tukey fences", k, tukey_fences(human_N, k)) for k in TUKEY_K
    ]
    entropy_N = entropy(counts_N_L)
    for share in TOP_ENTROPY:
        places = highest(entropy_N, share, keep_ties=True)
        found.append(Subset("disagreed", "entropy", share, places))
    size = max(1, round(SELECTED_SHARE * len(human_N)))
    for name, select in SELECTORS.items():
        places = select(human_N, size)
        found.append(Subset("alternative", name, SELECTED_SHARE, places))
        places = within_queries(select, human_N, queries, SELECTED_SHARE)
        found.append(Subset("alternative", f"{name}, by query", SELECTED_SHARE, places))
    return found


def highest(
    values_N: NDArray[np.floating], share: float, *, keep_ties: bool = False
) -> NDArray[np.int64]:
    """The round(share N) items of highest value, at least one: equal values by order, or, with
    keep_ties, all that equal the last one."""
    values_N = np.asarray(values_N, dtype=np.float64)
    size = max(1, round(share * len(values_N)))
    order_N = np.argsort(-values_N, kind="stable")
    if keep_ties:
        return np.flatnonzero(values_N >= values_N[order_N[size - 1]])
    return np.sort(order_N[:size])
