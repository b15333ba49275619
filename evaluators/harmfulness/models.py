"""The models of the embedded scorer, and how they are stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluators.harmfulness.tfidf import TfidfModel


@dataclass(frozen=True)
class LogisticModel:
    """z = intercept + sum_F coef_F (x_F - mean_F) / sd_F,  p = sigmoid(z)."""

    mean: NDArray[np.float64]
    sd: NDArray[np.float64]
    coef: NDArray[np.float64]
    intercept: float

    def logit(self, x_N_F: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray((x_N_F - self.mean) / self.sd @ self.coef + self.intercept)

    def probability(self, x_N_F: NDArray[np.float64]) -> NDArray[np.float64]:
        return sigmoid(self.logit(x_N_F))


@dataclass(frozen=True)
class HarmfulModel:
    """p = sigmoid((z_A + z_B) / 2): part A sees meaning and layout, part B words and word pairs.

    Source: derived; the two logits carry equal weight.
    """

    part_a: LogisticModel
    part_b: TfidfModel

    def probability(self, texts: Sequence[str], x_N_F: NDArray[np.float64]) -> NDArray[np.float64]:
        """p_N of normalised texts and the features of the same texts."""
        return sigmoid((self.part_a.logit(x_N_F) + self.part_b.logit(texts)) / 2)


class ScorerModels(NamedTuple):
    """What a fit gives and a scorer computes with."""

    harmful: HarmfulModel
    refusal: LogisticModel


def sigmoid(z_N: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1.0 / (1.0 + np.exp(-z_N)))


def pack(models: ScorerModels) -> tuple[dict[str, NDArray[np.float64]], list[str]]:
    """Tensors and vocabulary, as they are stored; unpack is the inverse."""
    part_b = models.harmful.part_b
    tensors = {
        f"{name}.{part}": np.atleast_1d(np.asarray(value, dtype=np.float64))
        for name, model in (("harmful", models.harmful.part_a), ("refusal", models.refusal))
        for part, value in (
            ("mean", model.mean),
            ("sd", model.sd),
            ("coef", model.coef),
            ("intercept", model.intercept),
        )
    }
    tensors["tfidf.idf"] = part_b.idf
    tensors["tfidf.coef"] = part_b.coef
    tensors["tfidf.intercept"] = np.array([part_b.intercept])
    return tensors, sorted(part_b.index_of, key=part_b.index_of.__getitem__)


def unpack(tensors: Mapping[str, NDArray[np.float64]], vocabulary: Sequence[str]) -> ScorerModels:
    """Raises KeyError for a missing tensor, ValueError where vocabulary and tensors differ."""
    part_b = TfidfModel(
        index_of={term: index for index, term in enumerate(vocabulary)},
        idf=tensors["tfidf.idf"],
        coef=tensors["tfidf.coef"],
        intercept=float(tensors["tfidf.intercept"][0]),
    )
    if not len(part_b.index_of) == len(part_b.idf) == len(part_b.coef):
        raise ValueError(
            f"{len(part_b.index_of)} distinct terms, {len(part_b.idf)} idf values and "
            f"{len(part_b.coef)} coefficients"
        )
    part_a, refusal = (
        LogisticModel(
            mean=tensors[f"{name}.mean"],
            sd=tensors[f"{name}.sd"],
            coef=tensors[f"{name}.coef"],
            intercept=float(tensors[f"{name}.intercept"][0]),
        )
        for name in ("harmful", "refusal")
    )
    return ScorerModels(HarmfulModel(part_a, part_b), refusal)
