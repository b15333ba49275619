"""What tuning with privacy costs: a step of DP-SGD beside a plain one on the same rows, and peak
memory.

    python -m benchmarks.dp_step [--model PATH] [--rounds 5] [--output benchmarks/results]

8 rows of 96 tokens, the last 24 supervised; both ways on the same model and adapter in turn,
medians over the rounds. Both project the vocabulary at answers only. The private step has hooks
that keep every row's gradient, clips, and adds noise from the operating system's generator; a step
with an empty sample is what the noise and the update cost alone.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure import (
    BYTES,
    RESULTS,
    Result,
    answer,
    in_fresh_process,
    median_cpu_seconds,
    one_thread,
    peak_bytes,
    print_raw,
    publish,
    result,
)
from benchmarks.steps import Steps
from benchmarks.workload import equal_rows
from jobspec.defense import PlainOptions
from workers.pipeline.private_gradients import ROWS_AT_ONCE, PrivateGradients
from workers.pipeline.private_noise import SecretStep
from workers.pipeline.rows import TokenRow

BATCH = 8
TOKENS = 96
SUPERVISED = 24
MEMORY_STEPS = 2
MEASURED_MEMORY = ("plain", "private")


def rows_of(steps: Steps) -> list[TokenRow]:
    vocabulary = steps.model.config.vocab_size
    return equal_rows(BATCH, 0, tokens=TOKENS, supervised=SUPERVISED, vocabulary=vocabulary)


def plain_ways(steps: Steps) -> dict[str, Callable[[], object]]:
    """The product's plain step, and the model's own loss on its full logits."""
    rows, method = rows_of(steps), steps.method(PlainOptions())
    return {
        "plain": lambda: steps.tune(method, [], rows, list(range(BATCH))),
        "own loss": lambda: steps.own_loss(rows),
    }


def private_ways(steps: Steps) -> dict[str, Callable[[], object]]:
    """A private step on the same rows, and one that drew none. The hooks stay on the model only
    while a step is taken, or they would slow the plain ones down."""
    rows = rows_of(steps)

    def step(drawn: list[TokenRow]) -> Callable[[], object]:
        def take() -> None:
            private = PrivateGradients(
                steps.model,
                steps.parameters,
                steps.optimizer,
                noise_multiplier=1.0,
                clip=1.0,
                expected_batch=BATCH,
                rows_at_once=ROWS_AT_ONCE * BATCH,
            )
            private.step(drawn, SecretStep())
            private.close()

        return take

    return {"private": step(rows), "private, empty sample": step([])}


def run(output_dir: Path, model_path: str | None = None, rounds: int = 5) -> list[Result]:
    """Measures, prints and writes output_dir/dp_step.json; returns what it wrote."""
    model_argument = ["--model", model_path] if model_path else []
    memory = {
        way: in_fresh_process("benchmarks.dp_step", "--peak-memory", way, *model_argument)["peak"]
        for way in MEASURED_MEMORY
    }
    with one_thread():
        steps = Steps(model_path)
        seconds = median_cpu_seconds({**plain_ways(steps), **private_ways(steps)}, rounds)
    adapter = sum(parameter.numel() for parameter in steps.parameters.values())
    kept = 4 * BATCH * adapter
    results = [
        result(
            "private step / plain LoRA step on the same rows",
            seconds["private"] / seconds["plain"],
            1.3,
            "1.0: clipping and noise are vector work over the adapter",
        ),
        result(
            "private step / the model's own loss on full logits",
            seconds["private"] / seconds["own loss"],
            None,
            "below 1.0: the vocabulary is projected at answers only",
        ),
        result(
            "private step with an empty sample / plain LoRA step",
            seconds["private, empty sample"] / seconds["plain"],
            None,
            "0.0: noise and update alone",
        ),
        result(
            "peak memory of a private step / of a plain one",
            memory["private"] / memory["plain"],
            None,
            f"1.0 to {1 + kept / memory['plain']:.2f}: a gradient of the adapter for every row, "
            "kept while activations are freed",
            unit=BYTES,
        ),
    ]
    publish(output_dir, "dp_step", results)
    print_raw(seconds, "CPU s/step")
    print_raw(memory, "MB peak", 1e-6)
    return results


def _peak_memory(way: str, model_path: str | None) -> float:
    torch.set_num_threads(1)
    steps = Steps(model_path)
    take = {**plain_ways(steps), **private_ways(steps)}[way]
    for _ in range(MEMORY_STEPS):
        take()
    return float(peak_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder of a causal model; default: random SmolLM2-135M")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-memory", choices=MEASURED_MEMORY, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_memory:
        answer({"peak": _peak_memory(arguments.peak_memory, arguments.model)})
    else:
        run(arguments.output, arguments.model, arguments.rounds)


if __name__ == "__main__":
    main()
