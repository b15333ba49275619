"""One attempt of one job: validate, tune, perturb, evaluate, gate, publish.

Reads top to bottom. Everything it leaves lies in the work folder; a later attempt with the same
folder continues after the last thing that was complete.
"""

import hashlib
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from defenses.bds.ranking import ranked_rows
from defenses.losses import response_nll_B
from defenses.panacea.perturbation import apply_perturbation
from evaluators.gate.policy import Policy, default_policy
from evaluators.gate.verdict import GateDecision, decide
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.metric import Metric
from jobspec.hyperparameters import ResolvedHyperparameters, resolve
from jobspec.spec import JobSpec
from workers.pipeline.align import packaged, read_pairs
from workers.pipeline.emit import Emit
from workers.pipeline.evaluate import (
    EvaluationPlan,
    Measurement,
    measure,
    metrics_of,
    plan_evaluation,
)
from workers.pipeline.failure import Stopped
from workers.pipeline.models import LoadedModel, attach_adapter, load_base, trainable
from workers.pipeline.perturb import Perturbed, perturb
from workers.pipeline.publish import (
    publish,
    save_adapter,
    save_perturbation,
    weight_table,
)
from workers.pipeline.rows import TokenRow, collate
from workers.pipeline.sections import Sections
from workers.pipeline.tune import Tuned, TuneData, TuneSettings, steps_per_epoch, tune
from workers.pipeline.validate import Dataset, load_dataset, overlap

DISTRUSTED_ROWS = 10
REPORT_VERSION = 1


class Stages:
    """Announces stages and keeps how long each took."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._emit("stage", stage=name)
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 3)


def run_job(spec: JobSpec, work: Path, emit: Emit, stop: Callable[[], bool]) -> dict[str, Any]:
    """Run a job to its verdict; returns the report, which is also in the bundle.

    Raises PipelineFailure (a reason for the tenant) and Stopped (`stop()` turned true).
    """
    work.mkdir(parents=True, exist_ok=True)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    policy = default_policy() if spec.policy is None else Policy.model_validate(spec.policy)
    stages = Stages(emit)

    with stages.stage("validating"):
        base = load_base(spec.model, spec.cache_dir)
        training, validation, data_report = _load_data(spec, base)
        hyper = resolve(spec.hyperparameters, len(training.rows), spec.model.lora.batch_size)
        data = TuneData(
            user=training.rows,
            validation=[] if validation is None else validation.rows,
            alignment=_alignment_rows(spec, base, len(training.rows), hyper),
            harmful=_harmful_rows(spec, base),
        )
        held_out = training if validation is None else validation
        plan = plan_evaluation(
            spec.evaluation,
            base.tokenizer,
            held_out.chat,
            held_out.rows,
            held_out=validation is not None,
            seed=spec.seed,
        )
        scorer = EmbeddedScorer.load()
        model = attach_adapter(base.model, spec.model.lora, spec.seed)
        steps = hyper.n_epochs * steps_per_epoch(
            len(data.user), len(data.alignment), hyper.batch_size
        )
        emit(
            "validated",
            hyperparameters=hyper.model_dump(),
            report=data_report,
            total_steps=steps,
            estimate=_estimate(model, data, hyper, steps, spec),
        )
    _check_stop(stop)

    with stages.stage("tuning"):
        settings = TuneSettings(
            hyperparameters=hyper,
            lora=spec.model.lora,
            defense=spec.defense,
            checkpoints=spec.checkpoints,
            seed=spec.seed,
            key=_run_key(spec, base.fingerprint, data, hyper),
        )
        tuned = tune(model, data, settings, work, emit, stop)

    sections = Sections(work / "evaluation" / settings.key[:16])
    with stages.stage("perturbing"):
        perturbed = perturb(
            model,
            base.tokenizer,
            tuned,
            data.harmful,
            spec.defense.perturbation,
            policy,
            plan,
            scorer,
            spec.model.lora.alpha / spec.model.lora.rank,
            sections,
            emit,
            stop,
        )

    with stages.stage("evaluating"):
        reference = _baseline(spec, model, base, scorer, plan, emit, stop)
        folder = work / "perturbation"
        if perturbed is not None:
            save_perturbation(model, perturbed.eps, perturbed.scale, folder)
        with apply_perturbation(
            trainable(model),
            {} if perturbed is None else perturbed.eps,
            0.0 if perturbed is None else perturbed.scale,
        ):
            adapter_sha256 = save_adapter(model, spec.model.name, work / "adapter")
            measured = measure(
                model,
                base.tokenizer,
                scorer,
                plan,
                Sections(sections.folder / adapter_sha256[:16]),
                "tuned model",
                emit,
                stop,
            )
        metrics = metrics_of(measured, reference, plan, scorer)
        base_metrics = metrics_of(reference, None, plan, scorer)

    with stages.stage("gating"):
        decision = decide(policy, metrics)

    with stages.stage("publishing"):
        report = _report(
            spec, base, scorer, plan, data, data_report, hyper, steps, tuned, perturbed,
            metrics, base_metrics, decision, adapter_sha256, stages.seconds,
        )  # fmt: skip
        publish(
            work / "bundle",
            work / "adapter",
            adapter_sha256,
            base.tokenizer,
            report,
            weight_table(tuned, training.rows),
            {"base": reference.samples, "tuned": measured.samples},
            None if perturbed is None else folder,
        )
    emit(
        "result",
        verdict=decision.verdict,
        bundle=str(work / "bundle"),
        trained_tokens=tuned.trained_tokens,
        report={
            key: report[key] for key in ("metrics", "base_metrics", "gate", "defense", "timings")
        },
    )
    return report


def _load_data(spec: JobSpec, base: LoadedModel) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    context = getattr(base.model.config, "max_position_embeddings", None)
    limit = spec.max_length or spec.model.lora.max_length
    max_length = min(limit, context) if isinstance(context, int) else limit
    training = load_dataset(
        spec.training_file,
        base.tokenizer,
        max_length,
        param="training_file",
        truncate=spec.truncate,
    )
    report: dict[str, Any] = {"max_length": max_length, "training_file": training.report}
    if spec.validation_file is None:
        return training, None, report
    validation = load_dataset(
        spec.validation_file,
        base.tokenizer,
        max_length,
        param="validation_file",
        truncate=spec.truncate,
        min_rows=1,
    )
    report["validation_file"] = validation.report | overlap(training.chat, validation.chat)
    return training, validation, report


def _alignment_rows(
    spec: JobSpec, base: LoadedModel, user_rows: int, hyper: ResolvedHyperparameters
) -> list[TokenRow]:
    """D_safe: M rows of the shipped alignment set, half refusals, half harmless answers.

    M = min(max(N, 50 batches), the option's cap), so that a small file does not get a defense of
    a handful of rows, nor a large one an epoch that is longer than its own.
    """
    options = spec.defense.scheduler
    if options.name == "none":
        return []
    wanted = min(max(user_rows, 50 * hyper.batch_size), options.alignment_rows)
    limit = spec.model.lora.max_length
    refusals = read_pairs(packaged("alignment_refusals.jsonl"), base.tokenizer, limit)
    harmless = read_pairs(packaged("alignment_harmless.jsonl"), base.tokenizer, limit)
    mixed = [row for pair in zip(_shuffled(refusals, spec.seed), _shuffled(harmless, spec.seed),
                                 strict=False) for row in pair]  # fmt: skip
    return mixed[:wanted]


def _harmful_rows(spec: JobSpec, base: LoadedModel) -> list[TokenRow]:
    """D_h of the perturbation: requests with empty compliant answers, never shown to tenants."""
    if spec.defense.perturbation.mode == "none":
        return []
    limit = spec.model.lora.max_length
    return read_pairs(packaged("harmful_compliances.jsonl"), base.tokenizer, limit)


def _shuffled(rows: list[TokenRow], seed: int) -> list[TokenRow]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return [rows[index] for index in order]


def _baseline(
    spec: JobSpec,
    model: Any,
    base: LoadedModel,
    scorer: EmbeddedScorer,
    plan: EvaluationPlan,
    emit: Emit,
    stop: Callable[[], bool],
) -> Measurement:
    """The base model's measurement, from the cache where an equal one was made before."""
    sections = Sections(spec.cache_dir / "baselines" / plan.key(base.fingerprint, scorer))
    with model.disable_adapter():
        return measure(model, base.tokenizer, scorer, plan, sections, "base model", emit, stop)


def _estimate(
    model: Any,
    data: TuneData,
    hyper: ResolvedHyperparameters,
    steps: int,
    spec: JobSpec,
) -> dict[str, Any]:
    """Seconds of tuning, from one measured forward and backward pass that changes nothing."""
    rows = [*data.alignment[: hyper.batch_size], *data.user[: hyper.batch_size]]
    batch = collate(rows, next(model.parameters()).device)
    started = time.monotonic()
    loss = response_nll_B(model, *batch).mean()
    torch.autograd.grad(loss, list(trainable(model).values()))
    step = time.monotonic() - started
    passes = 2.5 if spec.defense.perturbation.mode == "joint" else 1.0
    return {
        "tuning_seconds": round(step * passes * steps, 1),
        "seconds_per_step": round(step * passes, 3),
    }


def _run_key(
    spec: JobSpec, fingerprint: str, data: TuneData, hyper: ResolvedHyperparameters
) -> str:
    """What a checkpoint must agree with to be resumed."""
    digest = hashlib.sha256(fingerprint.encode())
    digest.update(spec.model.lora.model_dump_json().encode())
    digest.update(spec.defense.model_dump_json().encode())
    digest.update(hyper.model_dump_json().encode())
    digest.update(str(spec.seed).encode())
    for rows in data:
        for row in rows:
            digest.update(str((row.ids, row.labels)).encode())
    return digest.hexdigest()


def _report(
    spec: JobSpec,
    base: LoadedModel,
    scorer: EmbeddedScorer,
    plan: EvaluationPlan,
    data: TuneData,
    data_report: dict[str, Any],
    hyper: ResolvedHyperparameters,
    steps: int,
    tuned: Tuned,
    perturbed: Perturbed | None,
    metrics: dict[str, Metric],
    base_metrics: dict[str, Metric],
    decision: GateDecision,
    adapter_sha256: str,
    seconds: dict[str, float],
) -> dict[str, Any]:
    return {
        "version": REPORT_VERSION,
        "job_id": spec.job_id,
        "seed": spec.seed,
        "model": {"name": spec.model.name, "fingerprint": base.fingerprint},
        "data": data_report,
        "hyperparameters": hyper.model_dump(),
        "steps": steps,
        "trained_tokens": tuned.trained_tokens,
        "skipped_steps": tuned.counters.get("skipped_steps", 0),
        "defense": {
            "scheduler": _scheduler_report(spec, tuned, data),
            "perturbation": {"mode": "none"} if perturbed is None else perturbed.report,
        },
        "metrics": {name: metric.model_dump(mode="json") for name, metric in metrics.items()},
        "base_metrics": {
            name: metric.model_dump(mode="json") for name, metric in base_metrics.items()
        },
        "gate": decision.model_dump(mode="json"),
        "evaluation": {
            "scorer": {
                "id": scorer.id,
                "version": scorer.version,
                "threshold": scorer.threshold,
                "coefficients_sha256": scorer.coefficients_sha256,
            },
            "embedder": scorer.embedder.id,
            "prompt_sets": dict(plan.prompt_sets),
            "utility": {
                "kind": plan.utility.kind,
                "source": plan.utility.source,
                "rows": len(plan.utility.rows),
            },
            "options": plan.options.model_dump(mode="json"),
        },
        "artifact": {"adapter_sha256": adapter_sha256},
        "timings": dict(seconds),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
    }


def _scheduler_report(spec: JobSpec, tuned: Tuned, data: TuneData) -> dict[str, Any]:
    options = spec.defense.scheduler
    if tuned.scheduler is None:
        return {"name": "none"}
    ranked = ranked_rows(tuned.scheduler.all_weights())
    return {
        "name": options.name,
        "transform": options.transform,
        "learning_rate": options.learning_rate,
        "alignment_coefficient": options.alignment_coefficient,
        "alignment_rows": len(data.alignment),
        "effective_sample_size": tuned.scheduler.effective_sample_size(),
        "distrusted": [
            {"line": data.user[row.row_id].line, "rank": row.rank, "weight": row.weight}
            for row in ranked[:DISTRUSTED_ROWS]
        ],
    }


def _check_stop(stop: Callable[[], bool]) -> None:
    if stop():
        raise Stopped
