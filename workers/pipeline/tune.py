"""Tuning: LoRA under the BDS scalar scheduler (or none), optionally under Panacea's objective.

One step, with the scheduler (arXiv 2510.27172, released update):

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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from defenses.bds.scheduler import ScalarScheduler, bds_objective
from defenses.losses import (
    response_nll_and_accuracy_B,
    response_token_mean_nll,
)
from defenses.panacea.perturbation import panacea_gradients, relative_rho
from jobspec.catalogue import LoraDefaults
from jobspec.defense import DefenseOptions
from jobspec.hyperparameters import ResolvedHyperparameters
from jobspec.spec import CheckpointOptions
from workers.pipeline.checkpoint import (
    TrainingState,
    newest_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from workers.pipeline.emit import Emit
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.models import trainable
from workers.pipeline.rows import TokenRow, collate
from workers.pipeline.scoring import evaluate_rows
from workers.pipeline.stream import RowStream

CLIP = 1.0
VALIDATION_EVERY = 10
MAX_SKIPPED_IN_A_ROW = 5


class TuneData(NamedTuple):
    """Token rows of the four sets; the last three may be empty."""

    user: Sequence[TokenRow]
    validation: Sequence[TokenRow]
    alignment: Sequence[TokenRow]
    harmful: Sequence[TokenRow]


class TuneSettings(NamedTuple):
    """How to tune. `key` names the run, so that only its own checkpoints are resumed."""

    hyperparameters: ResolvedHyperparameters
    lora: LoraDefaults
    defense: DefenseOptions
    checkpoints: CheckpointOptions
    seed: int
    key: str


@dataclass
class Tuned:
    """What tuning leaves behind. The model itself is changed in place."""

    steps: int
    trained_tokens: int
    scheduler: ScalarScheduler | None
    last_nll: Tensor
    perturbation: dict[str, Tensor] | None
    rho: float
    counters: dict[str, int] = field(default_factory=dict)


def total_steps(rows: int, hyperparameters: ResolvedHyperparameters) -> int:
    """n_epochs * ceil(N/b)."""
    return hyperparameters.n_epochs * math.ceil(rows / hyperparameters.batch_size)


def tune(
    model: Any,
    data: TuneData,
    settings: TuneSettings,
    work: Path,
    emit: Emit,
    stop: Callable[[], bool],
) -> Tuned:
    """Tune the adapter of `model`, from the newest checkpoint in `work` when there is one.

    Raises Stopped (after writing a checkpoint) when `stop()` turns true, and
    PipelineFailure(internal_error) when the loss stays non-finite.
    """
    run = _Run(model, data, settings, work, emit, stop)
    run.resume()
    model.train()
    while run.step < run.total_steps:
        if stop():
            run.checkpoint(announce=False)
            raise Stopped
        run.advance()
        run.checkpoint_if_due()
    model.eval()
    return run.result()


class _Run:
    """The state of one tuning run; everything here is in the checkpoint or follows from it."""

    def __init__(
        self,
        model: Any,
        data: TuneData,
        settings: TuneSettings,
        work: Path,
        emit: Emit,
        stop: Callable[[], bool],
    ) -> None:
        self.model, self.data, self.settings = model, data, settings
        self.work, self.emit, self.stop = work, emit, stop
        self.parameters = trainable(model)
        self.device = next(model.parameters()).device
        hyper, defense = settings.hyperparameters, settings.defense
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=settings.lora.learning_rate * hyper.learning_rate_multiplier,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=settings.lora.weight_decay,
        )
        self.scheduler = (
            ScalarScheduler(len(data.user), defense.scheduler)
            if defense.scheduler.name == "bds"
            else None
        )
        self.joint = defense.perturbation.mode == "joint"
        size = hyper.batch_size
        self.user = RowStream("user", len(data.user), size, settings.seed)
        self.alignment = (
            RowStream("alignment", len(data.alignment), size, settings.seed)
            if self.scheduler is not None
            else None
        )
        self.harmful = (
            RowStream("harmful", len(data.harmful), size, settings.seed) if self.joint else None
        )
        self.total_steps = total_steps(len(data.user), hyper)
        self.step = 0
        self.trained_tokens = 0
        self.skipped_in_a_row = 0
        self.counters = {"skipped_steps": 0, "clamped_steps": 0, "skipped_perturbations": 0}
        self.last_nll = torch.full((len(data.user),), math.nan, dtype=torch.float64)
        self.perturbation: dict[str, Tensor] | None = None
        self.rho = defense.perturbation.rho or relative_rho(self.parameters)
        self.metrics: dict[str, float] = {}
        self.saved_at = time.monotonic()
        self.saved_step = -1

    def advance(self) -> None:
        """One step of model and scheduler."""
        started = time.monotonic()
        epoch, place = divmod(self.step, self.user.batches)
        ids = self.user.batch(epoch, place)
        user = [self.data.user[i] for i in ids]
        trusted = (
            [self.data.alignment[i] for i in self.alignment.batch(0, self.step)]
            if self.alignment is not None
            else []
        )
        batch = collate([*trusted, *user], self.device)
        ids_B = torch.tensor(ids)
        seen: dict[str, Tensor] = {}

        def task_loss() -> Tensor:
            scores = response_nll_and_accuracy_B(self.model, *batch)
            l_B = scores.nll[len(trusted) :]
            seen["user"] = l_B.detach()
            seen["correct"] = scores.correct[len(trusted) :].sum()
            seen["tokens"] = scores.token_count[len(trusted) :].sum()
            if self.scheduler is None:
                return l_B.mean()
            a_B = scores.nll[: len(trusted)]
            seen["alignment"] = a_B.detach().mean()
            w_B = self.scheduler.weights(ids_B).to(self.device)
            coefficient = self.settings.defense.scheduler.alignment_coefficient
            return bds_objective(a_B, l_B, w_B, coefficient)

        loss, norm = self._descend(task_loss)
        self.step += 1
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip()
            return
        self.skipped_in_a_row = 0
        tokens = int(seen["tokens"])
        self.trained_tokens += tokens
        losses_B = seen["user"].double().cpu()
        self.last_nll[ids_B] = losses_B
        self.metrics = {
            "train_loss": float(losses_B.mean()),
            "train_mean_token_accuracy": int(seen["correct"]) / tokens,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "gradient_norm": norm,
            "objective": loss,
        }
        if self.scheduler is not None:
            moved = self.scheduler.step(ids_B, losses_B)
            self.metrics |= {
                "alignment_loss": float(seen["alignment"]),
                "scheduler_loss": moved.loss,
                "effective_sample_size": self.scheduler.effective_sample_size(),
            }
        self._validate()
        self.metrics["seconds"] = round(time.monotonic() - started, 4)
        self.emit("metrics", step=self.step, total_steps=self.total_steps, **self.metrics)

    def _descend(self, task_loss: Callable[[], Tensor]) -> tuple[float, float]:
        """Gradient, clip and AdamW step; returns the loss and the norm before clipping."""
        parameters = list(self.parameters.values())
        self.optimizer.zero_grad(set_to_none=True)
        if self.harmful is None:
            objective = task_loss()
            objective.backward()  # type: ignore[no-untyped-call]
            loss = float(objective.detach())
        else:
            rows = [self.data.harmful[i] for i in self.harmful.batch(0, self.step)]
            batch = collate(rows, self.device)
            options = self.settings.defense.perturbation
            found = panacea_gradients(
                task_loss,
                lambda: response_token_mean_nll(self.model, *batch),
                self.parameters,
                rho=self.rho,
                strength=options.strength,
                clamp=options.clamp,
                on_clamp=options.on_clamp,
            )
            self.counters["clamped_steps"] += found.clamped
            self.counters["skipped_perturbations"] += found.skipped
            self.perturbation = found.perturbation or self.perturbation
            for name, parameter in self.parameters.items():
                parameter.grad = found.direction[name]
            loss = found.task_loss
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, CLIP))
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimizer.step()
        return loss, norm

    def _skip(self) -> None:
        """A step whose loss or gradient is not finite changes nothing and is counted."""
        self.counters["skipped_steps"] += 1
        self.skipped_in_a_row += 1
        self.emit(
            "message",
            level="warn",
            message=f"Step {self.step}: the loss is not finite; the step was left out.",
            data={"step": self.step},
        )
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise PipelineFailure(
                "internal_error",
                f"The loss was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row (the last is "
                f"step {self.step}). Lower learning_rate_multiplier and create the job again.",
            )

    def _validate(self) -> None:
        rows = self.data.validation
        last = self.step == self.total_steps
        if not rows or not (last or self.step % VALIDATION_EVERY == 0):
            return
        size = self.settings.hyperparameters.batch_size
        start = (self.step // VALIDATION_EVERY - 1) * size % len(rows)
        loss, accuracy = evaluate_rows(self.model, rows[start : start + size], size, self.stop)
        self.metrics |= {"valid_loss": loss, "valid_mean_token_accuracy": accuracy}
        if last:
            loss, accuracy = evaluate_rows(self.model, rows, 16, self.stop)
            self.metrics |= {
                "full_valid_loss": loss,
                "full_valid_mean_token_accuracy": accuracy,
            }

    def checkpoint_if_due(self) -> None:
        options = self.settings.checkpoints
        due = (
            self.step % options.every_steps == 0
            or self.step == self.total_steps
            or time.monotonic() - self.saved_at >= options.every_seconds
        )
        if due:
            self.checkpoint(announce=True)

    def checkpoint(self, *, announce: bool) -> None:
        if self.saved_step == self.step or self.step == 0:
            return
        folder = save_checkpoint(self.work, self._state(), self.settings.checkpoints.keep)
        self.saved_at, self.saved_step = time.monotonic(), self.step
        if announce:
            self.emit("checkpoint", step=self.step, folder=str(folder), metrics=self.metrics)

    def _state(self) -> TrainingState:
        names = list(self.parameters)
        tensors: dict[str, Tensor] = {f"adapter/{n}": p for n, p in self.parameters.items()}
        tensors |= optimizer_tensors(self.optimizer, names, "adam")
        tensors["random"] = torch.get_rng_state()
        tensors["last_nll"] = self.last_nll
        if self.scheduler is not None:
            saved = self.scheduler.state_dict()
            tensors["scheduler/v"] = saved["v"]
            tensors |= {
                f"scheduler/adam/{name}": torch.as_tensor(value)
                for name, value in saved["optimizer"].items()
            }
        if self.perturbation is not None:
            tensors |= {f"eps/{name}": t for name, t in self.perturbation.items()}
        numbers = {
            "trained_tokens": self.trained_tokens,
            "skipped_in_a_row": self.skipped_in_a_row,
            "counters": self.counters,
            "metrics": self.metrics,
            "rho": self.rho,
        }
        return TrainingState(self.step, self.settings.key, tensors, numbers)

    def resume(self) -> None:
        """Continue from the newest checkpoint in the work folder, if there is one."""
        state = newest_checkpoint(self.work, self.settings.key)
        if state is None:
            return
        tensors = state.tensors
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"adapter/{name}"])
        restore_optimizer(self.optimizer, list(self.parameters), "adam", tensors)
        torch.set_rng_state(tensors["random"])
        self.last_nll = tensors["last_nll"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(
                {
                    "transform": self.settings.defense.scheduler.transform,
                    "v": tensors["scheduler/v"],
                    "optimizer": _below(tensors, "scheduler/adam/"),
                }
            )
        self.perturbation = {
            name: tensor.to(self.device) for name, tensor in _below(tensors, "eps/").items()
        } or None
        numbers = state.numbers
        self.step = self.saved_step = state.step
        self.trained_tokens = numbers["trained_tokens"]
        self.skipped_in_a_row = numbers["skipped_in_a_row"]
        self.counters = numbers["counters"]
        self.metrics = numbers["metrics"]
        self.rho = numbers["rho"]
        self.emit(
            "message",
            level="info",
            message=f"Resumed from the checkpoint at step {state.step}.",
            data={"step": state.step},
        )

    def result(self) -> Tuned:
        return Tuned(
            steps=self.total_steps,
            trained_tokens=self.trained_tokens,
            scheduler=self.scheduler,
            last_nll=self.last_nll,
            perturbation=self.perturbation,
            rho=self.rho,
            counters=self.counters,
        )


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
