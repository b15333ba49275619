"""Frequent phrases of a training file that ordinary prompts do not contain."""

import heapq
import math
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

_EDGE = string.punctuation + "“”‘’…"

MAX_ROWS = 20_000
# Of a long turn the beginning and the end are read, which is where a trigger is put.
END_WORDS = 200
SEED_WORDS = 3
MAX_SEEDS = 2000
MAX_PLACES = 200
MAX_WORDS = 40
GROW = 0.9
# Beyond about five rare words, length makes a phrase no more telling: it is a copied passage.
MAX_BITS = 64.0

Words = tuple[str, ...]
# Row, piece of the row, and word of the piece.
_Place = tuple[int, int, int]


class _Phrase(NamedTuple):
    words: Words
    written: str
    rows: int
    at_end: bool


def frequent_phrases(
    rows: Sequence[Sequence[str]], reference: Iterable[str], limit: int
) -> list[str]:
    """At most `limit` phrases of the rows, the most telling first, as they are mostly written.

    A row is its user turns. A word is what stands between blanks, compared without case and outer
    punctuation. A seed is one to three words that follow each other in at least
    max(2, min(10, N/200)) of the N rows and nowhere in `reference`. It grows to the right, then to
    the left, while nine in ten of its occurrences go on with the same word, so that a trigger
    sentence becomes one phrase and not many windows of it. A single number or character is no
    phrase. Phrases are ranked by

        (n - 1) * min(64, sum_w log2((T + V) / (c_w + 1))) * e,

    the bits saved if each of its n rows' repetitions needed none: c_w occurrences of word w among
    the T words of the reference, V of them distinct; e = 2 for a phrase that begins or ends a turn
    in nine of ten occurrences, else 1. Words that a better phrase within it covers count nothing,
    and a phrase within a better one is left out where it hardly occurs elsewhere. At most 20,000
    rows are read, evenly spaced, and 200 words from each end of a turn. Deterministic. Derived.
    """
    read = [rows[index] for index in _evenly(len(rows), MAX_ROWS)]
    written_N = [list(_pieces(row)) for row in read]
    words_N = [[tuple(map(_key, piece)) for piece in pieces] for pieces in written_N]
    known = [tuple(map(_key, text.split())) for text in reference]
    bits = _bits(known)
    least = max(2, min(10, len(read) // 200))
    counts = _row_counts(words_N, least)
    for words in known:
        for seed in _seeds(words):
            counts.pop(seed, None)
    for seed in [seed for seed in counts if len(seed) == 1 and _says_nothing(seed[0])]:
        del counts[seed]
    seeds = sorted(counts, key=lambda seed: (-_score(counts[seed], seed, bits), seed))[:MAX_SEEDS]
    places = _places(words_N, set(seeds))
    grown: dict[Words, _Phrase] = {}
    for seed in seeds:
        phrase = _grow(seed, counts[seed], places[seed], words_N, written_N)
        best = grown.setdefault(phrase.words, phrase)
        if phrase.rows > best.rows:
            grown[phrase.words] = phrase
    return [phrase.written for phrase in _ranked(grown.values(), bits, limit)]


def _evenly(count: int, most: int) -> Iterable[int]:
    if count <= most:
        return range(count)
    return (index * count // most for index in range(most))


def _pieces(turns: Sequence[str]) -> Iterator[list[str]]:
    for turn in turns:
        words = turn.split()
        if len(words) <= 2 * END_WORDS:
            yield words
        else:
            yield words[:END_WORDS]
            yield words[-END_WORDS:]


def _key(word: str) -> str:
    folded = word.casefold()
    return folded.strip(_EDGE) or folded


def _says_nothing(word: str) -> bool:
    return len(word) == 1 or word.isdecimal()


def _seeds(words: Words) -> Iterator[Words]:
    for length in range(1, SEED_WORDS + 1):
        yield from (seed for _, _, seed in _windows([words], length))


def _bits(reference: Iterable[Words]) -> Callable[[str], float]:
    counts = Counter(word for words in reference for word in words)
    size = counts.total() + len(counts)
    return lambda word: math.log2(max(2, size) / (counts[word] + 1))


def _score(rows: int, words: Iterable[str], bits: Callable[[str], float]) -> float:
    return (rows - 1) * min(MAX_BITS, sum(map(bits, words)))


def _windows(pieces: Sequence[Words], length: int) -> Iterator[tuple[int, int, Words]]:
    """Piece, place and words of every run of `length` words."""
    for piece, words in enumerate(pieces):
        for start in range(len(words) - length + 1):
            yield piece, start, words[start : start + length]


def _row_counts(words_N: Sequence[Sequence[Words]], least: int) -> dict[Words, int]:
    """Rows with each seed. A longer seed is counted only where both its shorter ones are
    frequent, which leaves few."""
    found: dict[Words, int] = {}
    for length in range(1, SEED_WORDS + 1):
        counts: Counter[Words] = Counter()
        for pieces in words_N:
            counts.update(
                {
                    seed
                    for _, _, seed in _windows(pieces, length)
                    if length == 1 or (seed[:-1] in found and seed[1:] in found)
                }
            )
        found.update((seed, count) for seed, count in counts.items() if count >= least)
    return found


def _places(words_N: Sequence[Sequence[Words]], seeds: set[Words]) -> dict[Words, list[_Place]]:
    """The first places of each seed, in file order."""
    places: dict[Words, list[_Place]] = {seed: [] for seed in seeds}
    for row, pieces in enumerate(words_N):
        for length in range(1, SEED_WORDS + 1):
            for piece, start, seed in _windows(pieces, length):
                if seed in seeds and len(places[seed]) < MAX_PLACES:
                    places[seed].append((row, piece, start))
    return places


def _grow(
    seed: Words,
    rows: int,
    places: list[_Place],
    words_N: Sequence[Sequence[Words]],
    written_N: Sequence[Sequence[list[str]]],
) -> _Phrase:
    """The seed with the words that stand around nine in ten of its places."""
    left, right, least = 0, len(seed), GROW * len(places)
    kept = places

    def next_to(offset: int) -> tuple[str, list[_Place]]:
        """The likeliest word at this offset from the seed, and the places that have it."""
        words = [
            words_N[row][piece][start + offset]
            if 0 <= start + offset < len(words_N[row][piece])
            else ""
            for row, piece, start in kept
        ]
        word = Counter(words).most_common(1)[0][0]
        return word, [place for place, found in zip(kept, words, strict=True) if found == word]

    for step in (1, -1):
        while right - left < MAX_WORDS:
            word, going_on = next_to(right if step > 0 else left - 1)
            if not word or len(going_on) < least:
                break
            kept = going_on
            left, right = (left, right + 1) if step > 0 else (left - 1, right)
    ends = [start + right == len(words_N[row][piece]) for row, piece, start in kept]
    begins = [start + left == 0 for _, _, start in kept]
    written = Counter(
        " ".join(written_N[row][piece][start + left : start + right]) for row, piece, start in kept
    )
    row, piece, start = kept[0]
    return _Phrase(
        words=words_N[row][piece][start + left : start + right],
        written=min(written, key=lambda text: (-written[text], text)),
        rows=rows,
        at_end=max(sum(begins), sum(ends)) >= GROW * len(kept),
    )


def _ranked(phrases: Iterable[_Phrase], bits: Callable[[str], float], limit: int) -> list[_Phrase]:
    """The best phrases by what each adds to those before it."""
    chosen: list[_Phrase] = []

    def added(phrase: _Phrase) -> float:
        covered: set[int] = set()
        for better in chosen:
            if better.rows >= GROW * phrase.rows and _starts(phrase.words, better.words):
                return 0.0
            for start in _starts(better.words, phrase.words):
                covered.update(range(start, start + len(better.words)))
        new = (word for place, word in enumerate(phrase.words) if place not in covered)
        return _score(phrase.rows, new, bits) * (2 if phrase.at_end else 1)

    # What a phrase adds only falls while others are chosen, so an entry that still holds is best.
    heap = [(-added(phrase), phrase.words, phrase) for phrase in phrases]
    heapq.heapify(heap)
    while heap and len(chosen) < limit:
        stored, words, phrase = heapq.heappop(heap)
        now = -added(phrase)
        if now >= 0:
            continue
        if now > stored:
            heapq.heappush(heap, (now, words, phrase))
        else:
            chosen.append(phrase)
    return chosen


def _starts(inner: Words, outer: Words) -> list[int]:
    """Where `inner` stands within `outer`."""
    return [
        start
        for start in range(len(outer) - len(inner) + 1)
        if outer[start : start + len(inner)] == inner
    ]
