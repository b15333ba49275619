"""What a cosine means in an embedder's own scale: unrelated texts, and the alarm."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from evaluators.diversity.classes import cosine_classes
from evaluators.diversity.similarity import non_zero, unrelated_similarity

# How far the alarm and the class threshold of all-MiniLM-L6-v2 lie between unrelated texts (0.078)
# and equal ones (1). Carried over to embedders that were not calibrated. Derived.
_ALARM_POSITION = (0.80 - 0.078) / (1 - 0.078)
_CLASS_POSITION = (0.70 - 0.078) / (1 - 0.078)
_THRESHOLDS = tuple(i / 20 for i in range(1, 20))


class EmbedderScale(BaseModel):
    """The scale of one embedder's cosines. 0.8 of one embedder is not 0.8 of another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    embedder_id: str
    unrelated: float | None = Field(
        description="Mean cosine of responses to different queries; None: not known."
    )
    unrelated_low: float | None = Field(default=None, description="5th percentile of them.")
    unrelated_high: float | None = Field(default=None, description="95th percentile of them.")
    alarm: float = Field(description="Mean similarity above which a query counts as repetitive.")
    class_threshold: float = Field(description="Cosine from which two responses say the same.")
    calibrated: bool = Field(
        description="False: alarm and threshold are carried over from another embedder by its "
        "unrelated cosine; rankings hold, counts are rough."
    )
    origin: str = Field(description="Where the numbers come from.")


KNOWN_SCALES: Mapping[str, EmbedderScale] = {
    scale.embedder_id: scale
    for scale in (
        EmbedderScale(
            embedder_id="all-MiniLM-L6-v2/mean/192",
            unrelated=0.078,
            unrelated_low=-0.063,
            unrelated_high=0.281,
            alarm=0.80,
            class_threshold=0.70,
            calibrated=True,
            origin="NoveltyBench's released Gemini 1.5 Pro pool, 100 prompts x 10 answers: mean "
            "similarity 0.837, AUROC 0.868 for same class, 1.85 classes against 1.83 released",
        ),
        EmbedderScale(
            embedder_id="text-embedding-3-small",
            unrelated=0.15,
            unrelated_low=0.1,
            unrelated_high=0.2,
            alarm=0.80,
            class_threshold=0.15 + _CLASS_POSITION * 0.85,
            calibrated=False,
            origin="Artificial Hivemind, arXiv 2510.22954: alarm, and all random pairs within "
            "0.1..0.2 (the middle is taken); class threshold carried over",
        ),
    )
}


class CalibratedScale(BaseModel):
    """A scale measured on labelled pools, and how well it fits them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: EmbedderScale
    auroc: float | None = Field(description="Of the cosine for 'same class'; None: one kind only.")
    labelled_classes: float = Field(description="Mean number of classes a query, labelled.")
    found_classes: float = Field(description="The same with the threshold.")


def scale_of(embedder_id: str, unrelated: float | None) -> EmbedderScale:
    """The known scale of an embedder, else one carried over by its unrelated cosine r:
    alarm = r + 0.783 (1 - r), threshold = r + 0.675 (1 - r); r = 0 where it is not known."""
    known = KNOWN_SCALES.get(embedder_id)
    if known is not None:
        return known
    r = 0.0 if unrelated is None else unrelated
    return EmbedderScale(
        embedder_id=embedder_id,
        unrelated=unrelated,
        alarm=r + _ALARM_POSITION * (1 - r),
        class_threshold=r + _CLASS_POSITION * (1 - r),
        calibrated=False,
        origin="carried over from all-MiniLM-L6-v2 by the unrelated cosine of this evaluation",
    )


def calibrate_scale(
    embedder_id: str,
    e_Q_n_D: Sequence[NDArray[np.floating]],
    classes: Sequence[Sequence[int]],
    *,
    seed: int = 0,
) -> CalibratedScale:
    """Measure an embedder's scale on pools with labelled classes, one pool a query.

    class_threshold: the multiple of 0.05 whose `cosine_classes` come closest to the labelled
    number on average. alarm: carried over from the unrelated cosine (`scale_of`), since no label
    says when a query is repetitive. Percentiles of the unrelated cosine are of 20,000 drawn pairs.
    Raises ValueError for pools of unequal sizes, zero vectors or fewer than two queries.
    """
    unrelated = unrelated_similarity(e_Q_n_D)
    if unrelated is None:
        raise ValueError("an embedder's scale needs at least two queries with texts")
    for e_n_D, partition in zip(e_Q_n_D, classes, strict=True):
        if not len(e_n_D) == len(partition) == len(non_zero(e_n_D)):
            raise ValueError("every text needs a class and an embedding that is not zero")
    labelled = float(np.mean([len(set(partition)) for partition in classes]))
    counts = {
        threshold: float(np.mean([len(set(cosine_classes(e, threshold))) for e in e_Q_n_D]))
        for threshold in _THRESHOLDS
    }
    best = min(counts, key=lambda threshold: (abs(counts[threshold] - labelled), threshold))
    low, high = _unrelated_range(e_Q_n_D, seed)
    return CalibratedScale(
        scale=EmbedderScale(
            embedder_id=embedder_id,
            unrelated=unrelated,
            unrelated_low=low,
            unrelated_high=high,
            alarm=unrelated + _ALARM_POSITION * (1 - unrelated),
            class_threshold=best,
            calibrated=True,
            origin=f"{len(classes)} queries with labelled classes",
        ),
        auroc=_same_class_auroc(e_Q_n_D, classes),
        labelled_classes=labelled,
        found_classes=counts[best],
    )


def _unrelated_range(
    e_Q_n_D: Sequence[NDArray[np.floating]], seed: int, pairs: int = 20_000
) -> tuple[float, float]:
    e_N_D = np.concatenate([np.asarray(pool, dtype=np.float64) for pool in e_Q_n_D])
    query_N = np.repeat(np.arange(len(e_Q_n_D)), [len(pool) for pool in e_Q_n_D])
    i, j = np.random.default_rng(seed).integers(0, len(e_N_D), size=(2, pairs))
    apart = query_N[i] != query_N[j]
    cosines = np.einsum("nd,nd->n", e_N_D[i[apart]], e_N_D[j[apart]])
    low, high = np.quantile(cosines, [0.05, 0.95])
    return float(low), float(high)


def _same_class_auroc(
    e_Q_n_D: Sequence[NDArray[np.floating]], classes: Sequence[Sequence[int]]
) -> float | None:
    """P(cosine of a pair of one class > cosine of a pair of two), a tie counting half."""
    cosines, same = [], []
    for e_n_D, partition in zip(e_Q_n_D, classes, strict=True):
        i, j = np.triu_indices(len(partition), 1)
        cosines.append((np.asarray(e_n_D) @ np.asarray(e_n_D).T)[i, j])
        same.append(np.asarray(partition)[i] == np.asarray(partition)[j])
    cosine_P, same_P = np.concatenate(cosines), np.concatenate(same)
    positives, negatives = cosine_P[same_P], np.sort(cosine_P[~same_P])
    if not len(positives) or not len(negatives):
        return None
    below = np.searchsorted(negatives, positives, side="left")
    up_to = np.searchsorted(negatives, positives, side="right")
    return float((below + up_to).sum() / (2 * len(positives) * len(negatives)))
