"""Tuning with differential privacy: DP-SGD in the place of the defended step.

Every step draws a Poisson sample of the rows, which may be empty; private_gradients.py has the
equation. The number of steps is known before the first, T = n_epochs ceil(N / B) at q = B / N, and
so is the noise. What was spent, as (sigma, q, steps), is part of every checkpoint; a resumed run
goes on counting from there, with randomness that no earlier step has used.

The guarantee is about the adapter. Losses in the log and the report's measurements are for the
owner of the rows; they are not noised.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from opacus.accountants import RDPAccountant

from workers.pipeline.emit import Emit
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.private_gradients import ROWS_AT_ONCE, PrivateGradients
from workers.pipeline.processes import Processes
from workers.pipeline.rows import TokenRow
from workers.pipeline.training import Training
from workers.pipeline.tuning_inputs import TuneData, TuneSettings


class PrivateTraining(Training):
    """A tuning run whose steps are those of DP-SGD; rows, checkpoints and metrics are as ever."""

    def __init__(
        self,
        model: Any,
        data: TuneData,
        settings: TuneSettings,
        work: Path,
        emit: Emit,
        stop: Callable[[], bool],
        processes: Processes,
    ) -> None:
        super().__init__(model, data, settings, work, emit, stop, processes)
        plan = settings.private
        assert plan is not None
        if plan.steps != self.steps:
            raise ValueError(f"{plan.steps} steps are planned for, {self.steps} would be taken")
        self._plan = plan
        self._rows: list[TokenRow] = list(data.user)  # type: ignore[arg-type]
        self._first = {
            name: p.detach().clone() for name, p in self.parameters.items() if "lora_B" in name
        }
        self._gradients = PrivateGradients(
            model,
            self.parameters,
            self.optimizer,
            noise_multiplier=plan.noise_multiplier,
            clip=plan.clip,
            expected_batch=plan.sampling_rate * len(self._rows),
            rows_at_once=ROWS_AT_ONCE * settings.hyperparameters.batch_size,
        )
        accountant = RDPAccountant()
        # Opacus' accountant keeps the history; the curves are computed from it by analyses.privacy.
        accountant.history = self.spent
        self._gradients.optimizer.attach_step_hook(
            accountant.get_optimizer_hook_fn(sample_rate=plan.sampling_rate)
        )

    def advance(self) -> None:
        """One step of DP-SGD."""
        started = time.monotonic()
        if sum(steps for _, _, steps in self.spent) != self.step:
            raise PipelineFailure(
                "internal_error",
                f"The account of the privacy spent does not fit step {self.step}: {self.spent}. "
                "Remove the work folder's checkpoints to start anew.",
            )
        random = self._plan.randomness(self.step)
        ids = random.included(len(self._rows), self._plan.sampling_rate)
        drawn = self._gradients.step([self._rows[i] for i in ids], random)
        self.step += 1
        self.user_step += 1
        self.trained_tokens += drawn.tokens
        self.last_nll[ids] = drawn.losses
        self.metrics = {
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "drawn_rows": len(ids),
        }
        if ids:
            self.metrics |= {
                "train_loss": float(drawn.losses.nanmean().nan_to_num()),
                "train_mean_token_accuracy": drawn.correct / drawn.tokens,
                "clipped_share": float((drawn.norms > self._plan.clip).double().mean()),
            }
        if drawn.discarded:
            self.metrics["discarded_rows"] = drawn.discarded
        self._validate()
        self.metrics["seconds"] = round(time.monotonic() - started, 4)
        self.emit("metrics", step=self.step, total_steps=self.announced_steps, **self.metrics)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._gradients.close()

    def check_moved(self) -> None:
        """Raises PipelineFailure(internal_error) for a run that never reached the adapter."""
        moved = max(
            (float((self.parameters[n].detach() - b).abs().max()) for n, b in self._first.items()),
            default=0.0,
        )
        finite = all(bool(torch.isfinite(p).all()) for p in self.parameters.values())
        if moved == 0.0 or not finite:
            raise PipelineFailure(
                "internal_error",
                "Private tuning left the adapter as it was, or not finite. Lower "
                "learning_rate_multiplier or the noise; if that does not help, the base model "
                "cannot be tuned with privacy.",
            )
