"""What BDS costs: a step beside mixing without weights, its neural form beside the scalar one, rows
a second beside a loop written as the method is described, and peak memory at equal rows.

    python -m benchmarks.bds_step [--model PATH] [--rounds 3] [--output benchmarks/results]

Equal rows: 8 alignment and 8 user rows of 96 tokens, the last 24 supervised; every way on the same
model and adapter in turn, medians over the rounds. Mixed rows: 64 of each set in batches of 8 and
8, user rows lognormal between 24 and 256 tokens, alignment rows shorter, as refusals are, 10 to
40 % of each supervised; one pass, the two loops in turn step by step. The product's loop has
batches by length, one forward pass for both sets (two where that saves padding) and the vocabulary
projected at answers only; the straightforward one has random batches, a pass for each set and full
logits.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.measure import (
    BYTES,
    RESULTS,
    Result,
    answer,
    cpu_seconds,
    in_fresh_process,
    median_cpu_seconds,
    one_thread,
    peak_bytes,
    print_raw,
    publish,
    result,
)
from benchmarks.steps import Steps
from benchmarks.workload import equal_rows, mixed_rows, multiplications
from defenses.method import RowFeatures
from jobspec.defense import MixOptions, SchedulerOptions
from workers.pipeline.forward import length_groups
from workers.pipeline.rows import TokenRow
from workers.pipeline.scoring import row_losses
from workers.pipeline.stream import RowStream

BATCH = 8
TOKENS = 96
SUPERVISED = 24
TRAINING_ROWS = 1000
EMBEDDING_WIDTH = 384
MIXED_ROWS = 64
MEMORY_STEPS = 2
MEASURED_MEMORY = ("own loss, 8 rows", "own loss, 16 rows", "mixing", "bds")


def equal_ways(steps: Steps) -> dict[str, Callable[[], object]]:
    """Every way to take a step on the equal rows."""
    vocabulary = steps.model.config.vocab_size
    rows = equal_rows(2 * BATCH, 0, tokens=TOKENS, supervised=SUPERVISED, vocabulary=vocabulary)
    alignment, user = rows[:BATCH], rows[BATCH:]
    ids = list(range(0, TRAINING_ROWS, TRAINING_ROWS // BATCH))[:BATCH]
    embedded = RowFeatures(
        "benchmark",
        embeddings_ND=torch.randn(
            TRAINING_ROWS, EMBEDDING_WIDTH, generator=torch.Generator().manual_seed(0)
        ),
    )
    tokens = RowFeatures("benchmark", tokens=[list(rows[i % len(rows)].ids) for i in range(1000)])
    neural = SchedulerOptions(form="neural", scorer="embedding")
    methods = {
        "mixing": steps.method(MixOptions()),
        "bds": steps.method(SchedulerOptions()),
        "bds, embeddings": steps.method(neural, embedded),
        "bds, tokens": steps.method(neural.model_copy(update={"scorer": "tokens"}), tokens),
    }
    ways: dict[str, Callable[[], object]] = {
        "own loss, 8 rows": lambda: steps.own_loss(user),
        "own loss, 16 rows": lambda: steps.own_loss(rows),
        "re-scoring, 8 rows": lambda: row_losses(steps.model, user, BATCH, lambda: False),
    }
    for name, method in methods.items():
        ways[name] = lambda method=method: steps.tune(method, alignment, user, ids)  # type: ignore[misc]
    return ways


def mixed_pass(steps: Steps, row_count: int) -> dict[str, float]:
    """CPU seconds and padded tokens of one pass over the mixed rows, for both loops."""
    vocabulary = steps.model.config.vocab_size
    user = mixed_rows(row_count, 3, vocabulary=vocabulary)
    alignment = mixed_rows(
        row_count, 4, shortest=20, longest=128, median=40.0, spread=0.4, vocabulary=vocabulary
    )
    plain_user = RowStream("user", row_count, BATCH, 0)
    plain_alignment = RowStream("alignment", row_count, BATCH, 0)
    by_length = RowStream("user", row_count, BATCH, 0, lengths=_lengths(user))
    follower = RowStream(
        "alignment",
        row_count,
        BATCH,
        0,
        lengths=_lengths(alignment),
        leader=lambda _epoch, step: by_length.longest(*divmod(step, by_length.batches)),
    )
    here, there = steps.method(SchedulerOptions()), steps.method(SchedulerOptions())
    found = dict.fromkeys(
        ("product", "straightforward", "product tokens", "straightforward tokens"), 0.0
    )
    for step in range(by_length.batches):
        ids, other = by_length.batch(0, step), follower.batch(0, step)
        own, trusted = [user[i] for i in ids], [alignment[i] for i in other]
        found["product"] += cpu_seconds(lambda: steps.tune(here, trusted, own, ids))  # noqa: B023
        found["product tokens"] += _padded(
            *(
                [[*trusted, *own][i] for i in group]
                for group in length_groups(_lengths([*trusted, *own]))
            )
        )
        ids, other = plain_user.batch(0, step), plain_alignment.batch(0, step)
        own, trusted = [user[i] for i in ids], [alignment[i] for i in other]
        found["straightforward"] += cpu_seconds(
            lambda: steps.straightforward(there, trusted, own, ids)  # noqa: B023
        )
        found["straightforward tokens"] += _padded(trusted, own)
    rows = [*user, *alignment]
    found["real tokens"] = float(sum(_lengths(rows)))
    found["limit"] = multiplications(
        steps.model, found["straightforward tokens"], found["straightforward tokens"]
    ) / multiplications(steps.model, found["real tokens"], sum(row.trained_tokens for row in rows))
    return found


def run(
    output_dir: Path,
    model_path: str | None = None,
    rounds: int = 3,
    mixed_row_count: int = MIXED_ROWS,
) -> list[Result]:
    """Measures, prints and writes output_dir/bds_step.json; returns what it wrote."""
    model_argument = ["--model", model_path] if model_path else []
    memory = {
        way: in_fresh_process("benchmarks.bds_step", "--peak-memory", way, *model_argument)["peak"]
        for way in MEASURED_MEMORY
    }
    with one_thread():
        steps = Steps(model_path, TRAINING_ROWS)
        ways = equal_ways(steps)
        seconds = median_cpu_seconds(
            {name: way for name, way in ways.items() if name != "own loss, 16 rows"}, rounds
        )
        mixed = mixed_pass(steps, mixed_row_count)
    share = multiplications(steps.model, TOKENS, SUPERVISED) / multiplications(
        steps.model, TOKENS, TOKENS
    )
    results = [
        result(
            "bds step / alignment mixing without weights",
            seconds["bds"] / seconds["mixing"],
            1.10,
            "1.0: the scheduler is vector work over N logits",
        ),
        result(
            "bds step and its share of re-scoring / alignment mixing without weights",
            (seconds["bds"] + seconds["re-scoring, 8 rows"]) / seconds["mixing"],
            None,
            "1.25: once an epoch each user row goes forward only, beside 2b rows both ways",
        ),
        result(
            "neural bds step, cached embeddings / scalar bds step",
            seconds["bds, embeddings"] / seconds["bds"],
            1.25,
            "1.0: two passes of a small head over b rows",
        ),
        result(
            "neural bds step, small token scorer / scalar bds step",
            seconds["bds, tokens"] / seconds["bds"],
            1.25,
            "1.0: two passes of a small network over b rows",
        ),
        result(
            "bds rows/s / rows/s of the straightforward loop, mixed lengths",
            mixed["straightforward"] / mixed["product"],
            1.5,
            f"{mixed['limit']:.2f}: no padding at all, vocabulary projected at answers only",
            better="higher",
        ),
        result(
            "padded tokens of bds batches / of the straightforward loop's",
            mixed["product tokens"] / mixed["straightforward tokens"],
            None,
            f"{mixed['real tokens'] / mixed['straightforward tokens']:.2f}: no padding at all",
            unit="tokens/tokens",
        ),
        result(
            "bds step / plain LoRA step on the user rows alone",
            seconds["bds"] / seconds["own loss, 8 rows"],
            2.1,
            f"2.0: twice the rows ({2 * share:.2f} with the vocabulary projected on "
            f"{SUPERVISED} of {TOKENS} positions)",
        ),
        result(
            "peak memory of bds, 8+8 rows / of plain LoRA, 16 rows",
            memory["bds"] / memory["own loss, 16 rows"],
            1.15,
            "below 1.0: no full logits, the rest is the same",
            unit=BYTES,
        ),
        result(
            "peak memory of bds, 8+8 rows / of mixing without weights",
            memory["bds"] / memory["mixing"],
            1.15,
            "1.0: N logits and their moments",
            unit=BYTES,
        ),
        result(
            "peak memory of bds, 8+8 rows / of plain LoRA, 8 rows",
            memory["bds"] / memory["own loss, 8 rows"],
            None,
            "1.0 where weights outweigh activations, 2.0 where activations do: twice the rows",
            unit=BYTES,
        ),
    ]
    publish(output_dir, "bds_step", results)
    print_raw(seconds, "CPU s/step")
    print_raw(mixed, "CPU s, tokens, ratio")
    print_raw(memory, "MB peak", 1e-6)
    return results


def _lengths(rows: Sequence[TokenRow]) -> list[int]:
    return [len(row.ids) for row in rows]


def _padded(*groups: Sequence[TokenRow]) -> float:
    return float(sum(len(rows) * max(_lengths(rows)) for rows in groups))


def _peak_memory(way: str, model_path: str | None) -> float:
    steps = Steps(model_path, TRAINING_ROWS)
    take = equal_ways(steps)[way]
    for _ in range(MEMORY_STEPS):
        take()
    return float(peak_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder of a causal model; default: random SmolLM2-135M")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixed-rows", type=int, default=MIXED_ROWS)
    parser.add_argument("--peak-memory", choices=MEASURED_MEMORY, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_memory:
        answer({"peak": _peak_memory(arguments.peak_memory, arguments.model)})
    else:
        run(arguments.output, arguments.model, arguments.rounds, arguments.mixed_rows)


if __name__ == "__main__":
    main()
