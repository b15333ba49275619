"""Similarity of one model's responses to one query, and its change against the base model."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from evaluators.embedding import Embedder
from evaluators.metric import Metric, undefined
from evaluators.statistics import mean_metric

# Eigenvalues below this are rounding of exact zeros and would break q < 1 and the logarithm.
_EIGENVALUE_FLOOR = 1e-12


class QueryDiversity(BaseModel):
    """One query's responses in numbers; None where fewer than two responses have text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query_id: str
    n: int = Field(ge=0, description="Responses with text; the others are left out.")
    empty: int = Field(ge=0, description="Responses without text.")
    similarity: float | None = Field(description="S_m(q), mean cosine over pairs.")
    vendi: float | None = Field(description="Vendi score of order 1, effective number of answers.")
    distinct_1: float | None = Field(description="Unique words over all words.")
    distinct_2: float | None = Field(description="Unique word pairs over all word pairs.")


class DiversityResult(BaseModel):
    """Per-query rows and the metrics over queries."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    embedder_id: str
    queries: tuple[QueryDiversity, ...]
    metrics: Mapping[str, Metric]


def intra_similarity(e_n_D: NDArray[np.floating]) -> float | None:
    """Mean cosine over pairs of distinct responses, self-pairs excluded.

    S = 2/(n(n-1)) sum_{i<j} e_i . e_j = (||sum_i e_i||^2 - sum_i ||e_i||^2) / (n(n-1))

    for embeddings e_1..e_n of unit norm; the right side is O(n D). Zero vectors (empty texts) are
    excluded first. None when fewer than two remain. Formula: Artificial Hivemind, arXiv
    2510.22954; the identity is derived.
    """
    e_n_D = _non_zero(e_n_D)
    n = len(e_n_D)
    if n < 2:
        return None
    total_D = e_n_D.sum(0)
    squares = float((e_n_D * e_n_D).sum())
    return (float(total_D @ total_D) - squares) / (n * (n - 1))


def cross_similarity(e_n_D: NDArray[np.floating], f_m_D: NDArray[np.floating]) -> float | None:
    """Mean cosine between two pools: 1/(nm) sum_{i,j} e_i . f_j = mean(e) . mean(f).

    Zero vectors are excluded; None when a pool is then empty. Means are not re-normalised.
    """
    e_n_D, f_m_D = _non_zero(e_n_D), _non_zero(f_m_D)
    if len(e_n_D) == 0 or len(f_m_D) == 0:
        return None
    return float(e_n_D.mean(0) @ f_m_D.mean(0))


def vendi_score(e_n_D: NDArray[np.floating], q: float = 1.0) -> float | None:
    """Effective number of distinct responses, between 1 and n.

    lambda = eigenvalues of K/n with K_ij = e_i . e_j;
    VS_1 = exp(-sum lambda ln lambda), VS_q = (sum lambda^q)^(1/(1-q)), VS_inf = 1/max lambda.

    Uses the smaller of the n x n and D x D Gram matrices, which share their non-zero eigenvalues.
    Zero vectors are excluded; None when fewer than two remain. Raises ValueError for q <= 0.
    Vendi score of Friedman and Dieng, arXiv 2210.02410; order q after Pasarkar and Dieng.
    """
    if not q > 0:
        raise ValueError(f"the order q must be positive, got {q}")
    e_n_D = _non_zero(e_n_D)
    n, width = e_n_D.shape
    if n < 2:
        return None
    gram = e_n_D @ e_n_D.T if n <= width else e_n_D.T @ e_n_D
    eigenvalues = np.linalg.eigvalsh(gram / n)
    positive = eigenvalues[eigenvalues > _EIGENVALUE_FLOOR]
    if math.isinf(q):
        return float(1.0 / positive.max())
    if q == 1.0:
        return float(np.exp(-(positive * np.log(positive)).sum()))
    return float((positive**q).sum() ** (1.0 / (1.0 - q)))


def distinct_k(texts: Sequence[str], k: int) -> float | None:
    """Unique word k-grams over all word k-grams of the pool; None when there is none.

    Words are lower-cased and split at white space; a k-gram never spans two texts. Falls with the
    pool's length: compare pools of equal token budget only.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    grams = [
        tuple(words[i : i + k])
        for words in (text.lower().split() for text in texts)
        for i in range(len(words) - k + 1)
    ]
    return len(set(grams)) / len(grams) if grams else None


def diversity_metrics(
    responses: Mapping[str, Sequence[str]],
    embedder: Embedder,
    base_responses: Mapping[str, Sequence[str]] | None = None,
    *,
    seed: int = 0,
) -> DiversityResult:
    """Measure {query id: responses} of a model, paired by query with its base model.

    diversity.intra_similarity  mean over queries of S_m(q)
    diversity.vendi             mean over queries of the order-1 Vendi score
    diversity.change_vs_base    D = mean over shared queries of S_tuned(q) - S_base(q)

    n counts queries where the number is defined; intervals are percentile bootstraps over
    queries, because responses to one query are not independent. Similarity has the embedder's
    own scale, and small or broken models look diverse: read the paired change.
    """
    rows = _measure(responses, embedder)
    metrics = {
        "diversity.intra_similarity": _mean([row.similarity for row in rows], seed),
        "diversity.vendi": _mean([row.vendi for row in rows], seed),
        "diversity.change_vs_base": undefined(0, "the base model was not measured"),
    }
    if base_responses is not None:
        base = {row.query_id: row.similarity for row in _measure(base_responses, embedder)}
        metrics["diversity.change_vs_base"] = _mean(
            [
                row.similarity - before
                for row in rows
                if row.similarity is not None and (before := base.get(row.query_id)) is not None
            ],
            seed,
        )
    return DiversityResult(embedder_id=embedder.id, queries=tuple(rows), metrics=metrics)


def _measure(responses: Mapping[str, Sequence[str]], embedder: Embedder) -> list[QueryDiversity]:
    flat = [text for texts in responses.values() for text in texts]
    # One call for all queries lets the embedder batch by length and run equal texts once.
    e_N_D = embedder.embed(flat).astype(np.float64)
    rows = []
    start = 0
    for query_id, texts in responses.items():
        e_n_D = e_N_D[start : start + len(texts)]
        start += len(texts)
        present = sum(bool(text.strip()) for text in texts)
        rows.append(
            QueryDiversity(
                query_id=query_id,
                n=present,
                empty=len(texts) - present,
                similarity=intra_similarity(e_n_D),
                vendi=vendi_score(e_n_D),
                distinct_1=distinct_k(texts, 1) if present >= 2 else None,
                distinct_2=distinct_k(texts, 2) if present >= 2 else None,
            )
        )
    return rows


def _mean(values: Sequence[float | None], seed: int) -> Metric:
    return mean_metric(
        [value for value in values if value is not None],
        seed,
        None if any(value is not None for value in values) else "no query with two responses",
    )


def _non_zero(e_n_D: NDArray[np.floating]) -> NDArray[np.float64]:
    e_n_D = np.asarray(e_n_D, dtype=np.float64)
    return np.asarray(e_n_D[(e_n_D != 0).any(axis=1)])
