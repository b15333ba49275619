"""One attempt of one job: validate, tune, perturb, evaluate, gate, publish.

Reads top to bottom. Everything it leaves lies in the work folder; a later attempt with the same
folder continues after the last thing that was complete.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from defenses.losses import response_nll_B
from defenses.panacea.perturbation import apply_perturbation
from evaluators.gate.policy import Policy, default_policy
from evaluators.gate.verdict import decide
from evaluators.harmfulness.scorer import EmbeddedScorer
from jobspec.hyperparameters import ResolvedHyperparameters, resolve
from jobspec.spec import JobSpec
from workers.pipeline.emit import Emit
from workers.pipeline.evaluate import (
    baseline,
    measure,
    metrics_of,
    plan_evaluation,
)
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.models import LoadedModel, attach_adapter, load_base, trainable
from workers.pipeline.perturb import perturb
from workers.pipeline.publish import (
    publish,
    save_adapter,
    save_perturbation,
    weight_table,
)
from workers.pipeline.report import SUMMARY, Facts, build_report
from workers.pipeline.rows import collate
from workers.pipeline.sections import Sections
from workers.pipeline.trusted import alignment_rows, harmful_rows
from workers.pipeline.tune import TuneData, TuneSettings, total_steps, tune
from workers.pipeline.validate import Dataset, load_dataset, overlap


class Stages:
    """Announces stages and keeps how long each took."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._emit("stage", stage=name)
        with self.timed(name):
            yield

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Keep how long a part took, without announcing it as a stage."""
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
    policy = _policy(spec)
    stages = Stages(emit)

    with stages.stage("validating"):
        base = load_base(spec.model, spec.cache_dir)
        _check_stop(stop)
        training, validation, data_report = _load_data(spec, base)
        hyper = resolve(spec.hyperparameters, len(training.rows), spec.model.lora.batch_size)
        data = TuneData(
            user=training.rows,
            validation=[] if validation is None else validation.rows,
            alignment=alignment_rows(spec, base, len(training.rows), hyper),
            harmful=harmful_rows(spec, base),
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
        steps = total_steps(len(data.user), hyper)
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

    with stages.stage("perturbing"):
        perturbed = perturb(
            model,
            tuned,
            data.harmful,
            spec.defense.perturbation,
            policy,
            plan,
            scorer,
            base,
            spec.model.lora.alpha / spec.model.lora.rank,
            work / "evaluation",
            spec.cache_dir / "baselines",
            emit,
            stop,
        )

    with stages.stage("evaluating"):
        with stages.timed("evaluating_base"):
            reference = baseline(
                model, base, scorer, plan, spec.cache_dir / "baselines", emit, stop
            )
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
                Sections(work / "evaluation" / plan.key(adapter_sha256, scorer)),
                "tuned model",
                emit,
                stop,
            )
        metrics = metrics_of(measured, reference, plan, scorer)
        base_metrics = metrics_of(reference, reference, plan, scorer)

    with stages.stage("gating"):
        decision = decide(policy, metrics)
        base_decision = decide(policy, base_metrics)

    with stages.stage("publishing"):
        report = build_report(
            Facts(
                spec, base, scorer, plan, data, data_report, hyper, steps, tuned, perturbed,
                metrics, base_metrics, decision, base_decision, adapter_sha256, stages.seconds,
            )
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
        report={key: report[key] for key in SUMMARY},
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
        max_line_bytes=spec.max_line_bytes,
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
        max_line_bytes=spec.max_line_bytes,
        min_rows=1,
    )
    report["validation_file"] = validation.report | overlap(training.chat, validation.chat)
    return training, validation, report


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


def _policy(spec: JobSpec) -> Policy:
    if spec.policy is None:
        return default_policy()
    try:
        return Policy.model_validate(spec.policy)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PipelineFailure(
            "invalid_spec", f"The gate policy is not valid: {where}: {first['msg']}."
        ) from error


def _check_stop(stop: Callable[[], bool]) -> None:
    if stop():
        raise Stopped
