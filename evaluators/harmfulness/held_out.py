"""How good a fitted scorer is on answers that it was not fitted on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evaluators.harmfulness.fit_data import LabelledSet
from evaluators.harmfulness.models import HarmfulModel, LogisticModel

INTERVAL_ROUNDS = 1000


@dataclass(frozen=True)
class Rows:
    """A labelled set with its normalised texts and their features x_N_F."""

    data: LabelledSet
    texts: tuple[str, ...]
    x_N_F: NDArray[np.float64]

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def labels(self) -> NDArray[np.int64]:
        return self.data.labels


def measured(
    model: HarmfulModel, rows: Rows, threshold: float, seed: int = 0
) -> dict[str, float | dict[str, dict[str, float]]]:
    """Error rates of a model on rows that it was not fitted on, at p >= threshold.

    `auroc_low`, `auroc_high`: 95 % interval over prompts. `groups`, where several models answered:
    the labelled and the flagged share of each, which is how a gate uses the scorer.
    """
    from sklearn.metrics import f1_score

    p_N, y_N = model.probability(rows.texts, rows.x_N_F), rows.labels
    flagged_N = p_N >= threshold
    low, high = auroc_interval(p_N, y_N, rows.data.prompts, seed)
    found: dict[str, float | dict[str, dict[str, float]]] = {
        "n": len(y_N),
        "unsafe_share": _rounded(y_N.mean()),
        "auroc": _rounded(weighted_auroc(p_N, y_N, np.ones(len(y_N)))),
        "auroc_low": _rounded(low),
        "auroc_high": _rounded(high),
        "balanced_accuracy": _rounded(
            (flagged_N[y_N == 1].mean() + (~flagged_N)[y_N == 0].mean()) / 2
        ),
        "accuracy": _rounded((flagged_N == y_N).mean()),
        "f1": _rounded(f1_score(y_N, flagged_N)),
        "flagged_share": _rounded(flagged_N.mean()),
    }
    groups_N = np.array(rows.data.groups)
    if len(set(rows.data.groups)) > 1:
        found["groups"] = {
            name: {
                "n": int((groups_N == name).sum()),
                "unsafe_share": _rounded(y_N[groups_N == name].mean()),
                "flagged_share": _rounded(flagged_N[groups_N == name].mean()),
            }
            for name in dict.fromkeys(rows.data.groups)
        }
    return found


def leave_one_group_out(
    rows: Rows,
    fit: Callable[[NDArray[np.float64], NDArray[np.int64]], LogisticModel],
    threshold: float,
) -> dict[str, float]:
    """Each answering model is scored by a fit on all the others; figures over all of them."""
    from sklearn.metrics import precision_recall_fscore_support

    groups_N = np.array(rows.data.groups)
    p_N = np.zeros(len(rows.labels))
    for group in sorted(set(rows.data.groups)):
        inside_N = groups_N == group
        model = fit(rows.x_N_F[~inside_N], rows.labels[~inside_N])
        p_N[inside_N] = model.probability(rows.x_N_F[inside_N])
    refused_N = p_N >= threshold
    precision, recall, f1, _ = precision_recall_fscore_support(
        rows.labels, refused_N, average="binary"
    )
    return {
        "n": len(rows.labels),
        "refusal_share": _rounded(rows.labels.mean()),
        "auroc": _rounded(weighted_auroc(p_N, rows.labels, np.ones(len(p_N)))),
        "accuracy": _rounded((refused_N == rows.labels).mean()),
        "precision": _rounded(precision),
        "recall": _rounded(recall),
        "f1": _rounded(f1),
    }


def auroc_interval(
    p_N: NDArray[np.float64],
    y_N: NDArray[np.int64],
    prompts: Sequence[str],
    seed: int,
    rounds: int = INTERVAL_ROUNDS,
) -> tuple[float, float]:
    """Percentile bootstrap, 95 %, that draws whole prompts with replacement."""
    place: dict[str, int] = {}
    cluster_N = np.array([place.setdefault(prompt, len(place)) for prompt in prompts])
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(rounds):
        times_C = np.bincount(generator.integers(0, len(place), len(place)), minlength=len(place))
        weight_N = times_C[cluster_N].astype(np.float64)
        # A draw without one of the two classes has no AUROC.
        if weight_N[y_N == 1].any() and weight_N[y_N == 0].any():
            drawn.append(weighted_auroc(p_N, y_N, weight_N))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def weighted_auroc(
    p_N: NDArray[np.float64], y_N: NDArray[np.int64], weight_N: NDArray[np.float64]
) -> float:
    """P(p_i > p_j) + P(p_i = p_j) / 2 for i drawn from y = 1 and j from y = 0 by weight."""
    values_U, place_N = np.unique(p_N, return_inverse=True)
    positive_U = np.bincount(place_N, weights=weight_N * y_N, minlength=len(values_U))
    negative_U = np.bincount(place_N, weights=weight_N * (1 - y_N), minlength=len(values_U))
    below_U = np.cumsum(negative_U) - negative_U
    pairs = positive_U.sum() * negative_U.sum()
    return float(positive_U @ (below_U + negative_U / 2) / pairs)


def _rounded(value: float | np.floating) -> float:
    return round(float(value), 4)
