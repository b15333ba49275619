"""Whether a model answers a paraphrase as it answers the original question."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from evaluators.diversity.aggregate import mean_over_queries
from evaluators.diversity.paired import difference_metric, paired_difference
from evaluators.diversity.similarity import cross_similarity, intra_similarity
from evaluators.metric import Metric


class ParaphraseConsistency(BaseModel):
    """Similarity inside one wording and between wordings, over queries."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    within: Metric = Field(description="Mean similarity of answers to one wording.")
    across: Metric = Field(description="Mean similarity of answers to the original and to others.")
    gap: Metric = Field(description="across - within, paired by query; 0: wording does not matter.")


def paraphrase_consistency(
    pools: Mapping[str, Sequence[NDArray[np.floating]]], *, seed: int = 0
) -> ParaphraseConsistency:
    """Compare {query id: [embeddings of answers to the original, to paraphrase 1, ...]}.

    within(q) = mean over wordings w of S_w(q), across(q) = mean over paraphrases w of
    mu_0(q) . mu_w(q). Wordings without an answer are left out. Artificial Hivemind, arXiv
    2510.22954, appendix C.4 (20 answers, 4 paraphrases: 0.821 within, 0.781 across).
    """
    within = [_mean([intra_similarity(pool) for pool in wordings]) for wordings in pools.values()]
    across = [
        _mean([cross_similarity(wordings[0], pool) for pool in wordings[1:]]) if wordings else None
        for wordings in pools.values()
    ]
    return ParaphraseConsistency(
        within=mean_over_queries(within, seed),
        across=mean_over_queries(across, seed),
        gap=difference_metric(
            paired_difference(across, within, seed), "no query with a paraphrase"
        ),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None
