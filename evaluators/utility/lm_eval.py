"""Tasks of EleutherAI's lm-evaluation-harness, where its optional extra is installed."""

import importlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from evaluators.metric import Metric

EXTRA = "tunegate[lm-eval]"


class LmEvalMissingError(ImportError):
    """The harness is not installed; the message names the extra."""


class LmEvalTaskError(ValueError):
    """A task that the harness does not know or whose data cannot be loaded."""


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    limit: int | None = None,
    *,
    batch_size: int = 8,
    seed: int = 0,
    include: Path | None = None,
    chat: bool = False,
) -> dict[str, Metric]:
    """Run harness tasks on a loaded transformers model; metrics named lm_eval.TASK.METRIC.

    `limit` takes the first documents of each task (None: all); `include` is a folder of further
    task files; `chat` asks under the tokenizer's chat template. Tasks load their data themselves,
    most from a hub: without a network only those that are cached or local work. The harness seeds
    the process's random states and puts the model in evaluation mode; both are restored.

    Raises LmEvalMissingError without the extra, LmEvalTaskError for a task that cannot be loaded,
    and ValueError for no task or a limit below 1.
    """
    if not tasks or (limit is not None and limit < 1):
        raise ValueError(f"needs a task and a limit of at least 1, got {list(tasks)} and {limit}")
    harness, adapter, manager = _harness()
    index = manager.TaskManager(include_path=None if include is None else str(include))
    unknown = sorted(set(tasks) - set(index.all_tasks))
    if unknown:
        raise LmEvalTaskError(
            f"the harness has no task {', '.join(unknown)}: `lm-eval ls tasks` lists them"
        )
    try:
        with _restored(model):
            results = harness.simple_evaluate(
                model=adapter.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
                tasks=list(tasks),
                limit=limit,
                task_manager=index,
                apply_chat_template=chat,
                log_samples=False,
                bootstrap_iters=1000,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
    except (OSError, KeyError) as error:
        raise LmEvalTaskError(
            f"a task of {', '.join(tasks)} could not be loaded or run "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
    return metrics_of_results(results)


def metrics_of_results(results: Mapping[str, Any]) -> dict[str, Metric]:
    """Metrics of the dictionary that the harness returns.

    results[TASK]["METRIC,FILTER"] is a value and "METRIC_stderr,FILTER" its standard error s; the
    interval is value +- 1.96 s, absent without s. n is the number of documents. A filter other than
    "none" is part of the name. Entries that are no finite number, and the harness's own count of
    documents, are left out.
    """
    z = NormalDist().inv_cdf(0.975)
    counts = results.get("n-samples", {})
    metrics: dict[str, Metric] = {}
    for task, values in results.get("results", {}).items():
        n = int(counts.get(task, {}).get("effective", 0))
        for key, value in values.items():
            name, _, kind = key.partition(",")
            if name == "sample_len" or name.endswith("_stderr") or not _is_number(value):
                continue
            error = values.get(f"{name}_stderr,{kind}")
            bounded = _is_number(error)
            suffix = "" if kind in ("", "none") else f".{kind}"
            metrics[f"lm_eval.{task}.{name}{suffix}"] = Metric(
                value=float(value),
                n=n,
                low=float(value) - z * float(error) if bounded else None,
                high=float(value) + z * float(error) if bounded else None,
                note="normal interval from the harness's standard error" if bounded else None,
            )
    return metrics


def _harness() -> tuple[Any, Any, Any]:
    try:
        return (
            importlib.import_module("lm_eval"),
            importlib.import_module("lm_eval.models.huggingface"),
            importlib.import_module("lm_eval.tasks"),
        )
    except ImportError as error:
        raise LmEvalMissingError(
            "lm-evaluation-harness is not installed with what it needs: pip install "
            f"'{EXTRA}' ({error})"
        ) from error


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    import torch

    training = [module for module in model.modules() if module.training]
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        model.eval()
        for module in training:
            module.training = True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
