"""One model's answers to open questions, and their change against the base model."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from evaluators.diversity.aggregate import classes_metric, mean_over_queries, scale_note
from evaluators.diversity.coherence import CoherenceHint, coherence_hint
from evaluators.diversity.lexical import words
from evaluators.diversity.paired import PairedDifference, difference_metric, paired_difference
from evaluators.diversity.query import QueryDiversity, query_diversity
from evaluators.diversity.scale import EmbedderScale, scale_of
from evaluators.diversity.similarity import histogram, non_zero, unrelated_similarity
from evaluators.diversity.vendi import vendi_score
from evaluators.embedding import Embedder
from evaluators.metric import Metric, undefined
from evaluators.statistics import proportion_metric

NO_BASE = "the base model was not measured"
NO_SHARED = "no query with two responses of both models"
DIFFERENCES = (
    "similarity", "vendi", "distinct_classes", "semantic_entropy", "self_bleu",
    "adjusted_distinct_1", "compression",
)  # fmt: skip

Flags = Mapping[str, Sequence[bool]]


class DiversityResult(BaseModel):
    """Per-query rows, and the metrics over queries."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    embedder_id: str
    scale: EmbedderScale = Field(description="What a cosine of this embedder means.")
    unrelated: float | None = Field(
        description="Mean cosine of this model's answers to different queries: the baseline."
    )
    queries: tuple[QueryDiversity, ...]
    base_queries: tuple[QueryDiversity, ...] = ()
    metrics: Mapping[str, Metric] = Field(description="Over all answers with text.")
    answered_metrics: Mapping[str, Metric] = Field(
        description="The same without refusals; empty where refusals were not judged."
    )
    histogram: tuple[float, ...] = Field(
        description="Percent of queries with similarity in [0,.1), ..., [.9,1]."
    )
    shares: Mapping[str, Metric] = Field(
        description="Share of queries with similarity above 0.8, above 0.9 and above the alarm."
    )
    differences: Mapping[str, PairedDifference] = Field(
        description="Tuned minus base by query, by field of QueryDiversity."
    )
    coherence: CoherenceHint


class _Pool(NamedTuple):
    texts: list[str]
    e_n_D: NDArray[np.float64]
    refused: list[bool] | None
    truncated: list[bool] | None

    def answered(self) -> "_Pool":
        """Without refusals."""
        refused = self.refused or [False] * len(self.texts)
        kept = [i for i, flag in enumerate(refused) if not flag]
        return _Pool(
            [self.texts[i] for i in kept],
            self.e_n_D[kept],
            [False] * len(kept),
            None if self.truncated is None else [self.truncated[i] for i in kept],
        )


_Pools = dict[str, _Pool]


def diversity_metrics(
    responses: Mapping[str, Sequence[str]],
    embedder: Embedder,
    base_responses: Mapping[str, Sequence[str]] | None = None,
    *,
    seed: int = 0,
    refused: Flags | None = None,
    base_refused: Flags | None = None,
    truncated: Flags | None = None,
    base_truncated: Flags | None = None,
) -> DiversityResult:
    """Measure {query id: responses} of a model, paired by query with its base model.

    diversity.intra_similarity  mean over queries of S_m(q)
    diversity.change_vs_base    D = mean over shared queries of S_tuned(q) - S_base(q)
    diversity.vendi             mean over queries of the order-1 Vendi score
    diversity.vendi_ratio       mean over shared queries of its ratio tuned/base, over equally many
                                answers of both
    diversity.distinct_classes  mean number of answers that say something different
    diversity.self_bleu         mean overlap of each answer with the others, 0..1

    n counts queries where the number is defined; intervals are percentile bootstraps over
    queries, because responses to one query are not independent. Similarity has the embedder's
    own scale, longer answers are more similar, and small or broken models look diverse: read the
    paired change, and a coherence metric beside it. Refusals resemble each other, so a model that
    newly refuses looks repetitive: where `refused` flags each response, `answered_metrics` are
    the same numbers without them. Raises ValueError for flags that do not fit the responses.
    """
    tuned, base = _embedded(
        embedder,
        (responses, refused, truncated),
        None if base_responses is None else (base_responses, base_refused, base_truncated),
    )
    unrelated = unrelated_similarity([pool.e_n_D for pool in tuned.values()])
    scale = scale_of(embedder.id, unrelated)
    rows, base_rows = _rows(tuned, base, scale)
    similarities = [row.similarity for row in rows if row.similarity is not None]
    return DiversityResult(
        embedder_id=embedder.id,
        scale=scale,
        unrelated=unrelated,
        queries=tuple(rows),
        base_queries=tuple(base_rows),
        metrics=_metrics(tuned, base, rows, base_rows, scale, seed),
        answered_metrics={} if refused is None else _answered(tuned, base, scale, seed),
        histogram=histogram(similarities),
        shares={
            name: proportion_metric(sum(s > limit for s in similarities), len(similarities))
            for name, limit in (("0.8", 0.8), ("0.9", 0.9), ("alarm", scale.alarm))
        },
        differences=_differences(rows, base_rows, seed),
        coherence=coherence_hint(
            [text for pool in tuned.values() for text in pool.texts],
            [text for pool in (base or {}).values() for text in pool.texts],
        ),
    )


def _embedded(
    embedder: Embedder,
    tuned: tuple[Mapping[str, Sequence[str]], Flags | None, Flags | None],
    base: tuple[Mapping[str, Sequence[str]], Flags | None, Flags | None] | None,
) -> tuple[_Pools, _Pools | None]:
    groups = [tuned] if base is None else [tuned, base]
    flat = [text for responses, _, _ in groups for texts in responses.values() for text in texts]
    # One call for everything lets the embedder batch by length and run equal texts once.
    e_N_D = embedder.embed(flat).astype(np.float64)
    made: list[_Pools] = []
    start = 0
    for responses, refused, truncated in groups:
        pools: _Pools = {}
        for query_id, texts in responses.items():
            pools[query_id] = _Pool(
                list(texts),
                e_N_D[start : start + len(texts)],
                _flags("refused", refused, query_id, len(texts)),
                _flags("truncated", truncated, query_id, len(texts)),
            )
            start += len(texts)
        made.append(pools)
    return made[0], made[1] if len(made) == 2 else None


def _flags(name: str, flags: Flags | None, query_id: str, n: int) -> list[bool] | None:
    if flags is None:
        return None
    found = list(flags.get(query_id, ()))
    if len(found) != n:
        raise ValueError(f"{len(found)} flags in {name} for {n} responses to query {query_id!r}")
    return found


def _rows(
    tuned: _Pools, base: _Pools | None, scale: EmbedderScale
) -> tuple[list[QueryDiversity], list[QueryDiversity]]:
    groups = [tuned, base or {}]
    known = {
        word
        for pools in groups
        for pool in pools.values()
        for text in pool.texts
        for word in words(text)
    }
    rows = [
        [
            query_diversity(
                query_id,
                pool.texts,
                pool.e_n_D,
                class_threshold=scale.class_threshold,
                vocabulary=len(known),
                refused=pool.refused,
                truncated=pool.truncated,
            )
            for query_id, pool in pools.items()
        ]
        for pools in groups
    ]
    return rows[0], rows[1]


def _answered(
    tuned: _Pools, base: _Pools | None, scale: EmbedderScale, seed: int
) -> dict[str, Metric]:
    tuned = {query_id: pool.answered() for query_id, pool in tuned.items()}
    if base is not None:
        base = {query_id: pool.answered() for query_id, pool in base.items()}
    rows, base_rows = _rows(tuned, base, scale)
    return _metrics(tuned, base, rows, base_rows, scale, seed)


def _metrics(
    tuned: _Pools,
    base: _Pools | None,
    rows: Sequence[QueryDiversity],
    base_rows: Sequence[QueryDiversity],
    scale: EmbedderScale,
    seed: int,
) -> dict[str, Metric]:
    why_not = NO_BASE if base is None else NO_SHARED
    before = {row.query_id: row.similarity for row in base_rows}
    change = paired_difference(
        [row.similarity for row in rows], [before.get(row.query_id) for row in rows], seed
    )
    ratios = [] if base is None else _vendi_ratios(tuned, base)
    return {
        "diversity.intra_similarity": mean_over_queries(
            [row.similarity for row in rows], seed, scale_note(scale)
        ),
        "diversity.change_vs_base": difference_metric(change, why_not),
        "diversity.vendi": mean_over_queries([row.vendi for row in rows], seed),
        "diversity.vendi_ratio": mean_over_queries(ratios, seed)
        if ratios
        else undefined(0, why_not),
        "diversity.distinct_classes": classes_metric(rows, seed),
        "diversity.self_bleu": mean_over_queries(
            [row.self_bleu for row in rows], seed, support=(0.0, 1.0)
        ),
    }


def _vendi_ratios(tuned: _Pools, base: _Pools) -> list[float]:
    """VS_tuned(q)/VS_base(q). More answers have a higher score, so both give equally many."""
    ratios = []
    for query_id, pool in tuned.items():
        if query_id not in base:
            continue
        e_n_D, f_n_D = non_zero(pool.e_n_D), non_zero(base[query_id].e_n_D)
        n = min(len(e_n_D), len(f_n_D))
        after, before = vendi_score(e_n_D[:n]), vendi_score(f_n_D[:n])
        if after is not None and before is not None:
            ratios.append(after / before)
    return ratios


def _differences(
    rows: Sequence[QueryDiversity], base_rows: Sequence[QueryDiversity], seed: int
) -> dict[str, PairedDifference]:
    base = {row.query_id: row for row in base_rows}
    shared = [(row, base[row.query_id]) for row in rows if row.query_id in base]
    found = {
        name: paired_difference(
            [getattr(row, name) for row, _ in shared],
            [getattr(before, name) for _, before in shared],
            seed,
        )
        for name in DIFFERENCES
    }
    return {name: difference for name, difference in found.items() if difference is not None}
