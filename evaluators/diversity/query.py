"""All numbers of one model's responses to one query."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from evaluators.diversity.classes import novelty_classes, semantic_entropy
from evaluators.diversity.lexical import (
    compression_ratio,
    distinct_k,
    expectation_adjusted_distinct,
)
from evaluators.diversity.self_bleu import self_bleu
from evaluators.diversity.similarity import intra_similarity, pair_spread
from evaluators.diversity.vendi import vendi_scores


class QueryDiversity(BaseModel):
    """One query's responses in numbers; None where fewer than two responses have text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query_id: str
    n: int = Field(ge=0, description="Responses with text; the others are left out.")
    empty: int = Field(ge=0, description="Responses without text.")
    refused: int | None = Field(ge=0, description="Refusals among the n; None: not judged.")
    truncated: int | None = Field(ge=0, description="Cut off among the n; None: not known.")
    similarity: float | None = Field(description="S_m(q), mean cosine over pairs.")
    least_similarity: float | None = Field(description="Least cosine of a pair.")
    p95_similarity: float | None = Field(description="95th percentile of the pairs' cosines.")
    greatest_similarity: float | None = Field(description="Greatest cosine; 1: a verbatim copy.")
    vendi: float | None = Field(description="Vendi score of order 1, effective number of answers.")
    vendi_2: float | None = Field(description="Vendi score of order 2.")
    vendi_inf: float | None = Field(description="Vendi score of infinite order.")
    distinct_classes: int | None = Field(description="Answers that say something different.")
    semantic_entropy: float | None = Field(description="Entropy of those classes' shares, nats.")
    self_bleu: float | None = Field(description="Mean BLEU-4 of each against the others, 0..1.")
    distinct_1: float | None = Field(description="Unique words over all words.")
    distinct_2: float | None = Field(description="Unique word pairs over all word pairs.")
    distinct_3: float | None = Field(description="Unique word triples over all word triples.")
    adjusted_distinct_1: float | None = Field(
        description="Unique words over what uniform draws from the evaluation's words would give."
    )
    compression: float | None = Field(description="Bytes over gzip bytes of the joined answers.")


def query_diversity(
    query_id: str,
    texts: Sequence[str],
    e_n_D: NDArray[np.floating],
    *,
    class_threshold: float,
    vocabulary: int,
    refused: Sequence[bool] | None = None,
    truncated: Sequence[bool] | None = None,
) -> QueryDiversity:
    """Measure texts with their embeddings, blank texts (zero vectors) left out and counted.

    class_threshold: cosine of "the same answer" in the embedder's scale. vocabulary: number of
    different words in everything that is compared.
    """
    kept = [i for i, text in enumerate(texts) if text.strip()]
    present = [texts[i] for i in kept]
    e_n_D = np.asarray(e_n_D, dtype=np.float64)[kept]
    enough = len(kept) >= 2
    spread = pair_spread(e_n_D)
    vendi, vendi_2, vendi_inf = vendi_scores(e_n_D, (1.0, 2.0, math.inf))
    classes = novelty_classes(present, e_n_D, class_threshold) if enough else []
    return QueryDiversity(
        query_id=query_id,
        n=len(kept),
        empty=len(texts) - len(kept),
        refused=None if refused is None else sum(refused[i] for i in kept),
        truncated=None if truncated is None else sum(truncated[i] for i in kept),
        similarity=intra_similarity(e_n_D),
        least_similarity=None if spread is None else spread.low,
        p95_similarity=None if spread is None else spread.p95,
        greatest_similarity=None if spread is None else spread.high,
        vendi=vendi,
        vendi_2=vendi_2,
        vendi_inf=vendi_inf,
        distinct_classes=len(set(classes)) if enough else None,
        semantic_entropy=semantic_entropy(classes) if enough else None,
        self_bleu=self_bleu(present),
        distinct_1=distinct_k(present, 1) if enough else None,
        distinct_2=distinct_k(present, 2) if enough else None,
        distinct_3=distinct_k(present, 3) if enough else None,
        adjusted_distinct_1=(
            expectation_adjusted_distinct(present, vocabulary) if enough else None
        ),
        compression=compression_ratio(present) if enough else None,
    )
