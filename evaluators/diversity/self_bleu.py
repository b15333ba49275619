"""Self-BLEU: how much each response overlaps with the others to the same query."""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

MAX_ORDER = 4
# nrefs: each response has all others; sacrebleu's signature of the same settings.
SIGNATURE = "case:mixed|eff:yes|tok:13a|smooth:exp"

# mteval-v13a's rules for Western languages.
_RULES = (
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)
_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))

Gram = tuple[str, ...]


def tokenize_13a(text: str) -> list[str]:
    """Tokens of mteval-v13a, the tokenizer of WMT."""
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in _ENTITIES:
        text = text.replace(entity, character)
    text = f" {text} "
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.split()


def self_bleu(texts: Sequence[str]) -> float | None:
    """Mean over i of BLEU-4 of text i with all other texts as its references, between 0 and 1.

    BLEU = BP exp(1/O sum_{k<=O} ln p_k): p_k is the clipped precision of k-grams, an empty p_k
    counts as 1/(2^m total_k) at the m-th empty one (smoothing exp), O is the largest order that
    text i has at all (up to 4), BP = min(1, exp(1 - r/c)) with c its length and r the closest
    length of another text, the shorter one of two. Tokens: `tokenize_13a`, once a text. None for
    fewer than two texts.

    Equal to sacrebleu's sentence BLEU / 100 of these settings (SIGNATURE), in time linear in all
    n-grams: the clipping count of text i is the highest count over the other texts, which is the
    second highest of all where text i has the highest. Texygen, Zhu et al., arXiv 1802.01886.
    """
    if len(texts) < 2:
        return None
    tokens = [tokenize_13a(text) for text in texts]
    grams = [_grams(text) for text in tokens]
    highest: dict[Gram, tuple[int, int]] = {}
    second: dict[Gram, int] = {}
    for place, counts in enumerate(grams):
        for gram, count in counts.items():
            most = highest.get(gram, (0, -1))[0]
            if count > most:
                second[gram] = most
                highest[gram] = (count, place)
            elif count > second[gram]:
                second[gram] = count
    lengths = Counter(map(len, tokens))
    known = sorted(lengths)
    total = 0.0
    for place, (text, counts) in enumerate(zip(tokens, grams, strict=True)):
        matched, all_k = [0] * MAX_ORDER, [0] * MAX_ORDER
        for gram, count in counts.items():
            most, owner = highest[gram]
            order = len(gram) - 1
            all_k[order] += count
            matched[order] += min(count, second[gram] if owner == place else most)
        total += _bleu(matched, all_k, len(text), _closest(len(text), lengths, known))
    return total / len(texts)


def _grams(tokens: Sequence[str]) -> Counter[Gram]:
    return Counter(
        tuple(tokens[i : i + k])
        for k in range(1, MAX_ORDER + 1)
        for i in range(len(tokens) - k + 1)
    )


def _closest(length: int, lengths: Counter[int], known: Sequence[int]) -> int:
    """The length of another text that is closest; the shorter one of two equally close."""
    if lengths[length] > 1:
        return length
    place = bisect_left(known, length)
    others = [known[i] for i in (place - 1, place + 1) if 0 <= i < len(known)]
    return min(others, key=lambda other: (abs(other - length), other))


def _bleu(matched: Sequence[int], all_k: Sequence[int], length: int, reference: int) -> float:
    if not any(matched):
        return 0.0
    logarithms = []
    smoothing = 1
    for hits, count in zip(matched, all_k, strict=True):
        if count == 0:
            break
        if hits == 0:
            smoothing *= 2
        logarithms.append(math.log(hits / count if hits else 1 / (smoothing * count)))
    penalty = math.exp(1 - reference / length) if length < reference else 1.0
    return penalty * math.exp(sum(logarithms) / len(logarithms))
