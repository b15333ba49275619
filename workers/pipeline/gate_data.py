"""The rows of a gate run: what the model was tuned on and what was held out, where they are given.

They are only measured on, so a row that is too long is cut and none is refused for its length.
"""

from pathlib import Path
from typing import Any, NamedTuple

from jobspec.catalogue import BaseModelEntry
from jobspec.formats import detect_format
from jobspec.gate_run import GateRunSpec
from workers.pipeline.evaluate import EvaluationPlan, plan_evaluation
from workers.pipeline.validate import Dataset, load_dataset, load_preferences, overlap


class GateData(NamedTuple):
    """The plan for one model, the tokenizer that it was made with, and counts of the rows."""

    plan: EvaluationPlan
    tokenizer: Any
    report: dict[str, Any]


def read_data(spec: GateRunSpec, entry: BaseModelEntry, tokenizer: Any) -> GateData:
    """Read the files and plan the evaluation. Raises PipelineFailure naming the faulty lines."""
    limit = entry.lora.max_length
    longest = getattr(tokenizer, "model_max_length", None)
    max_length = min(limit, longest) if isinstance(longest, int) else limit
    report: dict[str, Any] = {"max_length": max_length}
    training = validation = None
    if spec.training_file is not None:
        training = _load(spec, spec.training_file, "training_file", tokenizer, max_length)
        report["training_file"] = training.report
    if spec.validation_file is not None:
        validation = _load(spec, spec.validation_file, "validation_file", tokenizer, max_length)
        report["validation_file"] = validation.report
        if training is not None:
            report["validation_file"] |= overlap(training.chat, validation.chat)
    rows = validation or training
    plan = plan_evaluation(
        spec.evaluation,
        tokenizer,
        () if rows is None else rows.chat,
        () if rows is None else rows.rows,
        held_out=validation is not None,
        seed=spec.seed,
        training=() if training is None else training.chat,
    )
    return GateData(plan, tokenizer, report)


def _load(spec: GateRunSpec, path: Path, param: str, tokenizer: Any, max_length: int) -> Dataset:
    preferences = detect_format(path, max_line_bytes=spec.max_line_bytes) == "preference"
    load = load_preferences if preferences else load_dataset
    return load(
        path,
        tokenizer,
        max_length,
        param=param,
        truncate=True,
        max_line_bytes=spec.max_line_bytes,
        min_rows=1,
    )
