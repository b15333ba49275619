"""Targets f of the attribution, and the PPO loss whose gradient is set against them.

Advantages and states are constants everywhere; only log-probabilities carry a gradient.
"""

import torch
from torch import Tensor


def return_target(log_prob_N: Tensor, advantages_N: Tensor) -> Tensor:
    """f_j = log pi(a_j|s_j) A_j per record; the target is their mean. No ratio and no clip."""
    return log_prob_N * advantages_N


def last_token(mask_BT: Tensor) -> Tensor:
    """Index of the last answer token: argmax(mask) + sum(mask) - 1, shape (B,)."""
    mask_BT = mask_BT.long()
    return mask_BT.argmax(dim=1) + mask_BT.sum(dim=1) - 1


def sequence_target(log_prob_BT: Tensor, mask_BT: Tensor, advantages_BT: Tensor) -> Tensor:
    """f_x = log pi(y|x) A_last per answer, shape (B,); the target is their mean.

    log pi(y|x) is the SUM over answer tokens; A_last the advantage of the last of them.
    """
    last_B = last_token(mask_BT)
    advantage_B = advantages_BT.gather(1, last_B[:, None]).squeeze(1)
    return (log_prob_BT * mask_BT).sum(dim=1) * advantage_B


def policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float
) -> Tensor:
    """PPO's loss per record or token: max(-r A, -clip(r, 1 - eps, 1 + eps) A), r the ratio.

    Its slope in log pi is -r A, and 0 where the clipped side is the larger loss.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-ratio * advantages, -clipped * advantages)


def on_clipped_side(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float
) -> Tensor:
    """True where policy_loss has no slope: r > 1 + eps with A > 0, or r < 1 - eps with A < 0."""
    ratio = torch.exp(log_prob - old_log_prob)
    return ((ratio > 1 + clip_range) & (advantages > 0)) | (
        (ratio < 1 - clip_range) & (advantages < 0)
    )
