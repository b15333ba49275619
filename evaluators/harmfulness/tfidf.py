"""TF-IDF of words and word pairs, and a logistic model on it, in plain dictionaries.

The same numbers as scikit-learn's TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True) with its
defaults otherwise (lower case, words of two or more word characters, smoothed idf, L2 norm), so
that scoring needs no scikit-learn and never makes a matrix as wide as the vocabulary.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"\b\w\w+\b")


def terms(text: str) -> list[str]:
    """Lower-cased words of at least two characters, then each pair of neighbouring words."""
    words = _WORD.findall(text.lower())
    return [*words, *(f"{first} {second}" for first, second in pairwise(words))]


@dataclass(frozen=True)
class TfidfModel:
    """z = intercept + sum_V coef_V u_V,  u = w / ||w||_2,  w_V = (1 + ln tf_V) idf_V.

    tf_V: how often term V occurs in the text; terms outside the vocabulary do not count. A text
    without any known term has u = 0. index_of: term to its place in idf_V and coef_V.
    """

    index_of: Mapping[str, int]
    idf: NDArray[np.float64]
    coef: NDArray[np.float64]
    intercept: float

    def vector(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The places of the terms that occur, ascending, and u at those places."""
        counts = Counter(
            index for term in terms(text) if (index := self.index_of.get(term)) is not None
        )
        places = np.array(sorted(counts), dtype=np.int64)
        tf = np.array([counts[int(place)] for place in places], dtype=np.float64)
        weight = (np.log(tf) + 1.0) * self.idf[places]
        norm = np.sqrt(weight @ weight)
        return places, weight / norm if norm > 0 else weight

    def logit(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """z_N of N texts, each on its own: neighbours change nothing."""
        z_N = np.full(len(texts), self.intercept)
        for row, text in enumerate(texts):
            places, u = self.vector(text)
            z_N[row] += self.coef[places] @ u
        return z_N
