"""Direct preference optimisation: learn to prefer one answer to another, without a reward model.

Source: arXiv 2305.18290. The defenses weigh a pair as they weigh a row: l_i below takes the place
of the response loss.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from defenses.losses import response_nll_and_accuracy_B


class PairCountError(ValueError):
    """The rows of a batch are not pairs, or do not match their reference log-probabilities."""


class PairLosses(NamedTuple):
    """What one forward pass says about each pair.

    loss_B: [B] DPO loss, differentiable. margin_B: [B] implicit reward margin, detached; a pair is
    ranked as the data say where it is above 0.
    """

    loss_B: Tensor
    margin_B: Tensor


def reward_margin_B(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    beta: float,
) -> Tensor:
    """m_i = r(x_i, y_w) - r(x_i, y_l) with the implicit reward r(x, y) = beta (log p(y|x) - log
    p_ref(y|x)).

    All [B]: sums of the log-probabilities of the response tokens, nats, of the chosen (w) and the
    rejected (l) answer under the policy and the reference. Raises ValueError unless beta > 0.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    chosen_B = policy_chosen_B - reference_chosen_B
    rejected_B = policy_rejected_B - reference_rejected_B
    return beta * (chosen_B - rejected_B)


def dpo_loss_B(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    beta: float,
) -> Tensor:
    """DPO loss of each pair, [B].

        l_i = -log sigmoid(m_i),  m_i = reward_margin_B(...)

    log 2 where policy and reference are equal. dl/d(policy_chosen) = -beta sigmoid(-m) and
    dl/d(policy_rejected) = +beta sigmoid(-m), so beta bounds the gradient of a pair.
    Source: arXiv 2305.18290, equation 7. Arguments and errors: reward_margin_B.
    """
    return -logsigmoid(
        reward_margin_B(
            policy_chosen_B, policy_rejected_B, reference_chosen_B, reference_rejected_B, beta
        )
    )


def reward_accuracy(margin_B: Tensor) -> float:
    """Share of pairs whose chosen answer has the larger implicit reward; a tie counts as wrong."""
    return float((margin_B > 0).double().mean())


def pair_losses(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    labels_BT: Tensor,
    reference_B2: Tensor,
    beta: float,
) -> PairLosses:
    """DPO losses and margins of B pairs from one forward pass over 2B rows.

    input_ids_BT, attention_mask_BT, labels_BT: int64 [2B, T], the chosen rows before the rejected
    ones in the same order; labels carry -100 outside the answers. reference_B2: [B, 2], the summed
    log-probabilities of chosen and rejected answer under the reference.

    Raises PairCountError, and UnsupervisedRowError for an answer without a token.
    """
    pairs = reference_B2.shape[0]
    if reference_B2.shape != (pairs, 2) or input_ids_BT.shape[0] != 2 * pairs:
        raise PairCountError(
            f"{input_ids_BT.shape[0]} rows and reference log-probabilities of shape "
            f"{tuple(reference_B2.shape)}; B pairs need 2B rows and the shape (B, 2)"
        )
    scores = response_nll_and_accuracy_B(model, input_ids_BT, attention_mask_BT, labels_BT)
    log_prob = -(scores.nll * scores.token_count)
    reference_B2 = reference_B2.to(log_prob)
    margin_B = reward_margin_B(
        log_prob[:pairs], log_prob[pairs:], reference_B2[:, 0], reference_B2[:, 1], beta
    )
    return PairLosses(-logsigmoid(margin_B), margin_B.detach())
