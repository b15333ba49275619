"""One attempt of one job: validate, tune, perturb, evaluate, gate, publish.

Reads top to bottom. Everything it leaves lies in the work folder; a later attempt with the same
folder continues after the last thing that was complete.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from defenses.bds.canaries import CanaryCheck
from defenses.panacea.perturbation import apply_perturbation
from evaluators.gate.shortfall import suite_shortfalls
from evaluators.gate.verdict import decide
from jobspec.hyperparameters import DEFAULT_BETA
from jobspec.spec import JobSpec
from workers.pipeline.canaries import check_canaries
from workers.pipeline.emit import Emit
from workers.pipeline.evaluate import (
    Respondent,
    answers_folder,
    base_respondent,
    evaluate,
    group_metrics_of,
    load_judges,
    metrics_of,
    plan_evaluation,
)
from workers.pipeline.evaluation_metrics import open_table
from workers.pipeline.failure import Stopped
from workers.pipeline.features import save_scheduler
from workers.pipeline.models import LoadedModel, attach_adapter, load_base, trainable
from workers.pipeline.parent import parent_weights
from workers.pipeline.perturb import Judging, perturb
from workers.pipeline.prepare import estimate, prepare, run_key
from workers.pipeline.private_plan import plan_privacy, privacy_report
from workers.pipeline.processes import ALONE, Processes
from workers.pipeline.publish import publish, save_adapter, save_perturbation, weight_table
from workers.pipeline.repairs import check_repair
from workers.pipeline.report import SUMMARY, Facts, build_report
from workers.pipeline.samples import sample_table
from workers.pipeline.stages import Stages, policy_of
from workers.pipeline.tune import TuneSettings, total_steps, tune
from workers.pipeline.validate import Dataset, load_dataset, load_preferences, overlap


def run_job(
    spec: JobSpec,
    work: Path,
    emit: Emit,
    stop: Callable[[], bool],
    processes: Processes = ALONE,
) -> dict[str, Any] | None:
    """Run a job to its verdict; returns the report, which is also in the bundle.

    Of several processes the first one does everything; the others share its tuning and return
    None. Raises PipelineFailure (a reason for the tenant) and Stopped (`stop()` turned true).
    """
    work.mkdir(parents=True, exist_ok=True)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    policy = policy_of(spec.policy, spec.evaluation)
    stages = Stages(emit)

    with stages.stage("validating"):
        check_repair(spec.defense.perturbation, spec.model)
        base = load_base(spec.model, spec.cache_dir)
        _check_stop(stop)
        training, validation, data_report = _load_data(spec, base)
        held_out = training if validation is None else validation
        plan = plan_evaluation(
            spec.evaluation,
            base.tokenizer,
            held_out.chat,
            held_out.rows,
            held_out=validation is not None,
            seed=spec.seed,
            training=training.chat,
        )
        judges = load_judges(spec.evaluation)
        inputs = prepare(spec, base, judges.scorer, training, validation)
        data_report |= inputs.filtered
        data, hyper = inputs.data, inputs.hyper
        model = attach_adapter(
            base.model, spec.model.lora, spec.seed, parent_weights(spec, base.fingerprint)
        )
        steps = total_steps(len(data.user), hyper, spec.defense.scheduler)
        private = plan_privacy(spec, len(data.user), hyper, work, emit, stop)
        emit(
            "validated",
            hyperparameters=hyper.model_dump(),
            report=data_report,
            total_steps=steps,
            estimate=estimate(model, data, hyper, steps, spec),
        )
    _check_stop(stop)

    with stages.stage("tuning"):
        settings = TuneSettings(
            hyperparameters=hyper,
            lora=spec.model.lora,
            defense=spec.defense,
            checkpoints=spec.checkpoints,
            seed=spec.seed,
            key=run_key(spec, base.fingerprint, data, hyper),
            beta=getattr(hyper, "beta", DEFAULT_BETA),
            features=inputs.features,
            make_method=inputs.make_method,
            private=private,
        )
        tuned = tune(model, data, settings, work, emit, stop, processes)
    processes.close()
    if not processes.leads:
        return None

    with stages.stage("perturbing"):
        kept, cache = work / "evaluation", spec.cache_dir / "baselines"
        judging = Judging(policy, plan, judges, base, kept, cache)
        perturbed = perturb(model, tuned, data.harmful, spec, judging, emit, stop)

    with stages.stage("evaluating"):
        folder = work / "perturbation"
        if perturbed is not None:
            save_perturbation(model, perturbed, folder)
        with apply_perturbation(
            trainable(model),
            {} if perturbed is None else perturbed.eps,
            0.0 if perturbed is None else perturbed.scale,
        ):
            adapter_sha256 = save_adapter(model, spec.model.name, work / "adapter")
            answers = answers_folder(kept, f"{base.fingerprint} {adapter_sha256}")
            evaluated = evaluate(
                Respondent(model, base.tokenizer, "tuned model", answers),
                base_respondent(model, base, cache),
                plan,
                judges,
                policy,
                emit,
                stop,
                stages.timed,
            )
        transform = getattr(spec.defense.scheduler, "transform", None)
        at_end, while_tuning = (
            check_canaries(inputs.canaries, logits, len(data.user), transform)
            for logits in (tuned.method.logits(), tuned.tuned_logits)
        )
        # A ranking that was right only after the last step did not protect the model.
        check = min(at_end, while_tuning, key=lambda one: _auc_or(one, 1.0))
        check = check if check.auc.value is not None else at_end
        measured, reference = evaluated.measured, evaluated.reference
        assert reference is not None
        metrics = metrics_of(measured, reference, evaluated.plan, judges.scorer)
        metrics["defense.canary_auc"] = check.auc
        base_metrics = metrics_of(reference, reference, evaluated.plan, judges.scorer)
        group_metrics = group_metrics_of(measured, reference, evaluated.plan, judges.scorer)

    with stages.stage("gating"):
        short = suite_shortfalls(plan.suites)
        decision = decide(policy, metrics, group_metrics, short)
        base_groups = group_metrics_of(reference, reference, evaluated.plan, judges.scorer)
        base_decision = decide(policy, base_metrics, base_groups, short)

    with stages.stage("publishing"):
        report = build_report(
            Facts(
                spec, base, judges, evaluated, data, data_report, hyper, steps, tuned, perturbed,
                inputs.alignment, inputs.canaries, check, while_tuning.auc.value, at_end.auc.value,
                inputs.uses_canaries, inputs.flagged, metrics, base_metrics, group_metrics,
                decision, base_decision, adapter_sha256, stages.seconds,
            )
        )  # fmt: skip
        report |= privacy_report(spec, private, tuned.spent, len(data.user))
        for condition in report["defense"]["conditions"]:
            emit(
                "message",
                level=condition["severity"],
                message=condition["message"],
                data={"condition": condition["code"]},
            )
        publish(
            work / "bundle",
            work / "adapter",
            adapter_sha256,
            base.tokenizer,
            report,
            weight_table(tuned, data.user),
            sample_table(
                {"base": reference.answers, "tuned": measured.answers}, judges.scorer, judges.harm
            ),
            None if perturbed is None else folder,
            save_scheduler(
                tuned.method, spec.defense.scheduler, inputs.features, work / "scheduler"
            ),
            open_table(measured, judges.scorer),
        )
    emit(
        "result",
        verdict=decision.verdict,
        bundle=str(work / "bundle"),
        trained_tokens=tuned.trained_tokens,
        report={key: report[key] for key in (*SUMMARY, "privacy") if key in report},
    )
    return report


def _load_data(spec: JobSpec, base: LoadedModel) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    context = getattr(base.model.config, "max_position_embeddings", None)
    limit = spec.max_length or spec.model.lora.max_length
    max_length = min(limit, context) if isinstance(context, int) else limit
    load = load_preferences if spec.method == "dpo" else load_dataset
    training = load(
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
    validation = load(
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


def _auc_or(check: CanaryCheck, missing: float) -> float:
    return missing if check.auc.value is None else check.auc.value


def _check_stop(stop: Callable[[], bool]) -> None:
    if stop():
        raise Stopped
