"""How alike several models answer the same open questions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from evaluators.diversity.mixing import NEIGHBOURS, top_n_mixing
from evaluators.diversity.similarity import intra_similarity, non_zero

HOMOGENEITY_ROUNDS = 2000
_PAIR_BLOCK = 1024


class QueryAnswers(NamedTuple):
    """One model's answers to one query, with their embeddings in the same order."""

    texts: Sequence[str]
    e_n_D: NDArray[np.floating]


ModelAnswers = Mapping[str, QueryAnswers]


class SimilarPair(BaseModel):
    """Two answers of two models that say nearly the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query_id: str
    similarity: float
    model: str
    text: str
    other_model: str
    other_text: str


class Homogeneity(BaseModel):
    """Similarity between and inside models; rows and columns in the order of `models`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[str, ...]
    queries: int = Field(description="Queries that at least one model answered.")
    matrix: tuple[tuple[float | None, ...], ...] = Field(
        description="Mean cosine of two models' answers over shared queries; on the diagonal of "
        "one model's pairs, self-pairs excluded. None: no shared query."
    )
    low: tuple[tuple[float | None, ...], ...] = Field(
        description="2.5th percentile of the bootstrap over queries."
    )
    high: tuple[tuple[float | None, ...], ...] = Field(description="97.5th percentile of it.")
    mixing: Mapping[int, float | None] = Field(
        description="N: models among the N nearest answers of an answer; 1 is no sharing."
    )
    similar_pairs: tuple[SimilarPair, ...] = Field(
        description="The closest answers of two models, at most one pair a query."
    )


def homogeneity(
    answers: Mapping[str, ModelAnswers],
    *,
    seed: int = 0,
    rounds: int = HOMOGENEITY_ROUNDS,
    neighbours: Sequence[int] = NEIGHBOURS,
    pairs: int = 10,
) -> Homogeneity:
    """Compare {model: {query id: answers}}.

    S_ab(q) = mean_{i,j} e^a_i . e^b_j = mu_a(q) . mu_b(q), mu the mean embedding (not
    re-normalised), so the matrix of a query is one product of an M x D matrix with its transpose;
    S_ab = mean over q. Diagonal: mean_q S_a(q), self-pairs excluded, hence not mu . mu. Intervals
    are percentile bootstraps over queries, the same draws for all cells; None with fewer than two
    queries. Empty texts are left out.
    Artificial Hivemind, arXiv 2510.22954, section 4; the identity is derived.
    """
    models = tuple(answers)
    # dict.fromkeys keeps the order of first appearance, so the result does not depend on hashing.
    queries = list(dict.fromkeys(query for model in models for query in answers[model]))
    cell_Q_M_M = np.full((len(queries), len(models), len(models)), np.nan)
    shares: dict[int, list[float]] = {n: [] for n in neighbours}
    closest: list[SimilarPair] = []
    for place, query in enumerate(queries):
        pools = [_present(answers[model].get(query)) for model in models]
        cell_Q_M_M[place] = _similarities([pool.e_n_D for pool in pools])
        stacked = [pool.e_n_D for pool in pools if len(pool.e_n_D)]
        if not stacked:
            continue
        e_P_D = np.concatenate(stacked)
        model_P = np.repeat(np.arange(len(models)), [len(pool.e_n_D) for pool in pools])
        for n, share in top_n_mixing(e_P_D, model_P, neighbours).items():
            if share is not None:
                shares[n].append(share)
        found = _closest_pair(e_P_D, model_P)
        if found is not None:
            texts = [text for pool in pools for text in pool.texts]
            cosine, i, j = found
            closest.append(
                SimilarPair(
                    query_id=query,
                    similarity=cosine,
                    model=models[model_P[i]],
                    text=texts[i],
                    other_model=models[model_P[j]],
                    other_text=texts[j],
                )
            )
    low_M_M, high_M_M = _intervals(cell_Q_M_M, seed, rounds)
    return Homogeneity(
        models=models,
        queries=len(queries),
        matrix=_rows(_mean(cell_Q_M_M)),
        low=_rows(low_M_M),
        high=_rows(high_M_M),
        mixing={n: float(np.mean(found)) if found else None for n, found in shares.items()},
        # A stable sort keeps the order of queries among equal cosines.
        similar_pairs=tuple(sorted(closest, key=lambda pair: -pair.similarity)[:pairs]),
    )


def principal_plane(e_P_D: NDArray[np.floating]) -> NDArray[np.float64]:
    """Coordinates [P, 2] of the responses to one query in their first two principal components,
    for a picture. Each axis points so that its largest coordinate by size is positive."""
    centred_P_D = np.asarray(e_P_D, dtype=np.float64) - np.mean(e_P_D, axis=0)
    u_P_K, size_K, _ = np.linalg.svd(centred_P_D, full_matrices=False)
    plane_P_2 = np.zeros((len(centred_P_D), 2))
    found = u_P_K[:, :2] * size_K[:2]
    for axis in range(found.shape[1]):
        peak = found[np.argmax(np.abs(found[:, axis])), axis]
        plane_P_2[:, axis] = found[:, axis] * (-1.0 if peak < 0 else 1.0)
    return plane_P_2


def _present(pool: QueryAnswers | None) -> QueryAnswers:
    if pool is None:
        return QueryAnswers((), np.zeros((0, 0)))
    if len(pool.texts) != len(pool.e_n_D):
        raise ValueError(f"{len(pool.texts)} texts for {len(pool.e_n_D)} embeddings")
    e_n_D = np.asarray(pool.e_n_D, dtype=np.float64)
    kept = (e_n_D != 0).any(axis=1)
    texts = [text for text, keep in zip(pool.texts, kept, strict=True) if keep]
    return QueryAnswers(texts, non_zero(e_n_D))


def _similarities(pools: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
    width = max((pool.shape[1] for pool in pools if len(pool)), default=0)
    mean_M_D = np.full((len(pools), width), np.nan)
    for row, pool in enumerate(pools):
        if len(pool):
            mean_M_D[row] = pool.mean(0)
    cell_M_M = mean_M_D @ mean_M_D.T
    for row, pool in enumerate(pools):
        inside = intra_similarity(pool)
        cell_M_M[row, row] = np.nan if inside is None else inside
    return cell_M_M


def _closest_pair(
    e_P_D: NDArray[np.float64], model_P: NDArray[np.integer]
) -> tuple[float, int, int] | None:
    """Cosine and places of the closest two answers of two models, the first ones of equals."""
    best: tuple[float, int, int] | None = None
    for start in range(0, len(e_P_D), _PAIR_BLOCK):
        rows = slice(start, start + _PAIR_BLOCK)
        cosine_B_P = e_P_D[rows] @ e_P_D.T
        cosine_B_P[model_P[rows, None] == model_P[None, :]] = -np.inf
        row, column = np.unravel_index(int(np.argmax(cosine_B_P)), cosine_B_P.shape)
        cosine = float(cosine_B_P[row, column])
        if np.isfinite(cosine) and (best is None or cosine > best[0]):
            best = (cosine, start + int(row), int(column))
    return best


def _mean(cell_Q_M_M: NDArray[np.float64]) -> NDArray[np.float64]:
    known = np.isfinite(cell_Q_M_M)
    count_M_M = known.sum(0)
    total_M_M = np.where(known, cell_Q_M_M, 0.0).sum(0)
    return np.where(count_M_M > 0, total_M_M / np.maximum(count_M_M, 1), np.nan)


def _intervals(
    cell_Q_M_M: NDArray[np.float64], seed: int, rounds: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    count, models, _ = cell_Q_M_M.shape
    nothing = np.full((models, models), np.nan)
    if count < 2 or models == 0:
        return nothing, nothing
    known_Q_C = np.isfinite(cell_Q_M_M).reshape(count, -1)
    value_Q_C = np.where(known_Q_C, cell_Q_M_M.reshape(count, -1), 0.0)
    # weight_B_Q[b, q]: how often resample b drew query q.
    weight_B_Q = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), rounds)
    drawn_B_C = weight_B_Q @ known_Q_C.astype(np.float64)
    mean_B_C = np.divide(
        weight_B_Q @ value_Q_C, drawn_B_C, out=np.full_like(drawn_B_C, np.nan), where=drawn_B_C > 0
    )
    enough_C = known_Q_C.sum(0) >= 2
    bounds_2_C = np.full((2, known_Q_C.shape[1]), np.nan)
    if enough_C.any():
        bounds_2_C[:, enough_C] = np.nanquantile(mean_B_C[:, enough_C], [0.025, 0.975], axis=0)
    return bounds_2_C[0].reshape(models, models), bounds_2_C[1].reshape(models, models)


def _rows(cell_M_M: NDArray[np.float64]) -> tuple[tuple[float | None, ...], ...]:
    return tuple(
        tuple(float(cell) if np.isfinite(cell) else None for cell in row) for row in cell_M_M
    )
