"""Plain tuning: this project's loop beside the trainers of transformers and TRL.

    python -m benchmarks.trainers [--model PATH] [--rounds 2] [--output benchmarks/results]

The same rows (mixed lengths, answers masked in), model, float32, batch size, LoRA, AdamW at a
constant rate, clipping and one thread; each run in a process of its own, in turn. Only the call
that trains is timed: building the model, imports and tokens come before it. The others' logging,
saving, evaluation and gradient checkpointing are off; this loop writes its metrics of every step
and its checkpoint. Peak memory is of the whole process.

TRL scores every position on a CPU and only the answer's on a GPU, where its ratio would be nearer
to 1; transformers projects all positions on both. `grouped` is transformers with its own sampler
by length, for information.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    BYTES,
    RESULTS,
    Result,
    answer,
    cpu_seconds,
    in_fresh_process,
    one_thread,
    peak_bytes,
    print_raw,
    publish,
    result,
)
from benchmarks.workload import adapted_model, mixed_rows, multiplications
from workers.pipeline.rows import TokenRow

ROWS = 48
BATCH = 8
RATE = 1e-4
SEED = 3
TRAINERS = ("tunegate", "transformers", "trl", "grouped")


def train_here(model: Any, rows: Sequence[TokenRow], folder: Path) -> float:
    """CPU seconds of one epoch of the product's own plain tuning."""
    from jobspec.catalogue import LoraDefaults
    from jobspec.defense import CanaryOptions, DefenseOptions, PerturbationOptions, PlainOptions
    from jobspec.hyperparameters import ResolvedHyperparameters
    from jobspec.spec import CheckpointOptions
    from workers.pipeline.emit import JsonLines
    from workers.pipeline.tune import TuneData, TuneSettings, tune

    settings = TuneSettings(
        hyperparameters=ResolvedHyperparameters(
            n_epochs=1, batch_size=BATCH, learning_rate_multiplier=1.0
        ),
        lora=LoraDefaults(learning_rate=RATE),
        defense=DefenseOptions(
            scheduler=PlainOptions(),
            perturbation=PerturbationOptions(mode="none"),
            canaries=CanaryOptions(count=0),
        ),
        checkpoints=CheckpointOptions(),
        seed=SEED,
        key="benchmark",
    )
    data = TuneData(user=rows, validation=(), alignment=(), harmful=())
    with (folder / "events.jsonl").open("w") as events:
        emit = JsonLines(events)
        return cpu_seconds(lambda: tune(model, data, settings, folder, emit, lambda: False))


def train_there(name: str, model: Any, rows: Sequence[TokenRow], folder: Path) -> float:
    """CPU seconds of one epoch of another library's trainer."""
    examples = [{"input_ids": list(row.ids), "labels": list(row.labels)} for row in rows]
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "report_to": [],
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "seed": SEED,
    }
    if name == "trl":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        trainer: Any = SFTTrainer(
            model,
            SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True}),
            train_dataset=Dataset.from_list(examples),
            processing_class=_pad_token(),
        )
    else:
        from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

        strategy = "group_by_length" if name == "grouped" else "random"
        trainer = Trainer(
            model,
            TrainingArguments(**common, train_sampling_strategy=strategy),
            data_collator=DataCollatorForSeq2Seq(_pad_token(), padding=True),
            train_dataset=examples,
        )
    return cpu_seconds(trainer.train)


def _pad_token() -> Any:
    """A tokenizer that only pads: the rows have their tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<pad>", padding_side="right"
    )


def _measure(name: str, model_path: str | None, row_count: int) -> dict[str, float]:
    rows = mixed_rows(row_count, SEED)
    model = adapted_model(model_path)
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        if name == "tunegate":
            seconds = train_here(model, rows, Path(folder))
        else:
            seconds = train_there(name, model, rows, Path(folder))
    projected = multiplications(model, 0, sum(len(row.ids) for row in rows))
    real = multiplications(model, sum(len(row.ids) for row in rows), 0)
    least = real + multiplications(model, 0, sum(row.trained_tokens for row in rows))
    return {
        "seconds": seconds,
        "peak": float(peak_bytes()),
        "least": least,
        "unpadded": real + projected,
    }


def run(
    output_dir: Path, model_path: str | None = None, rounds: int = 2, row_count: int = ROWS
) -> list[Result]:
    """Measures, prints and writes output_dir/trainers.json; returns what it wrote."""
    names = [name for name in TRAINERS if name != "trl" or find_spec("trl") is not None]
    if "trl" not in names:
        print("trl is not installed (pip install trl datasets); its ratios are left out")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, values in found.items():
            arguments = ["--train", name, "--rows", str(row_count)]
            if model_path:
                arguments += ["--model", model_path]
            values.append(in_fresh_process("benchmarks.trainers", *arguments))
    seconds = {n: statistics.median(v["seconds"] for v in values) for n, values in found.items()}
    peak = {n: statistics.median(v["peak"] for v in values) for n, values in found.items()}
    one = found["tunegate"][0]
    limit = (
        f"no padding at all, answers projected only: {one['unpadded'] / one['least']:.2f} from the "
        "projection, times the other's padded over its real tokens"
    )
    results = []
    for name in names[1:]:
        target = None if name == "grouped" else 1.2
        title = "transformers, rows grouped by length" if name == "grouped" else name
        results.append(
            result(
                f"rows/s of plain tuning / of {title}",
                seconds[name] / seconds["tunegate"],
                target,
                limit,
                better="higher",
            )
        )
        results.append(
            result(
                f"peak memory of plain tuning / of {title}",
                peak["tunegate"] / peak[name],
                None if target is None else 1.0,
                "weights and activations are the same; only the logits can differ",
                unit=BYTES,
            )
        )
    publish(output_dir, "trainers", results)
    print_raw({name: row_count / value for name, value in seconds.items()}, "rows/CPU s")
    print_raw(peak, "MB peak", 1e-6)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder of a causal model; default: random SmolLM2-135M")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--train", choices=TRAINERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        answer(_measure(arguments.train, arguments.model, arguments.rows))
    else:
        run(arguments.output, arguments.model, arguments.rounds, arguments.rows)


if __name__ == "__main__":
    main()
