"""Losses of rows without gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from defenses.losses import ResponseScores, response_nll_and_accuracy_B
from workers.pipeline.failure import Stopped
from workers.pipeline.rows import TokenRow, collate


def evaluate_rows(
    model: Any, rows: Sequence[TokenRow], batch_size: int, stop: Callable[[], bool]
) -> tuple[float, float]:
    """Mean response loss (nats a token, mean over rows) and token accuracy; raises Stopped."""
    scored = _score_rows(model, rows, batch_size, stop)
    correct = sum(row.correct for row in scored)
    tokens = sum(row.tokens for row in scored)
    return sum(row.nll for row in scored) / len(scored), correct / tokens


def row_losses(
    model: Any, rows: Sequence[TokenRow], batch_size: int, stop: Callable[[], bool]
) -> list[float]:
    """Mean response loss of each row in the given order (nats a token); raises Stopped."""
    return [row.nll for row in _score_rows(model, rows, batch_size, stop)]


def token_log_probs(
    model: Any, rows: Sequence[TokenRow], batch_size: int, stop: Callable[[], bool]
) -> list[Tensor]:
    """Log-probability of every supervised token of each row, in order, float32 on the CPU; raises
    Stopped."""
    return [row.log_probs for row in _score_rows(model, rows, batch_size, stop)]


class _RowScore(NamedTuple):
    nll: float
    correct: int
    tokens: int
    log_probs: Tensor


def _score_rows(
    model: Any, rows: Sequence[TokenRow], batch_size: int, stop: Callable[[], bool]
) -> list[_RowScore]:
    """Batches of similar length; results in the given order."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(rows)), key=lambda index: len(rows[index].ids))
    results: dict[int, _RowScore] = {}
    with torch.no_grad():
        for start in range(0, len(order), batch_size):
            if stop():
                model.train(training)
                raise Stopped
            chosen = order[start : start + batch_size]
            batch = collate([rows[index] for index in chosen], device)
            scores = response_nll_and_accuracy_B(model, *batch)
            found = zip(
                scores.nll.double().tolist(),
                scores.correct.tolist(),
                scores.token_count.tolist(),
                _supervised(scores),
                strict=True,
            )
            results |= {index: _RowScore(*row) for index, row in zip(chosen, found, strict=True)}
    model.train(training)
    return [results[index] for index in range(len(rows))]


def _supervised(scores: ResponseScores) -> list[Tensor]:
    log_probs_BT = -scores.token_nll.float().cpu()
    supervised_BT = scores.supervised.cpu()
    return [row[mask] for row, mask in zip(log_probs_BT, supervised_BT, strict=True)]
