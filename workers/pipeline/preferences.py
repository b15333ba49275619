"""What DPO needs beside the pairs themselves: the reference, and losses without gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from defenses.dpo import dpo_loss_B, reward_accuracy, reward_margin_B
from workers.pipeline.rows import PairRow, TokenRow
from workers.pipeline.scoring import row_losses


class PairEvaluation(NamedTuple):
    """Means over pairs: DPO loss, implicit reward margin, share of pairs ranked as the data say."""

    loss: float
    margin: float
    accuracy: float


def pair_rows(pairs: Sequence[PairRow]) -> list[TokenRow]:
    """The rows of one forward pass: all chosen sides, then all rejected ones."""
    return [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]


def reference_log_probs(
    model: Any, pairs: Sequence[PairRow], batch_size: int, stop: Callable[[], bool]
) -> Tensor:
    """log p(answer | conversation) of the chosen and the rejected answers, float64 [N, 2], nats.

    Sums over response tokens under the model as it is: the reference where it is called before the
    first step. batch_size counts rows, two a pair. Raises Stopped.
    """
    rows = pair_rows(pairs)
    losses = row_losses(model, rows, batch_size, stop)
    sums = [-loss * row.trained_tokens for loss, row in zip(losses, rows, strict=True)]
    return torch.tensor(sums, dtype=torch.float64).reshape(2, len(pairs)).T.contiguous()


def evaluate_pairs(
    model: Any,
    pairs: Sequence[PairRow],
    reference_N2: Tensor,
    beta: float,
    batch_size: int,
    stop: Callable[[], bool],
) -> PairEvaluation:
    """Loss, margin and accuracy of the model on pairs. reference_N2: reference_log_probs of these
    pairs. Raises Stopped."""
    now_N2 = reference_log_probs(model, pairs, batch_size, stop)
    reference_N2 = reference_N2.to(now_N2)
    sides = (now_N2[:, 0], now_N2[:, 1], reference_N2[:, 0], reference_N2[:, 1])
    margin_N = reward_margin_B(*sides, beta)
    return PairEvaluation(
        loss=float(dpo_loss_B(*sides, beta).mean()),
        margin=float(margin_N.mean()),
        accuracy=reward_accuracy(margin_N),
    )
