"""Constrained SFT: a token counts less once the model likes it better than it did before."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from defenses.method import MethodContext, MethodError, PlainMethod, StepLosses, shared_mean
from jobspec.defense import ConstrainedOptions

LAST_OF_NEXT = 5


class ReferenceMismatchError(MethodError):
    """A row's reference log-probabilities do not belong to its supervised tokens."""


def response_positions_BT(supervised_BT: Tensor) -> Tensor:
    """Number of each supervised token within its row, from 1; 0 elsewhere. int64 [B, T]."""
    return supervised_BT.to(torch.int64).cumsum(dim=1) * supervised_BT


def betas_BT(position_BT: Tensor, options: ConstrainedOptions) -> Tensor:
    """beta_t by response position: beta_first for 1, beta_next for 2 to 5, beta_rest after."""
    beta_BT = torch.full(position_BT.shape, options.beta_rest, dtype=torch.float64)
    beta_BT = beta_BT.to(position_BT.device)
    beta_BT = torch.where(position_BT <= LAST_OF_NEXT, options.beta_next, beta_BT)
    return torch.where(position_BT <= 1, options.beta_first, beta_BT)


def token_weights(log_ratio: Tensor, beta: Tensor | float, floor: float) -> Tensor:
    """max( floor, 2 * (1 - sigmoid(beta * (log p_w - log p_ref))) ), detached; any shape.

    log_ratio: log p_w - log p_ref, nats. 1 at ratio 1, near 2 where the model has fallen behind
    the reference, near 0 where it is far ahead.
    """
    return (2.0 * torch.sigmoid(-(beta * log_ratio.detach()))).clamp(min=floor)


def reference_BT(supervised_BT: Tensor, reference: Sequence[Tensor], row_ids: list[int]) -> Tensor:
    """The rows' reference log-probabilities at their supervised places, 0 elsewhere. [B, T].

    reference[i]: [n_i], row i's supervised tokens in order. Raises ReferenceMismatchError if a
    row has none, or another number of them than supervised tokens.
    """
    counts_B = supervised_BT.sum(dim=1).tolist()
    for row_id, count in zip(row_ids, counts_B, strict=True):
        known = reference[row_id].numel() if row_id < len(reference) else None
        if known != count:
            raise ReferenceMismatchError(
                f"row {row_id} has {count} supervised tokens and "
                f"{'no' if known is None else known} reference log-probabilities; compute them "
                "again with the model before tuning, from the same token rows"
            )
    values_BT = torch.zeros(supervised_BT.shape, dtype=torch.float64, device=supervised_BT.device)
    if row_ids:
        values_M = torch.cat([reference[row_id].detach().reshape(-1) for row_id in row_ids])
        # A boolean mask is read row by row, the order in which the rows were put together.
        values_BT[supervised_BT] = values_M.to(values_BT)
    return values_BT


class ConstrainedMethod(PlainMethod):
    """A soft limit on how far each response token may move from the model before tuning.

        l_i = (1/n_i) sum_t weight_t * (-log p_w(y_t)),  L = mean_i l_i
        weight_t = max(floor, 2 (1 - sigmoid(beta_t (log p_w(y_t) - log p_ref(y_t)))))   detached

    beta_t is large for the first tokens, where an answer turns into a refusal, so these change
    least. The detached weight gives the gradient of the paper's (2/beta) softplus(beta * (log
    p_ref - log p_w)). Weights are computed in float64.

    Source: arXiv 2406.05946 and its release; the mean over a row before the mean over rows is
    this project's loss (the release takes one mean over all tokens of the batch).
    """

    uses_reference: ClassVar[bool] = True

    def __init__(self, context: MethodContext, options: ConstrainedOptions) -> None:
        if len(context.reference) < context.row_count:
            raise ReferenceMismatchError(
                f"constrained_sft needs reference log-probabilities of all {context.row_count} "
                f"rows and got {len(context.reference)}; compute them before tuning starts"
            )
        self.context, self.options = context, options

    def objective(self, losses: StepLosses) -> Tensor:
        if losses.tokens is None:
            raise MethodError("constrained_sft needs the losses of single tokens, not of rows only")
        return shared_mean(self.row_losses_B(losses), losses.user_count)

    def row_losses_B(self, losses: StepLosses) -> Tensor:
        """l_i of the rows of this process, differentiable [B]."""
        assert losses.tokens is not None
        supervised_BT = losses.tokens.supervised_BT
        nll_BT = torch.where(supervised_BT, losses.tokens.nll_BT, 0.0)
        row_ids = losses.row_ids_B.tolist()
        known_BT = reference_BT(supervised_BT, self.context.reference, row_ids)
        position_BT = response_positions_BT(supervised_BT)
        weight_BT = token_weights(
            -nll_BT.detach().double() - known_BT,
            betas_BT(position_BT, self.options),
            self.options.floor,
        )
        return (weight_BT.to(nll_BT) * nll_BT).sum(dim=1) / supervised_BT.sum(dim=1).clamp(min=1)
