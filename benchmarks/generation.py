"""Batched generation for evaluation beside one-by-one `model.generate`, in one run.

    python -m benchmarks.generation [--prompts 24] [--rounds 1] [--output benchmarks/results]

The bundled SmolLM2-135M answers shipped harmful and look-alike prompts greedily, 32 tokens at
most, in both ways; answers are compared. CPU seconds, one thread. Decoding on a CPU reads all
weights once a step whatever the batch, so a batch of b costs far less than b single answers.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import (
    RESULTS,
    Result,
    median_cpu_seconds,
    one_thread,
    print_raw,
    publish,
    result,
)
from evaluators.generation import Decoding, generate
from evaluators.prompts import load_prompts
from jobspec.cache import default_cache_dir
from jobspec.catalogue import load_catalogue
from workers.pipeline.models import load_base

TOKENS = 32
BATCH = 16
TARGET = 3.0


def one_by_one(model: Any, tokenizer: Any, questions: list[list[dict[str, str]]]) -> list[str]:
    """What a script does without this project: transformers' own loop, a prompt at a time."""
    answers = []
    for conversation in questions:
        text = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False
        )
        encoded = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            out = model.generate(
                **encoded,
                max_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        answers.append(
            tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return answers


def run(output_dir: Path, prompts: int = 24, rounds: int = 1) -> list[Result]:
    """Measures, prints and writes output_dir/generation.json; returns what it wrote."""
    entry = load_catalogue().find("smollm2-135m-aligned")
    assert entry is not None
    base = load_base(entry, default_cache_dir())
    sets = (load_prompts("harmful_prompts"), load_prompts("safe_lookalikes"))
    half = prompts // 2
    questions = [
        [{"role": "user", "content": prompt.text}]
        for each in sets
        for prompt in each.prompts[:half]
    ]
    found: dict[str, list[str]] = {}

    def batched() -> None:
        answers = generate(
            base.model,
            base.tokenizer,
            questions,
            Decoding(max_new_tokens=TOKENS),
            batch_size=BATCH,
        )
        found["batched"] = [answer[0].text for answer in answers]

    def single() -> None:
        found["single"] = one_by_one(base.model, base.tokenizer, questions)

    with one_thread():
        batched()
        seconds = median_cpu_seconds({"one by one": single, "batched": batched}, rounds, warm=False)
    same = sum(a == b for a, b in zip(found["batched"], found["single"], strict=True))
    tokens = sum(len(base.tokenizer(text)["input_ids"]) for text in found["batched"])
    results = [
        result(
            "tokens/s batched / one by one",
            seconds["one by one"] / seconds["batched"],
            TARGET,
            f"{BATCH} at most, reached where reading the weights is all that costs",
            better="higher",
        ),
        result(
            "greedy answers that are the same",
            same / len(questions),
            0.95,
            "1.0; padding changes the last bits, so a tie of two tokens may fall otherwise",
            better="higher",
            unit="share of the answers",
        ),
    ]
    publish(output_dir, "generation", results)
    print_raw(seconds, f"CPU s, {len(questions)} answers, {tokens} tokens")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    run(arguments.output, arguments.prompts, arguments.rounds)


if __name__ == "__main__":
    main()
