"""The scalar data scheduler: one logit per training row, trained beside the model."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from defenses.bds.errors import NonFiniteLossError as NonFiniteLossError
from defenses.bds.errors import RowIdError as RowIdError
from defenses.bds.errors import SchedulerStateError as SchedulerStateError
from defenses.bds.ranking import effective_sample_size
from defenses.bds.sampler import make_sampler
from jobspec.defense import SchedulerOptions

Transform = Literal["softmax", "sigmoid"]

FASTEST_RATE = 5e-2
LARGEST_CLIMB = 10.0
LARGEST_DRIFT = 0.5
DEFAULT_INITIAL_LOGIT: Mapping[Transform, float] = {"softmax": 0.1, "sigmoid": -1e-4}


class SchedulerStep(NamedTuple):
    """loss: L_v before the step, nats per token. gradient_norm: of what falls, before clipping.

    What falls is L_v under AdamW and -log posterior under Langevin dynamics.
    """

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


class Descent(NamedTuple):
    """loss: L_v, for the metrics. target: what the sampler descends, differentiable."""

    loss: float
    target: Tensor


def scheduler_potential(
    v_K: Tensor,
    row_ids_B: Tensor,
    losses_B: Tensor,
    row_count: int,
    *,
    transform: Transform = "softmax",
    entropy_coefficient: float = 0.0,
    gaussian_coefficient: float = 0.0,
) -> Tensor:
    """Minibatch estimate of U = -log p(v | losses), what Langevin dynamics descends.

        U(v) = sum_{i=1..N} sigma_i(v) l_i - log p(v)
             ~ (N/b) sum_{i in B} sigma_i(v) l_i + c_H sum_k pi_k log pi_k
               + c_G (N/K) sum_k [ v_k^2 / 2 + log sqrt(2 pi) ]

    N: row_count, rows of the whole set. v_K: all N logits (K = N: scalar scheduler), or those of
    the batch, numbered 0..b-1 (K = b: neural). The losses are a sum over the set here and a mean
    in scheduler_loss, so the data term is N times as large; the priors enter as they are. c_G = 1
    is therefore the prior v ~ N(0, I) itself, while scheduler_loss needs c_G = 1/N for the same
    maximum. Averaged over all batches the data term is exact for the scalar scheduler; the batch
    softmax of the neural one makes it an approximation.

    Without a Gaussian prior the posterior is improper: the weights are bounded, so far out nothing
    calls v back, and the chain drifts. One draw moves a row by about (eta/2)(N/b) l_i at uniform
    weights; choose eta so that this stays below 1. The noise of the minibatches comes on top of the
    Langevin noise, and one sample ranks the rows far worse than AdamW's point (simulated): this is
    the theory's sampler, not the better defense.

    Source: arXiv 2510.27172 (SGLD); the scaling and the last paragraph derived.
    """
    sigma_K = transform_weights(v_K, transform)
    potential = row_count * (sigma_K[row_ids_B] * losses_B.detach()).mean()
    if entropy_coefficient:
        potential = potential + entropy_coefficient * negative_entropy(v_K, transform)
    if gaussian_coefficient:
        scale = gaussian_coefficient * row_count / v_K.shape[0]
        potential = potential + scale * gaussian_penalty(v_K)
    return potential


def descent(
    v_K: Tensor, row_ids_B: Tensor, losses_B: Tensor, row_count: int, options: SchedulerOptions
) -> Descent:
    """L_v, and the target of the sampler that the options name: L_v itself or the potential."""
    loss = scheduler_loss(
        v_K,
        row_ids_B,
        losses_B,
        transform=options.transform,
        entropy_coefficient=options.entropy_coefficient,
        gaussian_coefficient=options.gaussian_coefficient,
    )
    if options.sampler == "adam":
        return Descent(float(loss.detach()), loss)
    potential = scheduler_potential(
        v_K,
        row_ids_B,
        losses_B,
        row_count,
        transform=options.transform,
        entropy_coefficient=options.entropy_coefficient,
        gaussian_coefficient=options.gaussian_coefficient,
    )
    return Descent(float(loss.detach()), potential)


def checked_row_ids(row_ids_B: Tensor, row_count: int) -> Tensor:
    """The ids as int64 on the CPU; raises RowIdError for none, or one outside 0..row_count-1."""
    row_ids_B = row_ids_B.detach().to(device="cpu", dtype=torch.int64)
    if row_ids_B.numel() == 0:
        raise RowIdError("got an empty batch of row ids")
    lowest, highest = int(row_ids_B.min()), int(row_ids_B.max())
    if lowest < 0 or highest >= row_count:
        raise RowIdError(f"row ids span {lowest}..{highest}, known rows are 0..{row_count - 1}")
    return row_ids_B


def checked_losses(row_ids_B: Tensor, losses_B: Tensor) -> Tensor:
    """The losses as float64 on the CPU, detached.

    Raises RowIdError unless there is one for each id, NonFiniteLossError for NaN or infinity.
    """
    losses_B = losses_B.detach().to(device="cpu", dtype=torch.float64)
    if row_ids_B.shape != losses_B.shape:
        raise RowIdError(
            f"got {row_ids_B.numel()} row ids for {losses_B.numel()} losses; give one loss per row"
        )
    finite_B = torch.isfinite(losses_B)
    if not bool(finite_B.all()):
        raise NonFiniteLossError(row_ids_B[~finite_B].tolist())
    return losses_B


def scheduler_rate(options: SchedulerOptions, steps: int, steps_per_epoch: int) -> float:
    """AdamW rate of v in a run of so many steps.

        rate = min(5e-2, 10 / steps)               unless the options give one
        rate = min(that, 0.5 / steps_per_epoch)    where the logits are estimated anew every epoch

    A row that is learned well climbs by about the rate each step, so rate * steps bounds its logit;
    the release's 5e-3 over 2000 steps makes that 10. Short runs would need more than 5e-2, but
    a scheduler that fast runs after single batches (brief: 0.2 collapses). A row drifts upwards
    until it is drawn, by rate * steps_per_epoch at most: beside an estimate from all rows that is
    noise, so it is kept to half a unit. Derived.
    """
    if options.learning_rate is not None:
        return options.learning_rate
    rate = min(FASTEST_RATE, LARGEST_CLIMB / max(steps, 1))
    if options.rescore:
        rate = min(rate, LARGEST_DRIFT / max(steps_per_epoch, 1))
    return rate


class ScalarScheduler:
    """Logits v [N] and how they move.

    One step per model step, from the losses of the same forward pass, before the model is updated:

        w_i = sigma_i(v)                                 for the model's loss, detached
        adam: v <- AdamW(v, clip(dL_v/dv, global norm clip))   no weight decay, a point estimate
        sgld: v <- v - (eta/2) dU/dv + sqrt(eta) N(0, I)       a chain, see scheduler_potential

    Adam's normalisation is what makes the weights move apart: plain gradient descent at the same
    rate leaves them all at 1. With gradient accumulation or several processes, pass the rows and
    losses of the whole step to one call. Everything is float64 on the CPU: N numbers cost nothing
    next to the model, and a resumed run continues bit for bit. seed: of the Langevin noise; unused
    by Adam.

    Source: Bayesian Data Scheduler, arXiv 2510.27172 (released update, scalar scheduler; sgld is
    the theory's).
    """

    def __init__(self, row_count: int, options: SchedulerOptions, *, seed: int = 0) -> None:
        if row_count < 1:
            raise RowIdError(f"a scheduler needs at least one row, got {row_count}")
        self.options = options
        initial = options.initial_logit
        if initial is None:
            initial = DEFAULT_INITIAL_LOGIT[options.transform]
        self.v_N = torch.nn.Parameter(torch.full((row_count,), initial, dtype=torch.float64))
        rate = FASTEST_RATE if options.learning_rate is None else options.learning_rate
        self._sampler = make_sampler({"": self.v_N}, options, rate, seed)

    @property
    def row_count(self) -> int:
        return int(self.v_N.shape[0])

    def all_weights(self) -> Tensor:
        """sigma(v) of every row, detached float64 [N]."""
        return transform_weights(self.v_N.detach(), self.options.transform)

    def weights(self, row_ids_B: Tensor) -> Tensor:
        """sigma_i(v) of the given rows, normalised over all N, detached float64 [B]."""
        return self.all_weights()[checked_row_ids(row_ids_B, self.row_count)]

    def effective_sample_size(self) -> float:
        """Share of the set that the weights really use, in (0, 1]; see ranking."""
        return effective_sample_size(self.all_weights())

    def step(self, row_ids_B: Tensor, losses_B: Tensor) -> SchedulerStep:
        """Moves v once by the losses of the given rows.

        Raises RowIdError for unknown rows or a length mismatch, NonFiniteLossError for a NaN or
        infinite loss; v is untouched then.
        """
        row_ids_B = checked_row_ids(row_ids_B, self.row_count)
        losses_B = checked_losses(row_ids_B, losses_B)
        found = descent(self.v_N, row_ids_B, losses_B, self.row_count, self.options)
        gradients = torch.autograd.grad(found.target, [self.v_N])
        return SchedulerStep(loss=found.loss, gradient_norm=self._sampler.move(gradients))

    def start_from(self, v_N: Tensor) -> None:
        """Put the logits where they are estimated to be; the sampler keeps its state."""
        with torch.no_grad():
            self.v_N.copy_(v_N)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the logits and of the sampler's state: enough to continue bit for bit.

        optimizer: AdamW's moments, empty before the first step and under sgld, which adds
        generator instead.
        """
        sampler = self._sampler.state()
        state: dict[str, Any] = {
            "transform": self.options.transform,
            "v": self.v_N.detach().clone(),
            "optimizer": {
                name.removeprefix("adam/"): value
                for name, value in sampler.items()
                if name.startswith("adam/")
            },
        }
        if "generator" in sampler:
            state["generator"] = sampler["generator"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state_dict of a scheduler of the same set, transform and sampler.

        Raises SchedulerStateError if one of them differs; nothing is changed then.
        """
        v_N = state["v"]
        if tuple(v_N.shape) != tuple(self.v_N.shape):
            raise SchedulerStateError(
                f"saved state has {v_N.numel()} rows, this training set has {self.row_count}; "
                "resume with the file the checkpoint was made from"
            )
        if state["transform"] != self.options.transform:
            raise SchedulerStateError(
                f"saved state uses the {state['transform']} transform, "
                f"the options ask for {self.options.transform}"
            )
        sampler = {f"adam/{name}": value for name, value in state["optimizer"].items()}
        if "generator" in state:
            sampler["generator"] = state["generator"]
        self._sampler.load_state(sampler)
        with torch.no_grad():
            self.v_N.copy_(v_N)
