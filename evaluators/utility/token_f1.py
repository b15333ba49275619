"""Overlap of an answer's words with the expected ones, as SQuAD scores it."""

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_words(text: str) -> list[str]:
    """Words in lower case, without ASCII punctuation and English articles (SQuAD, Rajpurkar et al.
    2016)."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def token_f1(answer: str, label: str) -> float:
    """F1 = 2 P R / (P + R) in [0, 1], with m words that both have (as often as both have them),
    P = m / words of the answer, R = m / words of the label.

    A label of nothing but articles and punctuation must be given as it is; an empty one matches
    nothing.
    """
    given, expected = squad_words(answer), squad_words(label)
    if not expected:
        return float(label.strip() != "" and answer.strip() == label.strip())
    common = (Counter(given) & Counter(expected)).total()
    return 2 * common / (len(given) + len(expected))
