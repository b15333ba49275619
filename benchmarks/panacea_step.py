"""What Panacea costs: a joint step beside a plain one, alone and with BDS; the post-hoc
perturbation beside one pass over the harmful rows; and peak memory.

    python -m benchmarks.panacea_step [--model PATH] [--rounds 3] [--output benchmarks/results]

8 user, 8 alignment and 8 harmful rows of 96 tokens, the last 24 supervised; all ways on the same
model and adapter in turn, medians over the rounds. The joint objective differentiates g once and h
twice: with batches of one size three passes instead of one, and beside BDS 2b + 2b rows instead of
2b. The paper's table gives 2.5 for whole runs (0.42 h for 0.17 h, Llama-2-7B, one A100).
"""

import argparse
from collections.abc import Callable
from pathlib import Path

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
from jobspec.defense import PlainOptions, SchedulerOptions

BATCH = 8
HARMFUL_BATCHES = 2
MEMORY_STEPS = 2


def all_ways(steps: Steps) -> dict[str, Callable[[], object]]:
    """Every way to take a step, and the two ways over the whole harmful set."""
    rows = equal_rows((2 + HARMFUL_BATCHES) * BATCH, 0, vocabulary=steps.model.config.vocab_size)
    parts = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    user, alignment, harmful = parts[0], parts[1], parts[2:]
    ids = list(range(BATCH))
    plain, bds = steps.method(PlainOptions()), steps.method(SchedulerOptions())
    return {
        "plain": lambda: steps.tune(plain, [], user, ids),
        "joint": lambda: steps.tune_jointly(plain, [], user, ids, harmful[0]),
        "bds": lambda: steps.tune(bds, alignment, user, ids),
        "bds, joint": lambda: steps.tune_jointly(bds, alignment, user, ids, harmful[0]),
        "post_hoc": lambda: steps.perturb(harmful),
        "passes": lambda: steps.plain_passes(harmful),
    }


def run(output_dir: Path, model_path: str | None = None, rounds: int = 3) -> list[Result]:
    """Measures, prints and writes output_dir/panacea_step.json; returns what it wrote."""
    model_argument = ["--model", model_path] if model_path else []
    memory = {
        way: in_fresh_process("benchmarks.panacea_step", "--peak-memory", way, *model_argument)[
            "peak"
        ]
        for way in ("plain", "joint")
    }
    with one_thread():
        seconds = median_cpu_seconds(all_ways(Steps(model_path)), rounds)
    results = [
        result(
            "panacea joint step / plain step",
            seconds["joint"] / seconds["plain"],
            3.15,
            "3.0: grad g, grad h(w), grad h(w + eps), batches of one size",
        ),
        result(
            "panacea joint step with bds / bds step",
            seconds["bds, joint"] / seconds["bds"],
            2.1,
            "2.0: 2b rows for g, b rows twice for h, over 2b",
        ),
        result(
            "post-hoc perturbation / one pass over the harmful rows",
            seconds["post_hoc"] / seconds["passes"],
            1.05,
            "1.0: |D_h|/b forward and backward passes, once a run",
        ),
        result(
            "post-hoc perturbation a harmful row / plain step a row",
            seconds["post_hoc"] / HARMFUL_BATCHES / seconds["plain"],
            1.05,
            "1.0: the same pass; |D_h|/(n_epochs N) of a whole run",
        ),
        result(
            "peak memory of joint steps / of plain steps",
            memory["joint"] / memory["plain"],
            1.05,
            "1.0: a few buffers of the adapter's size; one pass at a time",
            unit=BYTES,
        ),
    ]
    publish(output_dir, "panacea_step", results)
    print_raw(seconds, "CPU s")
    print_raw(memory, "MB peak", 1e-6)
    return results


def _peak_memory(way: str, model_path: str | None) -> float:
    take = all_ways(Steps(model_path))[way]
    for _ in range(MEMORY_STEPS):
        take()
    return float(peak_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder of a causal model; default: random SmolLM2-135M")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-memory", choices=("plain", "joint"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_memory:
        answer({"peak": _peak_memory(arguments.peak_memory, arguments.model)})
    else:
        run(arguments.output, arguments.model, arguments.rounds)


if __name__ == "__main__":
    main()
