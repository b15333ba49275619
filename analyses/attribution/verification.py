"""Scores checked against measured further training of the adapter."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyses.attribution.further_training import (
    NEAR_ZERO,
    Measured,
    Plan,
    adjusted,
    agreement,
    further_training,
)
from analyses.attribution.gradients import Blocks, BlockVectors, completion_losses
from analyses.attribution.rows import EncodedRow, TargetRows, batches, collate
from analyses.attribution.spec import FurtherTraining, MethodAgreement, Verification
from analyses.attribution.subject import AdamState
from analyses.context import AnalysisContext

Array = NDArray[np.float64]
MOST_RATE, RELATIVE_MOVE = 0.05, 0.01
# Losses are float32: a change below this is rounding.
ROUNDING = 1e-6


class AdapterProblem:
    """An adapter that is trained further on its rows while targets are watched."""

    def __init__(
        self,
        model: Any,
        blocks: Blocks,
        rows: Sequence[EncodedRow],
        targets: TargetRows,
        batch_size: int = 16,
    ) -> None:
        self._model, self._rows, self._targets = model, rows, targets
        self._batch_size = batch_size
        self._device = blocks[0].weight.device
        self.parameters: list[Tensor] = [block.weight for block in blocks]

    @property
    def n_rows(self) -> int:
        return len(self._rows)

    def row_losses(self, rows: Sequence[int]) -> Tensor:
        chosen = [self._rows[index] for index in rows]
        losses: list[Tensor] = [torch.empty(0)] * len(chosen)
        for part in batches(chosen, self._batch_size):
            found = completion_losses(self._model, collate([chosen[i] for i in part], self._device))
            for place, loss in zip(part, found, strict=True):
                losses[place] = loss
        return torch.stack(losses)

    @torch.no_grad()
    def target_values(self) -> Array:
        values = []
        for start in range(0, len(self._targets.rows), self._batch_size):
            batch = collate(self._targets.rows[start : start + self._batch_size], self._device)
            values.append(completion_losses(self._model, batch).double().cpu())
        return np.asarray((self._targets.sign_QR.double() @ torch.cat(values)).numpy())


def further_rate(
    wanted: float | None, steps: int, blocks: Blocks, mean_gradient: BlockVectors
) -> float:
    """The rate asked for; else SGD moves the adapter by 1% of its norm in `steps`, at most 0.05."""
    if wanted is not None:
        return wanted
    size = torch.stack([block.weight.detach().norm() for block in blocks]).norm()
    pull = torch.stack([part.norm() for part in mean_gradient]).norm()
    if float(pull) == 0:
        return MOST_RATE
    return min(MOST_RATE, float(RELATIVE_MOVE * size / (steps * pull)))


def adamw_from(
    state: AdamState | None, rate: float, betas: tuple[float, float] = (0.9, 0.999)
) -> Any:
    """Makes AdamW without weight decay, with the kept moments where there are any."""

    def make(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(list(parameters), lr=rate, betas=betas, weight_decay=0.0)
        if state is not None:
            kept = {
                index: {
                    "step": torch.tensor(float(state.step)),
                    "exp_avg": state.first[index].view_as(parameter).clone(),
                    "exp_avg_sq": state.second[index].view_as(parameter).clone(),
                }
                for index, parameter in enumerate(parameters)
            }
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": kept, "param_groups": groups})
        return optimizer

    return make


def measure(
    problem: AdapterProblem,
    candidates: Sequence[int],
    plan: Plan,
    seeds: Sequence[int],
    context: AnalysisContext,
    key: str,
) -> Measured:
    """further_training seed by seed; finished seeds lie in the work folder and are not repeated."""
    parts: list[Measured] = []
    context.work.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{key} {list(candidates)} {plan[:4]}".encode()).hexdigest()[:16]
    for number, seed in enumerate(seeds):
        path = context.work / f"further-{name}-{seed}.npz"
        if not path.is_file():

            def each(done: int, total: int, number: int = number) -> None:
                context.check_stop()
                context.progress("training further", number * total + done, len(seeds) * total)

            _save(path, further_training(problem, candidates, plan, [seed], each=each))
        with np.load(path) as kept:
            parts.append(Measured(kept["u"], kept["full"]))
    return Measured(
        np.concatenate([part.u_STQI for part in parts]),
        np.concatenate([part.full_STQ for part in parts]),
    )


def _save(path: Path, measured: Measured) -> None:
    aside = path.with_suffix(".part.npz")
    np.savez(aside, u=measured.u_STQI, full=measured.full_STQ)
    aside.replace(path)


def verify(
    measured: Measured,
    settings: FurtherTraining,
    lines: Sequence[int],
    predicted_QI: Mapping[str, Array],
    first: str,
    rate: float,
) -> tuple[Verification, list[str], Array]:
    """(the report, warnings, a[Q, I] at the last checkpoint).

    Under equation 13 the predictions lose their mean over the candidates, too, as the measured
    values do: both sides get the same adjustment.
    """
    a_STQI = adjusted(measured, settings.adjustment)
    a_TQI = a_STQI.mean(axis=0)
    centred = {
        name: value - value.mean(axis=1, keepdims=True)
        if settings.adjustment == "left_out_mean"
        else value
        for name, value in predicted_QI.items()
    }
    rows, skipped = [], 0
    for place, step in enumerate(settings.checkpoints):
        for name, value in centred.items():
            found = agreement(a_TQI[place], value, NEAR_ZERO)
            skipped = found.skipped
            rows.append(
                MethodAgreement(
                    method=name,
                    step=step,
                    cosine=found.cosine,
                    cosine_sem=found.cosine_sem,
                    spearman=found.spearman,
                    spearman_sem=found.spearman_sem,
                )
            )
    last_SI = a_STQI[:, -1].mean(axis=1)
    seeds = len(last_SI)
    sem = last_SI.std(axis=0, ddof=1) / np.sqrt(seeds) if seeds > 1 else np.zeros(len(lines))
    warnings = []
    if skipped:
        warnings.append(f"{skipped} targets hardly changed in further training and were skipped.")
    if np.abs(a_TQI[-1]).max() < ROUNDING:
        warnings.append(
            "Further training changed the targets by less than rounding; give a larger "
            "verification.learning_rate or more steps."
        )
    if settings.adjustment == "left_out_mean" and len(lines) < 20:
        warnings.append("Equation 13 wants at least 20 checked rows; full_run suits fewer.")
    report = Verification(
        lines=tuple(lines),
        learning_rate=rate,
        seeds=seeds,
        measured=tuple(last_SI.mean(axis=0).tolist()),
        sem=tuple(sem.tolist()),
        predicted=tuple(centred[first].mean(axis=0).tolist()),
        agreement=tuple(rows),
        skipped_targets=skipped,
    )
    return report, warnings, np.asarray(a_TQI[-1])
