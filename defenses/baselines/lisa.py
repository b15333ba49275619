"""Lisa: alignment and user steps take turns, each pulled back to where the other left off."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from defenses.method import (
    MethodContext,
    MethodError,
    PlainMethod,
    Reads,
    StepLosses,
    StepRecord,
    frozen_copy,
    shared_mean,
)
from jobspec.defense import LisaOptions

ANCHOR = "w_switch/"


class Phase(NamedTuple):
    """number: phases before this one, from 0; even ones read the alignment set."""

    number: int
    reads: Reads


def phase_of(step: int, options: LisaOptions) -> Phase:
    """The phase of step `step` (from 0): K1 alignment steps, K2 user steps, and again."""
    cycle, place = divmod(step, options.alignment_steps + options.user_steps)
    if place < options.alignment_steps:
        return Phase(2 * cycle, "alignment")
    return Phase(2 * cycle + 1, "user")


def total_steps(user_steps: int, options: LisaOptions) -> int:
    """Steps until user step number `user_steps` has been taken: n + K1 * ceil(n / K2).

    The run ends on a user step; alignment steps come on top and take no user row away (derived:
    the release lets them replace user steps, and drops the rows of those).
    """
    return user_steps + options.alignment_steps * -(-user_steps // options.user_steps)


def proximal_term(
    parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor], rho: float
) -> Tensor:
    """(rho/2) * sum over tensors of ||w - w_switch||^2; a scalar, differentiable in w."""
    squares = [(w - anchor[name].detach()).square().sum() for name, w in parameters.items()]
    if not squares:
        raise MethodError("lisa needs an adapter to tune; the model has no trainable parameter")
    first = squares[0]
    return rho / 2 * torch.stack([square.to(first) for square in squares]).sum()


class LisaMethod(PlainMethod):
    """Alternating minimisation with a proximal pull.

        alignment phase (K1 steps):  c * mean_m a_m + (rho/2) ||w - w_switch||^2
        user phase (K2 steps):           mean_i l_i + (rho/2) ||w - w_switch||^2

    w_switch is w at the start of the phase, the last state of the other one (in the first phase:
    where tuning started). The pull acts from the first step whose number, from 0, is above
    warmup_share * total_steps; on several processes each adds its equal share.

    w_switch is copied in learn, after the last step of a phase: every process calls it, after the
    update and before a checkpoint. objective copies it only where that step was skipped, which
    left w as it was; so all processes and a resumed run copy the same weights.

    Source: Lisa, arXiv 2405.18641, and its release. K counts optimiser steps (the release's
    counter counts micro-batches).
    """

    uses_alignment: ClassVar[bool] = True

    def __init__(self, context: MethodContext, options: LisaOptions) -> None:
        self.context, self.options = context, options
        self.phase = 0
        self.w_switch = frozen_copy(context.parameters)
        self.warmup = round(options.warmup_share * total_steps(context.user_steps, options), 9)

    def reads(self, step: int) -> Reads:
        return phase_of(step, self.options).reads

    def objective(self, losses: StepLosses) -> Tensor:
        self._enter(losses.step)
        if self.reads(losses.step) == "alignment":
            mean = shared_mean(losses.alignment_B, losses.alignment_count)
            loss = self.options.alignment_coefficient * mean
        else:
            loss = shared_mean(losses.user_B, losses.user_count)
        if self.options.proximal == 0 or losses.step <= self.warmup:
            return loss
        pull = proximal_term(self.context.parameters, self.w_switch, self.options.proximal)
        return loss + pull.to(loss) / losses.processes

    def learn(self, record: StepRecord) -> dict[str, float]:
        self._enter(record.step + 1)
        return {}

    def _enter(self, step: int) -> None:
        number = phase_of(step, self.options).number
        if number != self.phase:
            self.phase, self.w_switch = number, frozen_copy(self.context.parameters)

    def state(self) -> dict[str, Tensor]:
        saved = {f"{ANCHOR}{name}": tensor.clone() for name, tensor in self.w_switch.items()}
        return {"phase": torch.tensor(self.phase), **saved}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from the state of a run of the same adapter; MethodError if it is not one."""
        anchor = {
            name.removeprefix(ANCHOR): tensor
            for name, tensor in state.items()
            if name.startswith(ANCHOR)
        }
        shapes = {name: tensor.shape for name, tensor in anchor.items()}
        expected = self.context.parameters
        if "phase" not in state or shapes != {name: p.shape for name, p in expected.items()}:
            raise MethodError(
                "the checkpoint is not one of lisa on this adapter; resume with the method, the "
                "model and the LoRA settings that it was made with"
            )
        self.phase = int(state["phase"])
        self.w_switch = {
            name: tensor.detach().to(expected[name], copy=True) for name, tensor in anchor.items()
        }
