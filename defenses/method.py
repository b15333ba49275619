"""What every tuning-stage defense has in common: one objective a step, and what it learns from it.

The training loop owns the model, its optimiser, the order of the rows and the exchange between
processes. A method turns the losses of a step into the number that is differentiated, and may
learn from them afterwards. BDS, its relatives and the baselines all fit this shape, so they run
on the same rows, the same adapter and the same loop.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Reads = Literal["both", "user", "alignment"]


class MethodError(ValueError):
    """A method means nothing on the set or model it was given; the message says what to do."""


class RowFeatures(NamedTuple):
    """What a neural scheduler reads of each row: one entry a row of the set, canaries last.

    Either embeddings_ND (float32 [N, D], one vector a row) or tokens (N sequences of ids of the
    scorer's own tokenizer). tokenizer: a fingerprint of whatever made them.
    """

    tokenizer: str
    embeddings_ND: Tensor | None = None
    tokens: Sequence[Sequence[int]] | None = None


class MethodContext(NamedTuple):
    """What a method may know of the run before it starts.

    row_count: N user rows, ids 0..N-1. canary_count: rows N..N+canary_count-1, which the model
    never learns. user_steps: steps that read user rows, in all; steps_per_epoch of them make an
    epoch. parameters: the adapter. reference: per user row, the log-probabilities of its
    supervised tokens under the model before tuning, [n_i]; empty unless the method asked for it.
    features: for neural schedulers only. seed: of the method's own randomness.
    """

    row_count: int
    canary_count: int
    user_steps: int
    steps_per_epoch: int
    parameters: Mapping[str, Tensor]
    seed: int
    reference: Sequence[Tensor] = ()
    features: RowFeatures | None = None


class TokenLosses(NamedTuple):
    """Supervised tokens of the user rows of this process.

    nll_BT: -log p of each token, differentiable, 0 where nothing is supervised. supervised_BT:
    bool [B, T].
    """

    nll_BT: Tensor
    supervised_BT: Tensor


class StepLosses(NamedTuple):
    """One process's part of one step.

    user_B, alignment_B: per-row losses, differentiable; empty when the step does not read that
    set. row_ids_B: ids of user_B. step_ids: ids of the user rows of the whole step, over all
    processes. user_count, alignment_count: rows of the whole step. processes: how many share it.
    """

    user_B: Tensor
    alignment_B: Tensor
    row_ids_B: Tensor
    step_ids: Tensor
    user_count: int
    alignment_count: int
    step: int
    epoch: int
    processes: int
    tokens: TokenLosses | None = None


class StepRecord(NamedTuple):
    """What a whole step measured, the same on every process: float64 on the CPU.

    Losses are from before the model's update. Canary rows are ids N and above.
    """

    row_ids: Tensor
    losses: Tensor
    canary_ids: Tensor
    canary_losses: Tensor
    step: int
    epoch: int


class TuningMethod(Protocol):
    """One tuning-stage defense.

    objective returns this process's share of the number to descend: summed over the processes it
    is the step's objective. learn is called once after every step whose loss was finite, with
    equal records on every process, and returns numbers for the step's metrics. The state is a
    flat mapping of tensors, enough to continue bit for bit.
    """

    uses_alignment: ClassVar[bool]
    uses_reference: ClassVar[bool]
    uses_canaries: ClassVar[bool]
    # Weights are normalised within a batch, so a batch must be a fair sample of the rows.
    compares_batches: ClassVar[bool]

    @property
    def rescores(self) -> bool:
        """Whether relearn wants the losses of all rows at the end of every epoch."""
        ...

    def reads(self, step: int) -> Reads:
        """Which sets step `step` (from 0) reads."""
        ...

    def objective(self, losses: StepLosses) -> Tensor: ...

    def learn(self, record: StepRecord) -> dict[str, float]: ...

    def relearn(self, record: StepRecord) -> None:
        """Learn from the losses of the whole set, canaries too, under the model as it is now."""
        ...

    def weights(self) -> Tensor | None:
        """Safety weights of the user rows, mean 1 where normalised, float64 [N]; None without."""
        ...

    def logits(self) -> Tensor | None:
        """The numbers behind the weights, of user rows and canaries, float64 [N + canaries]."""
        ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: Mapping[str, Tensor]) -> None: ...


def shared_mean(values_B: Tensor, count: int) -> Tensor:
    """This process's share of a mean over `count` rows of all processes; 0 for no rows."""
    return values_B.sum() / max(count, 1)


class PlainMethod:
    """Plain tuning, L = mean_i l_i, and the base of methods without a state of their own."""

    uses_alignment: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = False
    uses_canaries: ClassVar[bool] = False
    compares_batches: ClassVar[bool] = False

    @property
    def rescores(self) -> bool:
        return False

    def reads(self, step: int) -> Reads:
        return "both" if self.uses_alignment else "user"

    def objective(self, losses: StepLosses) -> Tensor:
        return shared_mean(losses.user_B, losses.user_count)

    def learn(self, record: StepRecord) -> dict[str, float]:
        return {}

    def relearn(self, record: StepRecord) -> None:
        return None

    def weights(self) -> Tensor | None:
        return None

    def logits(self) -> Tensor | None:
        return None

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise MethodError("the checkpoint is of a method with a state; this one has none")


def frozen_copy(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached copies of the adapter as it is now."""
    with torch.no_grad():
        return {name: tensor.detach().clone() for name, tensor in parameters.items()}
