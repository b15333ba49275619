"""One tuning run, step by step: rows, forward pass, objective, exchange, update, checkpoint."""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from defenses.dpo import dpo_loss_B
from defenses.losses import ResponseScores, response_nll_and_accuracy_B
from defenses.method import (
    MethodContext,
    StepLosses,
    StepRecord,
    TokenLosses,
    TuningMethod,
)
from defenses.panacea.layers import CoefficientAverage, first_averaged_step
from defenses.panacea.perturbation import panacea_gradients, relative_rho
from defenses.registry import build_method, method_class
from jobspec.defense import PerturbationOptions
from workers.pipeline.checkpoint import save_checkpoint
from workers.pipeline.emit import Emit
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.forward import response_scores
from workers.pipeline.models import trainable
from workers.pipeline.preferences import evaluate_pairs, pair_rows, reference_log_probs
from workers.pipeline.processes import Processes
from workers.pipeline.rows import PairRow, TokenRow, collate
from workers.pipeline.scoring import evaluate_rows, row_losses, token_log_probs
from workers.pipeline.step_rows import StepRows, StepStreams
from workers.pipeline.training_state import training_state
from workers.pipeline.tuning_inputs import TuneData, TuneSettings

CLIP = 1.0
VALIDATION_EVERY = 10
MAX_SKIPPED_IN_A_ROW = 5
SCORING_BATCH = 16


class Training:
    """The state of one tuning run; everything here is in the checkpoint or follows from it."""

    def __init__(
        self,
        model: Any,
        data: TuneData,
        settings: TuneSettings,
        work: Path,
        emit: Emit,
        stop: Callable[[], bool],
        processes: Processes,
        *,
        first_step: int = 0,
        announced_steps: int | None = None,
    ) -> None:
        self.model, self.data, self.settings = model, data, settings
        self.work, self.emit, self.stop, self.processes = work, emit, stop, processes
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
        kind = method_class(defense.scheduler)
        self.canaries = data.canaries if kind.uses_canaries else []
        self.streams = StepStreams(data, settings, kind, self.canaries)
        self.user = self.streams.user
        self.pairs = isinstance(data.user[0], PairRow)
        self.reference_pairs = self._reference_pairs(data.user)
        self.reference_validation = self._reference_pairs(data.validation)
        self.method = self._method(kind.uses_reference)
        self.user_steps = hyper.n_epochs * self.user.batches
        self.steps = _planned_steps(self.method, self.user_steps)
        self.first_step = first_step
        self.announced_steps = announced_steps or self.steps
        self.step = 0
        self.user_step = 0
        self.trained_tokens = 0
        self.skipped_in_a_row = 0
        self.counters = {"skipped_steps": 0, "clamped_steps": 0, "skipped_perturbations": 0}
        self.last_nll = torch.full((len(data.user),), math.nan, dtype=torch.float64)
        # What weighed the rows in the last steps, before the rescoring that no step comes after.
        self.tuned_logits: Tensor | None = None
        self.tuned_weights: Tensor | None = None
        self.perturbation: dict[str, Tensor] | None = None
        self.coefficients = CoefficientAverage()
        # Privacy spent so far, as (sigma, q, steps); stays empty where steps are not noised.
        self.spent: list[tuple[float, float, int]] = []
        repair = defense.perturbation
        chosen = repair.rho if isinstance(repair, PerturbationOptions) else None
        self.rho = chosen or relative_rho(self.parameters)
        self.metrics: dict[str, float] = {}
        self.saved_at = time.monotonic()
        self.saved_step = -1

    def _method(self, uses_reference: bool) -> TuningMethod:
        context = MethodContext(
            row_count=len(self.data.user),
            canary_count=len(self.canaries),
            user_steps=self.settings.hyperparameters.n_epochs * self.user.batches,
            steps_per_epoch=self.user.batches,
            parameters=self.parameters,
            seed=self.settings.seed,
            reference=self._reference_tokens() if uses_reference else (),
            features=self.settings.features,
        )
        if self.settings.make_method is not None:
            return self.settings.make_method(context)
        return build_method(self.settings.defense.scheduler, context)

    def _reference_tokens(self) -> list[Tensor]:
        """Log-probabilities of every supervised token before tuning; the adapter is fresh yet."""
        if self.pairs:
            raise PipelineFailure(
                "invalid_spec",
                "Constrained SFT limits the tokens of answers; it cannot tune on preference pairs. "
                "Choose another defense.scheduler.",
            )
        rows: Sequence[Any] = self.data.user
        return token_log_probs(self.model, rows, SCORING_BATCH, self.stop)

    def _reference_pairs(self, rows: Sequence[Any]) -> Tensor:
        """log p of the chosen and the rejected answer of each pair before tuning, [N, 2]. Computed
        anew by a resumed run too, before it takes the adapter of the checkpoint."""
        if not self.pairs or not rows:
            return torch.empty(0, 2)
        return reference_log_probs(self.model, rows, SCORING_BATCH, self.stop)

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    @property
    def epoch(self) -> int:
        return self.user_step // self.user.batches

    def advance(self) -> None:
        """One step of model and method."""
        started = time.monotonic()
        reads = self.method.reads(self.step)
        rows = self.streams.rows(reads, self.step, self.user_step)
        seen: dict[str, Tensor] = {}
        self._seed_step()
        self.metrics = {}
        canaries = self._score_canaries(rows.canary_ids)
        loss, norm = self._descend(lambda: self._objective(rows, seen))
        epoch = self.epoch
        self.step += 1
        if reads != "alignment":
            self.user_step += 1
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped_in_a_row = 0
            self._learn(rows, seen, canaries, epoch, loss, norm)
        else:
            self._skip()
        if reads != "alignment" and self._rescoring_due():
            self._rescore(epoch)
        self._validate()
        self.metrics["seconds"] = round(time.monotonic() - started, 4)
        self.emit(
            "metrics",
            step=self.first_step + self.step,
            total_steps=self.announced_steps,
            **self.metrics,
        )

    def _seed_step(self) -> None:
        """Dropout of a step depends on seed, step and process alone, so no state of a generator
        has to be kept for a resumed run."""
        text = f"{self.settings.seed}/dropout/{self.step}/{self.processes.rank}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))

    def _objective(self, rows: StepRows, seen: dict[str, Tensor]) -> Tensor:
        """This process's share of the step's objective; `seen` gets what it measured."""
        user_ids = self.processes.share(rows.user_ids)
        trusted = self.processes.share(rows.alignment)
        user = [self.data.user[i] for i in user_ids]
        tokens: list[TokenRow] = [*trusted, *(pair_rows(user) if self.pairs else user)]  # type: ignore[arg-type]
        # A process may have no row of a small last batch; it still has its part of the method's
        # own terms and of the exchange, so it reads one row that counts for nothing.
        padding = [] if tokens else [_first_row(self.data.user)]
        scores = response_scores(self.model, tokens or padding, self.device)
        first, last = len(trusted), len(tokens)
        a_B = scores.nll[:first]
        l_B = self._user_losses(scores, first, last, user_ids)
        seen["user"], seen["alignment"] = l_B.detach(), a_B.detach()
        seen["correct"] = scores.correct[first:last].sum()
        seen["tokens"] = scores.token_count[first:last].sum()
        objective = self.method.objective(
            StepLosses(
                user_B=l_B,
                alignment_B=a_B,
                row_ids_B=torch.tensor(user_ids, dtype=torch.int64),
                step_ids=torch.tensor(rows.user_ids, dtype=torch.int64),
                user_count=len(rows.user_ids),
                alignment_count=len(rows.alignment),
                step=self.step,
                epoch=self.epoch,
                processes=self.processes.count,
                tokens=None
                if self.pairs
                else TokenLosses(scores.token_nll[first:last], scores.supervised[first:last]),
            )
        )
        return objective + 0.0 * scores.nll.sum() if padding else objective

    def _user_losses(
        self, scores: ResponseScores, first: int, last: int, ids: Sequence[int]
    ) -> Tensor:
        """Mean response loss of each row, or the preference loss of each pair."""
        if not self.pairs:
            return scores.nll[first:last]
        log_prob = -(scores.nll * scores.token_count)[first:last]
        chosen_B, rejected_B = log_prob[: len(ids)], log_prob[len(ids) :]
        reference = self.reference_pairs[list(ids)].to(log_prob)
        return dpo_loss_B(
            chosen_B, rejected_B, reference[:, 0], reference[:, 1], self.settings.beta
        )

    def _descend(self, task_loss: Callable[[], Tensor]) -> tuple[float, float]:
        """Gradient, clip and AdamW step; returns the loss and the norm before clipping."""
        parameters = list(self.parameters.values())
        self.optimizer.zero_grad(set_to_none=True)
        harmful = self.streams.harmful(self.step)
        if harmful is None:
            objective = task_loss()
            objective.backward()  # type: ignore[no-untyped-call]
            (loss,) = self.processes.sum_numbers(float(objective.detach()))
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.processes.sum_gradients(p.grad for p in parameters if p.grad is not None)
        else:
            loss = self._panacea(task_loss, harmful)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, CLIP))
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimizer.step()
        return loss, norm

    def _panacea(self, task_loss: Callable[[], Tensor], rows: list[TokenRow]) -> float:
        """Set every gradient to Panacea's direction and keep eps; returns g(w)."""
        options = self.settings.defense.perturbation
        assert isinstance(options, PerturbationOptions)
        own = self.processes.share(rows)
        batch = collate(own or rows[:1], self.device)
        tokens = sum(row.trained_tokens for row in rows)

        def harmful_loss() -> Tensor:
            scores = response_nll_and_accuracy_B(self.model, *batch)
            share = (scores.nll * scores.token_count).sum() / tokens
            return share if own else share * 0.0

        found = panacea_gradients(
            task_loss,
            harmful_loss,
            self.parameters,
            rho=self.rho,
            strength=options.strength,
            clamp=options.clamp,
            on_clamp=options.on_clamp,
            reduce=lambda gradients: self.processes.sum_gradients(gradients.values()),
            reduce_value=lambda value: self.processes.sum_numbers(value)[0],
        )
        self.counters["clamped_steps"] += found.clamped
        self.counters["skipped_perturbations"] += found.skipped
        if found.perturbation is not None:
            self.perturbation = found.perturbation
            if self.step >= first_averaged_step(self.steps):
                self.coefficients.add(found.perturbation)
        for name, parameter in self.parameters.items():
            parameter.grad = found.direction[name]
        self.metrics |= {
            "harmful_loss": found.harmful_loss,
            "perturbed_harmful_loss": found.perturbed_harmful_loss,
        }
        return found.task_loss

    def _learn(
        self,
        rows: StepRows,
        seen: Mapping[str, Tensor],
        canaries: tuple[Tensor, Tensor],
        epoch: int,
        loss: float,
        norm: float,
    ) -> None:
        losses = self.processes.gather_shares(seen["user"], len(rows.user_ids))
        trusted = self.processes.gather_shares(seen["alignment"], len(rows.alignment))
        correct, tokens = (
            int(number)
            for number in self.processes.sum_numbers(float(seen["correct"]), float(seen["tokens"]))
        )
        self.trained_tokens += tokens
        ids = torch.tensor(rows.user_ids, dtype=torch.int64)
        self.last_nll[ids] = losses
        self.metrics |= {
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "gradient_norm": norm,
            "objective": loss,
        }
        if len(losses):
            self.metrics["train_loss"] = float(losses.mean())
            if self.pairs:
                # A pair's loss is below log 2 where the margin is above 0.
                right = (losses < math.log(2)).double().mean()
                self.metrics["train_reward_accuracy"] = float(right)
            else:
                self.metrics["train_mean_token_accuracy"] = correct / max(tokens, 1)
        if len(trusted):
            self.metrics["alignment_loss"] = float(trusted.mean())
        self.metrics |= self.method.learn(StepRecord(ids, losses, *canaries, self.step - 1, epoch))

    def _score_canaries(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and losses of the step's canaries; a loss that is not finite is left out."""
        rows = [self.canaries[i] for i in places]
        losses = self._losses(rows)
        ids = torch.tensor(places, dtype=torch.int64) + len(self.data.user)
        finite = torch.isfinite(losses)
        return ids[finite], losses[finite]

    def _losses(self, rows: Sequence[TokenRow]) -> Tensor:
        """Response losses of rows without gradients, shared among the processes; float64 [n]."""
        own = self.processes.share(rows)
        found = row_losses(self.model, own, SCORING_BATCH, lambda: False) if own else []
        return self.processes.gather_shares(torch.tensor(found, dtype=torch.float64), len(rows))

    def _rescoring_due(self) -> bool:
        """After every epoch; a run of one also in its middle, or its weights would come too late
        for the model."""
        middle = self.steps == self.user.batches and self.user_step == self.user.batches // 2
        return self.method.rescores and (self.user_step % self.user.batches == 0 or middle)

    def _rescore(self, epoch: int) -> None:
        """Losses of every row under the model as it is now, for methods that ask for them.

        In a short run a row's logit says more about when it was last seen than about what it is:
        early on the model knew nothing. Rows scored by one and the same model can be compared.
        """
        self.tuned_logits, self.tuned_weights = self.method.logits(), self.method.weights()
        losses = self._all_user_losses()
        canaries = self._losses(self.canaries)
        if not (bool(torch.isfinite(losses).all()) and bool(torch.isfinite(canaries).all())):
            return
        self.last_nll = losses.clone()
        first = len(self.data.user)
        self.method.relearn(
            StepRecord(
                torch.arange(first),
                losses,
                torch.arange(first, first + len(self.canaries)),
                canaries,
                self.step - 1,
                epoch,
            )
        )

    def _all_user_losses(self) -> Tensor:
        rows: Sequence[Any] = self.data.user
        if not self.pairs:
            return self._losses(rows)
        own = self.processes.share(range(len(rows)))
        now = reference_log_probs(
            self.model, [rows[i] for i in own], SCORING_BATCH, lambda: False
        ).double()
        before = self.reference_pairs[own].double()
        losses = dpo_loss_B(now[:, 0], now[:, 1], before[:, 0], before[:, 1], self.settings.beta)
        return self.processes.gather_shares(losses, len(rows))

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
        rows: Sequence[Any] = self.data.validation
        last = self.finished
        if not rows or not (last or self.step % VALIDATION_EVERY == 0):
            return
        if not self.processes.leads:
            return
        size = self.settings.hyperparameters.batch_size
        start = (self.step // VALIDATION_EVERY - 1) * size % len(rows)
        self.metrics |= self._validation_metrics("valid", slice(start, start + size))
        if last:
            self.metrics |= self._validation_metrics("full_valid", slice(None))

    def _validation_metrics(self, prefix: str, part: slice) -> dict[str, float]:
        rows: Sequence[Any] = self.data.validation[part]
        if self.pairs:
            found = evaluate_pairs(
                self.model,
                rows,
                self.reference_validation[part],
                self.settings.beta,
                SCORING_BATCH,
                self._stop_alone,
            )
            return {
                f"{prefix}_loss": found.loss,
                f"{prefix}_reward_margin": found.margin,
                f"{prefix}_reward_accuracy": found.accuracy,
            }
        loss, accuracy = evaluate_rows(self.model, rows, SCORING_BATCH, self._stop_alone)
        return {f"{prefix}_loss": loss, f"{prefix}_mean_token_accuracy": accuracy}

    def _stop_alone(self) -> bool:
        """Several processes stop together, between steps."""
        return self.processes.count == 1 and self.stop()

    def checkpoint_if_due(self) -> None:
        options = self.settings.checkpoints
        late = time.monotonic() - self.saved_at >= options.every_seconds
        if self.step % options.every_steps == 0 or self.finished or self.processes.any(late):
            self.checkpoint(announce=True)

    def checkpoint(self, *, announce: bool) -> None:
        if self.saved_step == self.step or self.step == 0:
            return
        self.saved_at, self.saved_step = time.monotonic(), self.step
        if self.processes.leads:
            folder = save_checkpoint(
                self.work, training_state(self), self.settings.checkpoints.keep
            )
            if announce:
                self.emit(
                    "checkpoint",
                    step=self.first_step + self.step,
                    folder=str(folder),
                    metrics=self.metrics,
                )
        self.processes.wait()


def _planned_steps(method: TuningMethod, user_steps: int) -> int:
    """Steps until `user_steps` of them have read user rows."""
    step = 0
    while user_steps > 0:
        user_steps -= method.reads(step) != "alignment"
        step += 1
    return step


def _first_row(rows: Sequence[TokenRow] | Sequence[PairRow]) -> TokenRow:
    first = rows[0]
    return first.chosen if isinstance(first, PairRow) else first
