"""Gradient scores of rows beside a loop of autograd over rows and beside dattri-llm, in one run.

    python -m benchmarks.attribution [--model PATH] [--rounds 2] [--output benchmarks/results]

A LoRA adapter on SmolLM2-135M's shape, 16 rows of one length whose last third is supervised, two
targets; every way gives all inner products of rows and targets, gradients of the targets counted.
CPU seconds, one thread, all ways in turn. dattri-llm has the same batches and the same loss at the
supervised tokens alone. Equal scores are checked: a cosine with the loop's below 0.99999 is an
error. Peak memory is of fresh processes, with twice the rows beside it.

What a batch can save on one core falls with the rows' length: hooks cost hardly more than the plain
forward and backward pass of the batch, the loop does the same multiplications, and a matrix product
of 24 tokens already runs at four fifths of the speed of one of 288. A single row's cost above that
is reading the weights twice.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analyses.attribution.ekfac import RowDataset, attributor
from analyses.attribution.gradients import (
    completion_losses,
    lora_blocks,
    pass_over_rows,
    stacked_gradients,
)
from analyses.attribution.rows import IGNORED, EncodedRow, collate
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
from benchmarks.workload import CPU, adapted_model

ROWS, TARGETS, BATCH = 16, 2, 16
LENGTHS, USUAL = (12, 24, 48), 24
EQUAL = 0.99999


def random_rows(count: int, length: int, vocabulary: int, seed: int) -> list[EncodedRow]:
    """Rows of random tokens, the last third supervised."""
    generator = torch.Generator().manual_seed(seed)
    silent = length - length // 3
    rows = []
    for number in range(count):
        ids = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        labels = [IGNORED] * silent + ids[silent:]
        rows.append(EncodedRow(number + 1, tuple(ids), tuple(labels)))
    return rows


class Ways:
    """One model; each way returns the inner products, [targets, rows]."""

    def __init__(self, model_path: str | None) -> None:
        self.model: Any = adapted_model(model_path).eval()
        self.blocks = lora_blocks(self.model)
        # A fresh adapter's B is zero, and then so is every gradient of A.
        generator = torch.Generator().manual_seed(0)
        for block in self.blocks:
            block.weight.data.normal_(std=0.02, generator=generator)
        self.take(ROWS, USUAL)

    def take(self, count: int, length: int) -> None:
        """The rows and targets that the ways work on from now."""
        vocabulary = self.model.config.vocab_size
        self.rows = random_rows(count, length, vocabulary, 1)
        self.targets = random_rows(TARGETS, length, vocabulary, 2)

    def hooks(self) -> Tensor:
        queries, _ = stacked_gradients(self.model, self.blocks, self.targets, BATCH)
        return pass_over_rows(self.model, self.blocks, self.rows, queries, batch_size=BATCH).dots_DN

    def loop(self) -> Tensor:
        """What one writes without hooks: a backward pass a row, with transformers' own loss."""
        queries = torch.stack([self._row_gradient(row) for row in self.targets])
        found = [queries @ self._row_gradient(row) for row in self.rows]
        return torch.stack(found, dim=1).double()

    def lean_loop(self) -> Tensor:
        """The same with our loss, which forms no logits outside the supervised tokens."""
        queries = torch.stack([self._row_gradient(row, lean=True) for row in self.targets])
        found = [queries @ self._row_gradient(row, lean=True) for row in self.rows]
        return torch.stack(found, dim=1).double()

    def _row_gradient(self, row: EncodedRow, *, lean: bool = False) -> Tensor:
        batch = collate([row], CPU)
        weights = [block.weight.requires_grad_(True) for block in self.blocks]
        if lean:
            loss = completion_losses(self.model, batch)[0]
        else:
            loss = self.model(
                input_ids=batch.ids_BT, attention_mask=batch.mask_BT, labels=batch.labels_BT
            ).loss
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)])

    def dattri(self) -> Tensor:
        for block in self.blocks:
            block.weight.requires_grad_(True)
        with tempfile.TemporaryDirectory() as folder:
            found = attributor("TracInAttributor", self.model, BATCH, CPU, folder).attribute(
                RowDataset(self.rows), RowDataset(self.targets)
            )
        for block in self.blocks:
            block.weight.grad = None
        scores: Tensor = found.scores.T.double()
        return scores

    def all(self) -> dict[str, Callable[[], Tensor]]:
        return {
            "hooks": self.hooks,
            "loop": self.loop,
            "lean loop": self.lean_loop,
            "dattri-llm": self.dattri,
        }


def _kept(
    ways: dict[str, Callable[[], Tensor]], scores: dict[str, Tensor]
) -> dict[str, Callable[[], None]]:
    """The same ways; what each gave last lies in scores."""

    def keep(name: str, way: Callable[[], Tensor]) -> None:
        scores[name] = way()

    return {name: partial(keep, name, way) for name, way in ways.items()}


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def run(output_dir: Path, model_path: str | None = None, rounds: int = 2) -> list[Result]:
    """Measures, prints and writes output_dir/attribution.json; returns what it wrote."""
    model_argument = ["--model", model_path] if model_path else []

    def peak(way: str, count: int) -> float:
        arguments = ["--peak-memory", way, "--rows", str(count), *model_argument]
        return in_fresh_process("benchmarks.attribution", *arguments)["peak"]

    memory = {
        "hooks": peak("hooks", ROWS),
        "hooks, twice the rows": peak("hooks", 2 * ROWS),
        "loop": peak("loop", ROWS),
        "dattri-llm": peak("dattri-llm", ROWS),
    }
    with one_thread():
        scores: dict[str, Tensor] = {}
        ways = Ways(model_path)
        ways.hooks()
        by_length: dict[int, dict[str, float]] = {}
        for length in LENGTHS:
            ways.take(ROWS, length)
            pair = {"hooks": ways.hooks, "loop": ways.loop}
            chosen = ways.all() if length == USUAL else pair
            kept = scores if length == USUAL else {}
            by_length[length] = median_cpu_seconds(_kept(chosen, kept), rounds, warm=False)
        seconds = by_length[USUAL]
        equal = {name: _cosine(scores["loop"], found) for name, found in scores.items()}
        if min(equal.values()) < EQUAL:
            raise ArithmeticError(f"the ways give other scores: {equal}")
    results = [
        *(
            result(
                f"rows/s of hooks / of a loop of autograd over rows, {length} tokens a row",
                found["loop"] / found["hooks"],
                3.0,
                "what reading the weights twice a row costs over its products, and the logits and "
                "weight gradients that are not formed",
                better="higher",
            )
            for length, found in by_length.items()
        ),
        result(
            "rows/s of hooks / of the same loop with our loss",
            seconds["lean loop"] / seconds["hooks"],
            None,
            "the batch alone",
            better="higher",
        ),
        result(
            "rows/s of hooks / of dattri-llm with our loss, equal scores",
            seconds["dattri-llm"] / seconds["hooks"],
            1.0,
            "1.0: the same forward and backward pass; ours skips the weights' own gradients",
            better="higher",
        ),
        result(
            "peak memory of hooks with twice the rows / with the rows",
            memory["hooks, twice the rows"] / memory["hooks"],
            1.05,
            "1.0: three numbers a row",
            unit=BYTES,
        ),
        result(
            "peak memory of hooks / of the loop",
            memory["hooks"] / memory["loop"],
            None,
            "activations of a batch over those of one row, on top of the model",
            unit=BYTES,
        ),
        result(
            "peak memory of hooks / of dattri-llm",
            memory["hooks"] / memory["dattri-llm"],
            1.05,
            "the same activations",
            unit=BYTES,
        ),
    ]
    publish(output_dir, "attribution", results)
    for length, found in by_length.items():
        print_raw({f"{way}, {length} tokens": value for way, value in found.items()}, "CPU s")
    print_raw(memory, "MB peak", 1e-6)
    print_raw({f"cosine of {name} with the loop": value for name, value in equal.items()}, "")
    return results


def _peak_memory(way: str, count: int, model_path: str | None) -> float:
    ways = Ways(model_path)
    ways.take(count, USUAL)
    ways.all()[way]()
    return float(peak_bytes())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder of a causal model; default: random SmolLM2-135M")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--peak-memory", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peak_memory:
        peak = _peak_memory(options.peak_memory, options.rows, options.model)
        answer({"peak": peak})
    else:
        run(options.output, options.model, options.rounds)


if __name__ == "__main__":
    main()
