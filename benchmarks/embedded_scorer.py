"""What the embedded scorer costs beside the embedding that it starts with, in one run.

    python -m benchmarks.embedded_scorer [--output benchmarks/results]

Synthetic answers of 10 to 140 words (12 to 192 tokens), all different, one thread. The embedding
alone is the limit: everything else that a score needs is a few regular expressions, a dictionary
look-up a word and three dot products.
"""

import argparse
import random
from pathlib import Path

from benchmarks.measure import RESULTS, Result, median_cpu_seconds, one_thread, print_raw, publish
from benchmarks.measure import result as line
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.prompts import load_prompts

ANSWERS = 96
LEAST_WORDS, MOST_WORDS = 10, 140
REFUSAL = "I'm sorry, but I can't help with that. "


def answers(count: int, seed: int) -> list[str]:
    """Words of the shipped prompts in random order, in sentences; every fourth refuses first."""
    source = random.Random(seed)
    words = [
        word for prompt in load_prompts("benign_prompts").prompts for word in prompt.text.split()
    ]
    made = []
    for index in range(count):
        chosen = source.choices(words, k=source.randint(LEAST_WORDS, MOST_WORDS))
        sentences = [" ".join(chosen[start : start + 12]) for start in range(0, len(chosen), 12)]
        made.append((REFUSAL if index % 4 == 0 else "") + ". ".join(sentences) + ".")
    return made


def run(output_dir: Path, rounds: int = 3) -> list[Result]:
    """Measures, prints and writes output_dir/embedded_scorer.json; returns what it wrote."""
    scorer = EmbeddedScorer.load()
    embedder = scorer.embedder
    with_tail_rule = scorer.with_tail_rule()
    texts = answers(ANSWERS, seed=0)
    with one_thread():
        seconds = median_cpu_seconds(
            {
                "embedding alone": lambda: embedder.embed(texts),
                "scorer": lambda: scorer.probabilities(texts),
                "scorer with tail rule": lambda: with_tail_rule.probabilities(texts),
            },
            rounds,
        )
    results = [
        line(
            "embedded scorer / MiniLM embedding alone",
            seconds["scorer"] / seconds["embedding alone"],
            1.1,
            "1.0: one embedding an answer",
        ),
        line(
            "embedded scorer with tail rule / without",
            seconds["scorer with tail rule"] / seconds["scorer"],
            1.4,
            "1.25: a second text for every fourth answer",
        ),
        line(
            "embedded scorer, answers a CPU second",
            ANSWERS / seconds["scorer"],
            25,
            "50 a second on two free cores, generation not counted",
            better="higher",
            unit="answers/CPU second, one thread",
        ),
    ]
    publish(output_dir, "embedded_scorer", results)
    print_raw({name: ANSWERS / value for name, value in seconds.items()}, "answers/CPU s")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    run(arguments.output, arguments.rounds)


if __name__ == "__main__":
    main()
