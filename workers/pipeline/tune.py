"""Tuning: LoRA under one tuning-stage defense, optionally under Panacea's objective.

One step (BDS shown, arXiv 2510.27172, released update; defenses/method.py has the general form):

    a = mean l(s_m)   over b rows of the alignment set       one concatenated forward pass
    l_i = l(z_i)      over b rows of the user's set
    w_i = sigma_i(v)  detached
    theta <- AdamW(theta, clip(grad[ c_a a + mean w_i l_i ], 1.0))
    v     <- AdamW(v, clip(grad mean sigma_i(v) l_i, 10.0))       l_i from before the theta step

Under perturbation mode "joint" the direction is Panacea's d with this loss in the place of g.
An epoch is one pass over the user's set, ceil(N/b) steps; the alignment and harmful streams run on
across epochs and start anew, shuffled, when they are exhausted. The release takes max(ceil(N/b),
ceil(M/b)) steps, which is the same for M <= N (its setting: N = M); with a larger alignment set it
would read the user's rows more often than n_epochs says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from defenses.baselines.lisa import total_steps as lisa_steps
from defenses.bds.ranking import selected_rows
from defenses.method import MethodError, TuningMethod, frozen_copy
from jobspec.defense import (
    LisaOptions,
    PerturbationOptions,
    PlainOptions,
    SealOptions,
    TuningOptions,
)
from jobspec.hyperparameters import ResolvedHyperparameters
from workers.pipeline.emit import Emit
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.models import trainable
from workers.pipeline.private_training import PrivateTraining
from workers.pipeline.processes import ALONE, Processes
from workers.pipeline.training import Training
from workers.pipeline.training_state import resume
from workers.pipeline.tuning_inputs import TuneData, TuneSettings

__all__ = ["TuneData", "TuneSettings", "Tuned", "total_steps", "tune"]


@dataclass
class Tuned:
    """What tuning leaves behind. The model itself is changed in place.

    kept: ids of the rows that were learned in the end, where a method chose among them.
    coefficients: Panacea's layer coefficients, averaged over the last tenth of the steps.
    spent: privacy spent, as (sigma, q, steps); empty without privacy.
    tuned_logits, tuned_weights: the method's logits (with canaries) and weights in the last steps,
    where the method was rescored after them.
    """

    steps: int
    trained_tokens: int
    method: TuningMethod
    last_nll: Tensor
    perturbation: dict[str, Tensor] | None
    rho: float
    counters: dict[str, int] = field(default_factory=dict)
    kept: list[int] | None = None
    coefficients: dict[int, float] | None = None
    tuned_logits: Tensor | None = None
    tuned_weights: Tensor | None = None
    spent: list[tuple[float, float, int]] = field(default_factory=list)

    def weights(self) -> Tensor | None:
        """The safety weights that the model was tuned with last."""
        return self.method.weights() if self.tuned_weights is None else self.tuned_weights


def total_steps(rows: int, hyper: ResolvedHyperparameters, scheduler: TuningOptions) -> int:
    """n_epochs * ceil(N/b) steps that read user rows, and what the method adds to them: Lisa its
    alignment steps, SEAL a second tuning on the rows it keeps."""
    steps = hyper.n_epochs * math.ceil(rows / hyper.batch_size)
    if isinstance(scheduler, LisaOptions):
        return lisa_steps(steps, scheduler)
    if isinstance(scheduler, SealOptions):
        kept = max(1, round(scheduler.keep_share * rows))
        return steps + hyper.n_epochs * math.ceil(kept / hyper.batch_size)
    return steps


def tune(
    model: Any,
    data: TuneData,
    settings: TuneSettings,
    work: Path,
    emit: Emit,
    stop: Callable[[], bool],
    processes: Processes = ALONE,
) -> Tuned:
    """Tune the adapter of `model`, from the newest checkpoint in `work` when there is one.

    Raises Stopped (after writing a checkpoint) when `stop()` turns true in any process, and
    PipelineFailure: internal_error when the loss stays non-finite, invalid_spec when the method
    means nothing on these sets.
    """
    try:
        if isinstance(settings.defense.scheduler, SealOptions):
            return _tune_selected(model, data, settings, work, emit, stop, processes)
        if settings.private is not None:
            return _tune_privately(model, data, settings, work, emit, stop, processes)
        return _run(Training(model, data, settings, work, emit, stop, processes))
    except MethodError as error:
        raise PipelineFailure("invalid_spec", f"The defense cannot run: {error}.") from error


def _run(training: Training) -> Tuned:
    resume(training)
    training.model.train()
    while not training.finished:
        if training.processes.any(training.stop()):
            training.checkpoint(announce=False)
            raise Stopped
        try:
            training.advance()
        except Stopped:
            # Raised while validating, when the step itself is complete.
            training.checkpoint(announce=False)
            raise
        training.checkpoint_if_due()
    training.model.eval()
    return Tuned(
        steps=training.step,
        trained_tokens=training.trained_tokens,
        method=training.method,
        last_nll=training.last_nll,
        perturbation=training.perturbation,
        rho=training.rho,
        counters=training.counters,
        coefficients=training.coefficients.result(),
        tuned_logits=training.tuned_logits,
        tuned_weights=training.tuned_weights,
        spent=training.spent,
    )


def _tune_privately(
    model: Any,
    data: TuneData,
    settings: TuneSettings,
    work: Path,
    emit: Emit,
    stop: Callable[[], bool],
    processes: Processes,
) -> Tuned:
    training = PrivateTraining(model, data, settings, work, emit, stop, processes)
    try:
        tuned = _run(training)
    finally:
        training.close()
    training.check_moved()
    return tuned


def _tune_selected(
    model: Any,
    data: TuneData,
    settings: TuneSettings,
    work: Path,
    emit: Emit,
    stop: Callable[[], bool],
    processes: Processes,
) -> Tuned:
    """SEAL (arXiv 2410.07471): learn weights, keep the top share, tune the first adapter on it."""
    options = settings.defense.scheduler
    assert isinstance(options, SealOptions)
    first_adapter = frozen_copy(trainable(model))
    all_steps = total_steps(len(data.user), settings.hyperparameters, options)
    selecting = settings.defense.model_copy(
        update={"perturbation": PerturbationOptions(mode="none")}
    )
    selection = Training(
        model,
        data,
        settings._replace(key=settings.key + "/selection", defense=selecting),
        work / "selection",
        _quiet(emit),
        stop,
        processes,
        announced_steps=all_steps,
    )
    chosen = _run(selection)
    weights = chosen.method.weights()
    assert weights is not None
    kept = selected_rows(weights, options.keep_share)
    rows: Any = data.user
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(first_adapter[name])
    tuned = _run(
        Training(
            model,
            data._replace(user=[rows[i] for i in kept], canaries_harmful=(), canaries_benign=()),
            settings._replace(
                defense=settings.defense.model_copy(update={"scheduler": PlainOptions()})
            ),
            work,
            emit,
            stop,
            processes,
            first_step=chosen.steps,
            announced_steps=all_steps,
        )
    )
    last_nll = chosen.last_nll
    last_nll[torch.tensor(kept)] = tuned.last_nll
    return Tuned(
        steps=chosen.steps + tuned.steps,
        trained_tokens=chosen.trained_tokens + tuned.trained_tokens,
        method=chosen.method,
        last_nll=last_nll,
        perturbation=tuned.perturbation,
        rho=tuned.rho,
        counters={name: tuned.counters[name] + count for name, count in chosen.counters.items()},
        kept=kept,
        coefficients=tuned.coefficients,
    )


def _quiet(emit: Emit) -> Emit:
    """Events without checkpoints: those of the selection are no model that anybody may have."""

    def forward(event: str, **fields: Any) -> None:
        if event != "checkpoint":
            emit(event, **fields)

    return forward
