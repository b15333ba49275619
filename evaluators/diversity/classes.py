"""Equivalence classes of responses: NoveltyBench's counts, and semantic entropy."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

PATIENCE = 0.8
SHORT_WORDS = 5
# Raw rewards of Skywork-Reward-Gemma-2-27B-v0.2 that separate the qualities 1 to 10.
REWARD_BOUNDS = (
    -7.71875, -6.28125, -6.0, -5.71875, -5.5, -5.0, -4.375, -3.4375, -2.046875,
)  # fmt: skip


def greedy_classes(n: int, same: Callable[[int, int], bool]) -> list[int]:
    """Class of each of n responses: i joins the first class whose first member m has same(i, m).

    Depends on the order where `same` is not transitive. NoveltyBench, arXiv 2504.05228, and
    semantic entropy, Farquhar et al., Nature 630 (2024).
    """
    heads: list[int] = []
    found = []
    for i in range(n):
        place = next((c for c, head in enumerate(heads) if same(i, head)), len(heads))
        if place == len(heads):
            heads.append(i)
        found.append(place)
    return found


def short_texts_agree(left: str, right: str) -> bool | None:
    """NoveltyBench's rule for two texts of at most 5 words: 2 |shared words| >= the longer one's
    number of words. None where a text is longer."""
    a, b = left.strip().lower().split(), right.strip().lower().split()
    longest = max(len(a), len(b))
    if longest > SHORT_WORDS:
        return None
    return 2 * len(set(a) & set(b)) >= longest


def cosine_classes(e_n_D: NDArray[np.floating], threshold: float) -> list[int]:
    """Greedy classes with e_i . e_j >= threshold as "same".

    `threshold` belongs to the embedder, see evaluators.diversity.scale. The cosine stands in for
    NoveltyBench's pair classifier, which is no part of this package.
    """
    same_n_n = _same(e_n_D, threshold)
    return greedy_classes(len(e_n_D), lambda i, head: bool(same_n_n[i, head]))


def novelty_classes(
    texts: Sequence[str], e_n_D: NDArray[np.floating], threshold: float
) -> list[int]:
    """`cosine_classes`, where two short texts are compared by `short_texts_agree` instead."""
    if len(texts) != len(e_n_D):
        raise ValueError(f"{len(texts)} texts for {len(e_n_D)} embeddings")
    same_n_n = _same(e_n_D, threshold)

    def same(i: int, head: int) -> bool:
        short = short_texts_agree(texts[i], texts[head])
        return bool(same_n_n[i, head]) if short is None else short

    return greedy_classes(len(texts), same)


def _same(e_n_D: NDArray[np.floating], threshold: float) -> NDArray[np.bool_]:
    e_n_D = np.asarray(e_n_D, dtype=np.float64)
    return np.asarray(e_n_D @ e_n_D.T >= threshold)


def utility_k(classes: Sequence[int], quality: Sequence[float], p: float = PATIENCE) -> float:
    """What a reader of patience p gains: (1-p)/(1-p^k) sum_i p^(i-1) 1[class of i is new] u_i.

    u_i is the quality of response i, 1 to 10 (`quality_of_reward`). NoveltyBench. Raises ValueError
    for no response, unequal lengths or p outside (0, 1).
    """
    if len(classes) != len(quality) or not classes:
        raise ValueError(f"{len(classes)} classes for {len(quality)} qualities")
    if not 0 < p < 1:
        raise ValueError(f"the patience must lie within (0, 1), got {p}")
    seen: set[int] = set()
    gained = 0.0
    for i, (place, u) in enumerate(zip(classes, quality, strict=True)):
        if place not in seen:
            seen.add(place)
            gained += p**i * u
    return (1 - p) / (1 - p ** len(classes)) * gained


def quality_of_reward(reward: float) -> int:
    """Quality 1..10 of a raw reward by NoveltyBench's bounds, which belong to one reward model."""
    return bisect_left(REWARD_BOUNDS, reward) + 1


def semantic_clusters(n: int, entails: Callable[[int, int], bool]) -> list[int]:
    """Greedy classes of responses that entail each other in both directions."""
    return greedy_classes(n, lambda i, head: entails(i, head) and entails(head, i))


def semantic_entropy(
    clusters: Sequence[int], log_probabilities: Sequence[float] | None = None
) -> float:
    """SE = -sum_C p(C) ln p(C), nats.

    p(C) is the share of responses in cluster C, or, with sequence log-probabilities, the sum of
    the members' probabilities normalised over all responses. Farquhar et al., Nature 630 (2024).
    Raises ValueError for no response or unequal lengths.
    """
    if not clusters:
        raise ValueError("semantic entropy needs at least one response")
    if log_probabilities is None:
        shares = [count / len(clusters) for count in Counter(clusters).values()]
    else:
        if len(log_probabilities) != len(clusters):
            raise ValueError(f"{len(log_probabilities)} probabilities for {len(clusters)} clusters")
        highest = max(log_probabilities)
        mass: dict[int, float] = {}
        for cluster, log_p in zip(clusters, log_probabilities, strict=True):
            mass[cluster] = mass.get(cluster, 0.0) + math.exp(log_p - highest)
        shares = [part / sum(mass.values()) for part in mass.values()]
    # Adding 0.0 turns the -0.0 of a single cluster into 0.0.
    return -sum(share * math.log(share) for share in shares if share > 0) + 0.0
