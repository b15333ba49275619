"""What the diversity pass costs beside the pair loop that defines it.

    python -m benchmarks.diversity [--rounds 3] [--output benchmarks/results]

100 queries with 50 answers each, embeddings of width 384 around a centre a query, as answers to one
question are; answers of 60 words for the wording metrics, of which self-BLEU is timed on 4 queries.
All ways in one process with one thread, in turn, medians over the rounds. Embedding the texts
is not part of it: it is the same for all ways.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import (
    RESULTS,
    Result,
    answer,
    in_fresh_process,
    median_cpu_seconds,
    peak_bytes,
    print_raw,
    publish,
    result,
)
from evaluators.diversity.query import query_diversity
from evaluators.diversity.self_bleu import MAX_ORDER, self_bleu, tokenize_13a
from evaluators.diversity.similarity import intra_similarity

QUERIES, SAMPLES, WIDTH = 100, 50, 384
WORDS, VOCABULARY = 60, 2000
BLEU_QUERIES = 4
# A pass of a few milliseconds is mostly the noise of a busy machine.
REPEATS = 20
TARGET = 20.0


def pools(queries: int, samples: int, width: int, seed: int = 0) -> list[NDArray[np.float32]]:
    """Unit vectors with a mean cosine of about 0.8 inside a query."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(queries):
        centre_D = generator.normal(size=width)
        e_n_D = 2 * centre_D + generator.normal(size=(samples, width))
        made.append((e_n_D / np.linalg.norm(e_n_D, axis=1, keepdims=True)).astype(np.float32))
    return made


def answers(queries: int, samples: int, words: int, seed: int = 0) -> list[list[str]]:
    """Texts whose words are as unevenly frequent as those of a language."""
    generator = np.random.default_rng(seed)
    drawn = generator.zipf(1.3, size=(queries, samples, words)) % VOCABULARY
    return [[" ".join(f"w{word}" for word in text) for text in pool] for pool in drawn]


def pair_loop(e_n_D: NDArray[np.float32]) -> float:
    """Mean cosine as it is defined, one pair after another."""
    total, n = 0.0, len(e_n_D)
    for i in range(n):
        for j in range(i):
            total += float(e_n_D[i] @ e_n_D[j])
    return 2 * total / (n * (n - 1))


def reference_counts(texts: Sequence[str]) -> list[Counter[tuple[str, ...]]]:
    """For each text the highest counts over the others, counted anew for each text: what a loop
    around a sentence BLEU does before it compares."""
    found = []
    for place in range(len(texts)):
        most: Counter[tuple[str, ...]] = Counter()
        for other, text in enumerate(texts):
            if other != place:
                tokens = tokenize_13a(text)
                most |= Counter(
                    tuple(tokens[i : i + k])
                    for k in range(1, MAX_ORDER + 1)
                    for i in range(len(tokens) - k + 1)
                )
        found.append(most)
    return found


def all_ways(
    queries: int = QUERIES, samples: int = SAMPLES, width: int = WIDTH, words: int = WORDS
) -> dict[str, Callable[[], object]]:
    """Every way, over the same data."""
    vectors, texts = pools(queries, samples, width), answers(queries, samples, words)
    few = texts[:BLEU_QUERIES]

    def everything() -> None:
        for pool, pool_texts in zip(vectors, texts, strict=True):
            query_diversity("q", pool_texts, pool, class_threshold=0.7, vocabulary=VOCABULARY)

    return {
        "pair loop": lambda: [pair_loop(pool) for pool in vectors],
        "sum vector": lambda: [intra_similarity(e) for _ in range(REPEATS) for e in vectors],
        "all metrics": everything,
        "self-BLEU, references anew": lambda: [reference_counts(pool) for pool in few],
        "self-BLEU": lambda: [self_bleu(pool) for pool in few],
    }


def run(output_dir: Path, rounds: int = 3) -> list[Result]:
    """Measures, prints and writes output_dir/diversity.json; returns what it wrote."""
    found = in_fresh_process("benchmarks.diversity", "--measure", "--rounds", str(rounds))
    peak = found.pop("peak bytes")
    pairs = QUERIES * SAMPLES * (SAMPLES - 1) / 2
    print_raw(found, "ms", 1000)
    print_raw(
        {
            "pairs, pair loop": pairs / found["pair loop"],
            "pairs, sum vector": pairs / found["sum vector"],
            "texts, all metrics": QUERIES * SAMPLES / found["all metrics"],
        },
        "a second",
    )
    print_raw({"peak memory": peak}, "MiB", 2.0**-20)
    results = [
        result(
            "mean similarity: pair loop / sum vector",
            found["pair loop"] / found["sum vector"],
            TARGET,
            f"{(SAMPLES - 1) / 2:g} by operations (n(n-1)/2 products for n); more by a loop's cost",
            better="higher",
        ),
        result(
            "pair loop / all metrics of wording and embedding",
            found["pair loop"] / found["all metrics"],
            None,
            "1: as cheap as the mean similarity alone by its definition",
            better="higher",
        ),
        result(
            "self-BLEU: references counted anew / counted once",
            found["self-BLEU, references anew"] / found["self-BLEU"],
            TARGET,
            f"about {SAMPLES - 1}: each text is counted once instead of {SAMPLES - 1} times",
            better="higher",
        ),
    ]
    publish(output_dir, "diversity", results)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        seconds = median_cpu_seconds(all_ways(), arguments.rounds)
        seconds["sum vector"] /= REPEATS
        answer({**seconds, "peak bytes": float(peak_bytes())})
    else:
        run(arguments.output, arguments.rounds)


if __name__ == "__main__":
    main()
