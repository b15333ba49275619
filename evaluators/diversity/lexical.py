"""Diversity of wording: n-grams and compression, without any embedding."""

import gzip
import math
from collections.abc import Sequence


def words(text: str) -> list[str]:
    """Lower-cased, split at white space."""
    return text.lower().split()


def k_grams(texts: Sequence[str], k: int) -> list[tuple[str, ...]]:
    """All word k-grams of the pool; none spans two texts. Raises ValueError for k < 1."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return [
        tuple(found[i : i + k]) for found in map(words, texts) for i in range(len(found) - k + 1)
    ]


def distinct_k(texts: Sequence[str], k: int) -> float | None:
    """Unique word k-grams over all word k-grams of the pool; None when there is none.

    Falls with the pool's length: compare pools of equal token budget only, or use
    `expectation_adjusted_distinct`. Li et al., NAACL 2016.
    """
    grams = k_grams(texts, k)
    return len(set(grams)) / len(grams) if grams else None


def expectation_adjusted_distinct(
    texts: Sequence[str], vocabulary: int, k: int = 1
) -> float | None:
    """Distinct k-grams over what as many uniform draws from V of them would give.

    U / (V (1 - ((V-1)/V)^C)) with U distinct of C k-grams and V = `vocabulary`, which must be the
    same for all pools that are compared. None without a k-gram. Liu et al., ACL 2022. Raises
    ValueError if V is smaller than U.
    """
    grams = k_grams(texts, k)
    distinct = len(set(grams))
    if not grams:
        return None
    if vocabulary < distinct:
        raise ValueError(f"a vocabulary of {vocabulary} cannot have {distinct} distinct {k}-grams")
    if vocabulary == 1:
        return 1.0
    return distinct / (-vocabulary * math.expm1(len(grams) * math.log1p(-1 / vocabulary)))


def compression_ratio(texts: Sequence[str]) -> float | None:
    """Bytes of the joined pool over bytes of its gzip form; higher is more redundant.

    Hardly depends on length beyond a few kilobytes; below, gzip's header of 18 bytes weighs. None
    when no text has a character. Shaib et al., arXiv 2403.00553.
    """
    joined = "\n".join(texts).encode("utf-8", "surrogatepass")
    return len(joined) / len(gzip.compress(joined, 9, mtime=0)) if joined.strip() else None


def repetition_share(text: str, k: int = 3) -> float | None:
    """1 - unique/all word k-grams inside one text; None for fewer than k words."""
    found = distinct_k([text], k)
    return None if found is None else 1 - found
