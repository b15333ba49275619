"""The calibration report: how a scorer's agreement with people depends on the items."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from evaluators.calibration.chance import ChanceSubsets, chance_subsets, restricted_pearson
from evaluators.calibration.correlation import (
    CORRELATION_ROUNDS,
    Correlations,
    Estimate,
    correlations,
    fisher_interval,
)
from evaluators.calibration.disagreement import (
    entropy,
    fleiss_kappa,
    fleiss_single,
    gini,
    grouped,
    mean_preference,
    mean_rating,
    minority,
    p_disagree,
    pairwise_disagreement,
)
from evaluators.calibration.subsets import Family, Kind, Subset, paper_subsets
from evaluators.calibration.table import CalibrationTable

FEW_ITEMS = 50
# Below this share of the full variance a subset's range counts as restricted. Derived.
RESTRICTED = 0.9


class ItemCalibration(BaseModel):
    """One item: what people said, how much they disagree, and the scorer's number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    line: int = Field(description="Line of the input, from 1.")
    query: str
    raters: int
    human_score: float = Field(description="Mean rating, or mean vote (larger favours response 1).")
    score: float = Field(description="The scorer's.")
    entropy: float = Field(description="Bits.")
    grouped_entropy: float | None = Field(description="Of {1, similar, 2}; pairwise items only.")
    gini: float
    pairwise_disagreement: float
    minority: float
    fleiss: float | None = Field(description="Agreement of this item beyond chance.")
    p_disagree: float | None = Field(description="Pairwise items only.")


class SubsetCalibration(BaseModel):
    """A scorer's agreement with people on some of the items."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Family
    name: str
    parameter: float | None = Field(description="Tukey's k, or the share that is kept.")
    n: int
    human_variance: float = Field(description="Of the human scores.")
    variance_ratio: float | None = Field(description="Over that of all items.")
    pearson: Estimate
    spearman: Estimate
    kendall: Estimate
    restricted_pearson: float | None = Field(
        description="Pearson of all items, restricted to this variance (Thorndike)."
    )
    chance: ChanceSubsets | None = Field(
        description="Random subsets of equal variance; None: not restricted, or out of reach."
    )
    warnings: tuple[str, ...] = ()


class CalibrationReport(BaseModel):
    """Everything, in the order of the paper's tables."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    kind: Kind
    items: int
    queries: int
    raters: tuple[int, int] = Field(description="Fewest and most raters of an item.")
    disagreement: Mapping[str, float | None] = Field(description="Means over items.")
    fleiss_kappa: float | None = Field(description="Of all items together.")
    subsets: tuple[SubsetCalibration, ...]
    rounds: int
    seed: int


def human_scores(table: CalibrationTable) -> NDArray[np.float64]:
    """Mean rating of each item, or mean coded vote."""
    means = mean_rating if table.kind == "absolute" else mean_preference
    return means(table.counts_N_L)


def calibrate(
    table: CalibrationTable, *, seed: int = 0, rounds: int = CORRELATION_ROUNDS
) -> CalibrationReport:
    """Correlate the scorer with the mean human score on all items and on the paper's subsets.

    A weaker correlation on a subset is no fault of the scorer by itself: intervals show what N
    items can tell, and `chance` what the smaller range of human scores costs any scorer.
    Artificial Hivemind, arXiv 2510.22954, section 5; it states Pearson, its tables are Spearman, so
    both are here.
    """
    human_N = human_scores(table)
    known: dict[bytes, Correlations] = {}

    def agreement(subset: Subset) -> Correlations:
        # Loose fences keep everything, and several selectors choose the same run.
        key = subset.places.tobytes()
        if key not in known:
            known[key] = correlations(
                human_N[subset.places],
                table.score_N[subset.places],
                [table.queries[place] for place in subset.places],
                seed=seed,
                rounds=rounds,
            )
        return known[key]

    subsets = paper_subsets(table.kind, table.counts_N_L, human_N, table.queries)
    full = agreement(subsets[0])
    raters_N = table.counts_N_L.sum(1)
    return CalibrationReport(
        kind=table.kind,
        items=len(human_N),
        queries=len(set(table.queries)),
        raters=(int(raters_N.min()), int(raters_N.max())),
        disagreement=_means(table),
        fleiss_kappa=fleiss_kappa(table.counts_N_L),
        subsets=tuple(
            _subset(table, human_N, subset, agreement(subset), full, seed) for subset in subsets
        ),
        rounds=rounds,
        seed=seed,
    )


def item_rows(table: CalibrationTable) -> list[ItemCalibration]:
    """Every item with its measures of disagreement, in the order of the input."""
    counts_N_L = table.counts_N_L
    fleiss_N = fleiss_single(counts_N_L)
    human_N, entropy_N = human_scores(table), entropy(counts_N_L)
    gini_N, minority_N = gini(counts_N_L), minority(counts_N_L)
    differ_N = pairwise_disagreement(counts_N_L)
    pairwise = table.kind == "pairwise"
    grouped_N = entropy(grouped(counts_N_L)) if pairwise else None
    disagree_N = p_disagree(counts_N_L) if pairwise else None
    return [
        ItemCalibration(
            line=table.lines[i],
            query=table.queries[i],
            raters=int(counts_N_L[i].sum()),
            human_score=float(human_N[i]),
            score=float(table.score_N[i]),
            entropy=float(entropy_N[i]),
            grouped_entropy=None if grouped_N is None else float(grouped_N[i]),
            gini=float(gini_N[i]),
            pairwise_disagreement=float(differ_N[i]),
            minority=float(minority_N[i]),
            fleiss=float(fleiss_N[i]) if np.isfinite(fleiss_N[i]) else None,
            p_disagree=None if disagree_N is None else float(disagree_N[i]),
        )
        for i in range(len(table.queries))
    ]


def _means(table: CalibrationTable) -> dict[str, float | None]:
    counts_N_L = table.counts_N_L
    pairwise = table.kind == "pairwise"
    return {
        "entropy": float(entropy(counts_N_L).mean()),
        "grouped_entropy": float(entropy(grouped(counts_N_L)).mean()) if pairwise else None,
        "gini": float(gini(counts_N_L).mean()),
        "pairwise_disagreement": float(pairwise_disagreement(counts_N_L).mean()),
        "minority": float(minority(counts_N_L).mean()),
        "p_disagree": float(p_disagree(counts_N_L).mean()) if pairwise else None,
    }


def _subset(
    table: CalibrationTable,
    human_N: NDArray[np.float64],
    subset: Subset,
    found: Correlations,
    full: Correlations,
    seed: int,
) -> SubsetCalibration:
    chosen_N = human_N[subset.places]
    variance, all_variance = float(chosen_N.var()), float(human_N.var())
    ratio = variance / all_variance if all_variance > 0 else None
    restricted = subset.family != "full" and ratio is not None and ratio < RESTRICTED
    chance = (
        chance_subsets(
            human_N, table.score_N, variance, float(chosen_N.mean()), len(chosen_N), seed=seed
        )
        if restricted
        else None
    )
    return SubsetCalibration(
        family=subset.family,
        name=subset.name,
        parameter=subset.parameter,
        n=len(chosen_N),
        human_variance=variance,
        variance_ratio=ratio,
        pearson=found.pearson,
        spearman=found.spearman,
        kendall=found.kendall,
        restricted_pearson=(
            restricted_pearson(full.pearson.value, ratio**0.5)
            if restricted and ratio is not None and full.pearson.value is not None
            else None
        ),
        chance=chance,
        warnings=_warnings(len(chosen_N), found, ratio, chance, restricted),
    )


def _warnings(
    n: int,
    found: Correlations,
    ratio: float | None,
    chance: ChanceSubsets | None,
    restricted: bool,
) -> tuple[str, ...]:
    warnings = []
    if found.pearson.value is None:
        warnings.append("all human scores or all model scores are equal: no correlation is defined")
    if n <= 3:
        warnings.append(f"{n} items tell nothing about a correlation")
    elif n < FEW_ITEMS:
        half = fisher_interval(0.0, n)[1]
        warnings.append(
            f"{n} items: even without any relation a correlation within -{half:.2f}..{half:.2f} is "
            "to be expected"
        )
    if restricted and ratio is not None:
        text = f"the human scores vary {ratio:.0%} as much as those of all items"
        if chance is None:
            warnings.append(f"{text}, which alone lowers a correlation")
        else:
            warnings.append(
                f"{text}; random subsets of equal variance have Spearman {chance.spearman:.2f} "
                f"({chance.spearman_low:.2f}..{chance.spearman_high:.2f})"
            )
    return tuple(warnings)
