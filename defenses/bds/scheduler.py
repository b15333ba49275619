"""The scalar data scheduler: one logit per training row, trained beside the model."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from defenses.bds.ranking import effective_sample_size
from jobspec.defense import SchedulerOptions

Transform = Literal["softmax", "sigmoid"]

DEFAULT_INITIAL_LOGIT: Mapping[Transform, float] = {"softmax": 0.1, "sigmoid": -1e-4}


class RowIdError(ValueError):
    """A batch names a row the scheduler does not know, or does not match its losses."""


class NonFiniteLossError(ValueError):
    """A response loss is NaN or infinite; one such value would spoil the logits of all rows."""

    def __init__(self, row_ids: list[int]) -> None:
        self.row_ids = row_ids
        super().__init__(
            f"rows {row_ids} have a loss that is not finite; skip this step for the model and the "
            "scheduler alike, or lower the learning rate"
        )


class SchedulerStateError(ValueError):
    """A saved scheduler state belongs to another training set or another transform."""


class SchedulerStep(NamedTuple):
    """loss: L_v before the step. gradient_norm: of L_v over all N logits, before clipping."""

    loss: float
    gradient_norm: float


def softmax_weights(v_N: Tensor) -> Tensor:
    """sigma_i = N * exp(v_i) / sum_k exp(v_k): non-negative, mean 1 over the whole set. [N]"""
    return v_N.shape[0] * torch.softmax(v_N, dim=0)


def sigmoid_weights(v_N: Tensor) -> Tensor:
    """sigma_i = 2 / (1 + exp(-v_i)): in (0, 2), each row on its own. [N]"""
    return 2.0 * torch.sigmoid(v_N)


def transform_weights(v_N: Tensor, transform: Transform) -> Tensor:
    """Weights sigma(v) of all N rows under the named transform."""
    return softmax_weights(v_N) if transform == "softmax" else sigmoid_weights(v_N)


def negative_entropy(v_N: Tensor, transform: Transform = "softmax") -> Tensor:
    """sum_k pi_k log pi_k over the whole set, between -log N (uniform) and 0 (one row).

    pi = softmax(v). Under the sigmoid transform pi = sigma / sum sigma (derived).
    """
    if transform == "softmax":
        log_pi_N = torch.log_softmax(v_N, dim=0)
    else:
        log_pi_N = torch.log_softmax(torch.nn.functional.logsigmoid(v_N), dim=0)
    return (log_pi_N.exp() * log_pi_N).sum()


def gaussian_penalty(v_N: Tensor, mu: float = 0.0, s: float = 1.0) -> Tensor:
    """sum_k (v_k - mu)^2 / (2 s^2) + log(s sqrt(2 pi)): minus the log density of v ~ N(mu, s^2)."""
    per_row_N = (v_N - mu).square() / (2.0 * s * s) + math.log(s * math.sqrt(2.0 * math.pi))
    return per_row_N.sum()


def scheduler_loss(
    v_N: Tensor,
    row_ids_B: Tensor,
    losses_B: Tensor,
    *,
    transform: Transform = "softmax",
    entropy_coefficient: float = 0.0,
    gaussian_coefficient: float = 0.0,
) -> Tensor:
    """What the logits v minimise, with the response losses l held constant.

        L_v = (1/b) sum_{i in B} sigma_i(v) l_i + c_H sum_k pi_k log pi_k
              + c_G sum_k [ v_k^2 / 2 + log sqrt(2 pi) ]

    v_N: [N] logits; row_ids_B: int64 [b]; losses_B: [b] nats per token, detached here.
    Source: Bayesian Data Scheduler, arXiv 2510.27172, as released. The paper's second term, the
    loss under a safety-agnostic model, is not in the release; the softmax centres the losses.
    """
    sigma_N = transform_weights(v_N, transform)
    loss = (sigma_N[row_ids_B] * losses_B.detach()).mean()
    if entropy_coefficient:
        loss = loss + entropy_coefficient * negative_entropy(v_N, transform)
    if gaussian_coefficient:
        loss = loss + gaussian_coefficient * gaussian_penalty(v_N)
    return loss


def scheduler_gradient(v_N: Tensor, row_ids_B: Tensor, losses_B: Tensor) -> Tensor:
    """Closed form of dL_v/dv for the softmax transform without priors, [N].

        g_j = (N/b) pi_j (n_j - S_B),  n_j = sum_{i in B, i = j} l_i,  S_B = sum_{i in B} pi_i l_i

    Every logit moves, those outside the batch slightly up; the N components sum to 0. Derived;
    equal to autograd.
    """
    pi_N = torch.softmax(v_N, dim=0)
    own_N = torch.zeros_like(v_N).index_add(0, row_ids_B, losses_B)
    S_B = (pi_N[row_ids_B] * losses_B).sum()
    return v_N.shape[0] / row_ids_B.shape[0] * pi_N * (own_N - S_B)


def bds_objective(
    alignment_losses: Tensor,
    user_losses: Tensor,
    weights: Tensor,
    alignment_coefficient: float = 1.0,
) -> Tensor:
    """The model's loss: L_theta = c_a * mean_m a_m + mean_i w_i l_i, with w held constant.

    alignment_losses a: [b] response losses of trusted rows; user_losses l and weights w: [b].
    The weights are not renormalised within the batch. Source: arXiv 2510.27172, as released.
    """
    weighted = (weights.detach().to(user_losses) * user_losses).mean()
    return alignment_coefficient * alignment_losses.mean() + weighted


class ScalarScheduler:
    """Logits v [N] and their AdamW optimiser.

    One step per model step, from the losses of the same forward pass, before the model is updated:

        w_i = sigma_i(v)                                 for the model's loss, detached
        v <- AdamW(v, clip(dL_v/dv, global norm clip))   no weight decay

    Adam's normalisation is what makes the weights move apart: plain gradient descent at the same
    rate leaves them all at 1. With gradient accumulation or several processes, pass the rows and
    losses of the whole step to one call. Everything is float64 on the CPU: N numbers cost nothing
    next to the model, and a resumed run continues bit for bit.

    Source: Bayesian Data Scheduler, arXiv 2510.27172 (released update, scalar scheduler).
    """

    def __init__(self, row_count: int, options: SchedulerOptions) -> None:
        if row_count < 1:
            raise RowIdError(f"a scheduler needs at least one row, got {row_count}")
        self.options = options
        initial = options.initial_logit
        if initial is None:
            initial = DEFAULT_INITIAL_LOGIT[options.transform]
        self.v_N = torch.nn.Parameter(torch.full((row_count,), initial, dtype=torch.float64))
        self._optimizer = torch.optim.AdamW(
            [self.v_N],
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
            weight_decay=0.0,
        )

    @property
    def row_count(self) -> int:
        return int(self.v_N.shape[0])

    def all_weights(self) -> Tensor:
        """sigma(v) of every row, detached float64 [N]."""
        return transform_weights(self.v_N.detach(), self.options.transform)

    def weights(self, row_ids_B: Tensor) -> Tensor:
        """sigma_i(v) of the given rows, normalised over all N, detached float64 [B]."""
        return self.all_weights()[self._known(row_ids_B)]

    def effective_sample_size(self) -> float:
        """Share of the set that the weights really use, in (0, 1]; see ranking."""
        return effective_sample_size(self.all_weights())

    def step(self, row_ids_B: Tensor, losses_B: Tensor) -> SchedulerStep:
        """Moves v once by the losses of the given rows.

        Raises RowIdError for unknown rows or a length mismatch, NonFiniteLossError for a NaN or
        infinite loss; v is untouched then.
        """
        row_ids_B = self._known(row_ids_B)
        losses_B = losses_B.detach().to(self.v_N)
        if row_ids_B.shape != losses_B.shape:
            raise RowIdError(
                f"got {row_ids_B.numel()} row ids for {losses_B.numel()} losses; "
                "give one loss per row"
            )
        finite_B = torch.isfinite(losses_B)
        if not bool(finite_B.all()):
            raise NonFiniteLossError(row_ids_B[~finite_B].tolist())
        loss = scheduler_loss(
            self.v_N,
            row_ids_B,
            losses_B,
            transform=self.options.transform,
            entropy_coefficient=self.options.entropy_coefficient,
            gaussian_coefficient=self.options.gaussian_coefficient,
        )
        (self.v_N.grad,) = torch.autograd.grad(loss, [self.v_N])
        norm = torch.nn.utils.clip_grad_norm_([self.v_N], self.options.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return SchedulerStep(loss=float(loss.detach()), gradient_norm=float(norm))

    def state_dict(self) -> dict[str, Any]:
        """Copies of the logits and both optimiser moments: enough to continue bit for bit."""
        optimizer_state = self._optimizer.state_dict()["state"].get(0, {})
        return {
            "transform": self.options.transform,
            "v": self.v_N.detach().clone(),
            "optimizer": {name: value.clone() for name, value in optimizer_state.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state_dict of a scheduler of the same set and transform.

        Raises SchedulerStateError if the number of rows or the transform differs.
        """
        v_N = state["v"]
        if tuple(v_N.shape) != tuple(self.v_N.shape):
            raise SchedulerStateError(
                f"saved state has {v_N.shape[0]} rows, this training set has {self.row_count}; "
                "resume with the file the checkpoint was made from"
            )
        if state["transform"] != self.options.transform:
            raise SchedulerStateError(
                f"saved state uses the {state['transform']} transform, "
                f"the options ask for {self.options.transform}"
            )
        with torch.no_grad():
            self.v_N.copy_(v_N)
        optimizer_state = {name: value.clone() for name, value in state["optimizer"].items()}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict(
            {"state": {0: optimizer_state} if optimizer_state else {}, "param_groups": groups}
        )

    def _known(self, row_ids_B: Tensor) -> Tensor:
        row_ids_B = row_ids_B.detach().to(device="cpu", dtype=torch.int64)
        if row_ids_B.numel() == 0:
            raise RowIdError("got an empty batch of row ids")
        lowest, highest = int(row_ids_B.min()), int(row_ids_B.max())
        if lowest < 0 or highest >= self.row_count:
            raise RowIdError(
                f"row ids span {lowest}..{highest}, known rows are 0..{self.row_count - 1}"
            )
        return row_ids_B
