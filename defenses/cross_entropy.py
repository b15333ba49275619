"""Cross-entropy that needs one buffer of the size of its logits, not three."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**22


def token_nll_M(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    """-log softmax(logits)[target] per token, in nats.

        nll = logsumexp_V(logits) - logits[target];   d nll / d logits = softmax(logits) - 1[target]

    logits_MV: [M, V]; target_M: int64 [M]. Computed in float32, or float64 for float64 logits,
    a chunk of rows at a time; the gradient is written over the logits. So the caller must own them,
    differentiate once, and not read them after the backward pass; a second backward pass through
    the same graph raises torch's error for tensors changed in place. Derived.
    """
    result: Tensor = _TokenNll.apply(logits_MV, target_M)  # type: ignore[no-untyped-call]
    return result


class _TokenNll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, target_M: Tensor) -> Tensor:
        dtype = torch.float64 if logits_MV.dtype == torch.float64 else torch.float32
        log_normaliser_M = torch.empty(target_M.shape, dtype=dtype, device=logits_MV.device)
        nll_M = torch.empty_like(log_normaliser_M)
        for rows in _chunks(logits_MV):
            part = logits_MV[rows].to(dtype)
            log_normaliser_M[rows] = part.logsumexp(dim=-1)
            chosen = part.gather(-1, target_M[rows, None]).squeeze(-1)
            nll_M[rows] = log_normaliser_M[rows] - chosen
        ctx.save_for_backward(logits_MV, target_M, log_normaliser_M)
        return nll_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor, None]:
        logits_MV, target_M, log_normaliser_M = ctx.saved_tensors
        for rows in _chunks(logits_MV):
            # Same dtype: an alias, so this is in place already and the copy below does nothing.
            part = logits_MV[rows].to(log_normaliser_M.dtype)
            part.sub_(log_normaliser_M[rows, None]).exp_()
            part.scatter_add_(
                -1, target_M[rows, None], torch.full_like(log_normaliser_M[rows, None], -1.0)
            )
            part.mul_(grad_M[rows, None])
            logits_MV[rows] = part.to(logits_MV.dtype)
        return logits_MV, None


def _chunks(logits_MV: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // logits_MV.shape[-1])
    for start in range(0, logits_MV.shape[0], size):
        yield slice(start, start + size)
