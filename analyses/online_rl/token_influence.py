"""Scores of a language model's answers: ghost products over the LoRA matrices.

A record is an answer. Its training loss is the masked mean of PPO's policy loss over its tokens,
plus vf_coef / 2 times that of the clipped value loss, which reaches the adapter through the shared
trunk. The value head itself is not scored. Losses are normalised per answer, so scores of answers
in different chunks compare.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from analyses.context import AnalysisError
from analyses.online_rl.ghost import add, capture, chunks, inner, norm, products, scored_layers
from analyses.online_rl.influence import Gradient, Scores
from analyses.online_rl.spec import Reference
from analyses.online_rl.targets import on_clipped_side, policy_loss, sequence_target
from analyses.online_rl.tokens import Answers, TokenPolicy, masked_mean

TokenTarget = Literal["action", "return", "sequence"]


def answer_losses(
    policy: TokenPolicy, answers: Answers, *, clip_range: float, vf_clip: float, vf_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Training loss per answer (B,), log-probabilities (B, T), and where the clip took over."""
    log_prob_BT, values_BT = policy(answers.ids, answers.attention)
    mask_BT = answers.mask_BT
    loss_BT = policy_loss(log_prob_BT, answers.old_log_prob_BT, answers.advantages_BT, clip_range)
    loss_B = masked_mean(loss_BT, mask_BT)
    if vf_coef > 0:
        near_BT = answers.old_values_BT + (values_BT - answers.old_values_BT).clamp(
            -vf_clip, vf_clip
        )
        error_BT = torch.maximum(
            (values_BT - answers.returns_BT).square(), (near_BT - answers.returns_BT).square()
        )
        loss_B = loss_B + 0.5 * vf_coef * masked_mean(error_BT, mask_BT)
    with torch.no_grad():
        clipped_BT = on_clipped_side(
            log_prob_BT, answers.old_log_prob_BT, answers.advantages_BT, clip_range
        )
    return loss_B, log_prob_BT, clipped_BT & (mask_BT > 0)


def token_target(kind: TokenTarget, log_prob_BT: Tensor, answers: Answers) -> Tensor:
    """f per answer, (B,): the target is their mean.

    action: log pi(y|x); return: mean over tokens of log pi A; sequence: log pi(y|x) A_last.
    """
    if kind == "action":
        return (log_prob_BT * answers.mask_BT).sum(dim=1)
    if kind == "return":
        return masked_mean(log_prob_BT * answers.advantages_BT, answers.mask_BT)
    return sequence_target(log_prob_BT, answers.mask_BT, answers.advantages_BT)


def score_answers(
    policy: TokenPolicy,
    answers: Answers,
    kind: TokenTarget,
    target_answers: Answers | None = None,
    *,
    reference: Reference = "buffer",
    clip_range: float = 0.2,
    vf_clip: float = 0.2,
    vf_coef: float = 0.1,
    chunk: int = 16,
    check: Callable[[int], None] | None = None,
) -> Scores:
    """Scores at the present policy.

    target_answers: the held-out answers (reference "holdout"), or the prompt and completion of an
    action target; None: the round's own. check(answers done) is called after each chunk; it may
    raise to stop. Raises AnalysisError.
    """
    n = len(answers.ids)
    if n == 0:
        raise AnalysisError("the buffer has no records", "buffer")
    if not bool(torch.isfinite(answers.advantages_BT).all()):
        raise AnalysisError("an advantage is not a finite number", "buffer")
    own = target_answers is None
    if own == (reference == "holdout" or kind == "action"):
        raise AnalysisError("an action or holdout target needs answers of its own; others none")
    if reference == "leave_one_out" and n < 2:
        raise AnalysisError("leave_one_out needs at least two records", "reference")
    layers = scored_layers(policy)
    training = policy.training
    policy.eval()
    try:
        gradient: Gradient = {}
        value = 0.0
        data = target_answers or answers
        m = len(data.ids)
        for part in chunks(m, chunk):
            batch = data.at(torch.arange(m)[part])

            def target(batch: Answers = batch) -> list[Tensor]:
                log_prob_BT, _ = policy(batch.ids, batch.attention)
                return [token_target(kind, log_prob_BT, batch).sum() / m]

            value += float(_add_gradient(gradient, layers, target))
        total: Gradient = {}
        total_N, self_N = (torch.zeros(n, dtype=torch.float64) for _ in range(2))
        clipped = 0
        for part in chunks(n, chunk):
            batch = answers.at(torch.arange(n)[part])

            def losses(batch: Answers = batch) -> list[Tensor]:
                nonlocal clipped
                loss_B, log_prob_BT, clipped_BT = answer_losses(
                    policy, batch, clip_range=clip_range, vf_clip=vf_clip, vf_coef=vf_coef
                )
                clipped += int(clipped_BT.sum())
                mine = [token_target(kind, log_prob_BT, batch).sum()] if own else []
                return [loss_B.sum(), *mine]

            captured, sums = capture(layers, losses)
            total_N[part] = -products(captured[0], gradient).double()
            if own:
                self_N[part] = -inner(captured[0], captured[1], layers).double() / n
            add(total, sums[0])
            if check is not None:
                check(part.stop)
    finally:
        policy.train(training)
    cross_N = total_N - self_N
    score_N = cross_N * n / (n - 1) if reference == "leave_one_out" else total_N
    return Scores(score_N, self_N, cross_N, value, norm(gradient), norm(total), clipped)


def _add_gradient(
    gradient: Gradient, layers: dict[str, torch.nn.Module], forward: Callable[[], list[Tensor]]
) -> Tensor:
    scalars: list[Tensor] = []

    def kept() -> list[Tensor]:
        scalars.extend(forward())
        return scalars

    _, totals = capture(layers, kept)
    add(gradient, totals[0])
    return scalars[0].detach()
