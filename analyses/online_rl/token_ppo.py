"""Token-level PPO on a causal language model with LoRA, with influence-based filtering."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from analyses.online_rl.iif import NONE_POSITIVE, keep_positive
from analyses.online_rl.influence import Scores
from analyses.online_rl.spec import Reference
from analyses.online_rl.targets import last_token
from analyses.online_rl.token_influence import TokenTarget, answer_losses, score_answers
from analyses.online_rl.tokens import (
    Answers,
    TokenPolicy,
    padded,
    sample,
    token_gae,
    token_rewards,
    whiten,
)
from jobspec.frozen import Frozen

Reward = Callable[[Sequence[int], Sequence[int]], float]


class TokenPPOSettings(Frozen):
    """As in the paper's detoxification run; gamma 1 means that length is not discounted."""

    new_tokens: int = Field(30, ge=1, le=4096, description="longest answer, tokens")
    minibatch_size: int = Field(1, ge=1, le=4096, description="answers an optimiser step")
    epochs: int = Field(4, ge=1, le=100, description="passes over the round's answers")
    learning_rate: float = Field(1e-5, gt=0, le=1, description="of Adam")
    clip_range: float = Field(0.2, gt=0, lt=1, description="of the ratio")
    vf_clip: float = Field(0.2, gt=0, le=100, description="of the value, absolute")
    vf_coef: float = Field(0.1, ge=0, le=100, description="weight of the value loss")
    gamma: float = Field(1.0, gt=0, le=1, description="discount a token")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="of the advantage estimator")
    kl_coef: float = Field(0.04, ge=0, le=100, description="first weight of the divergence")
    kl_target: float | None = Field(6.0, gt=0, description="nats an answer; None: weight is fixed")
    kl_horizon: float = Field(10_000, gt=0, description="answers over which the weight adapts")
    filter: bool = Field(False, description="keep answers with a positive score alone")
    target: TokenTarget = Field("sequence", description="of the filter: sequence or return")
    reference: Reference = Field("holdout", description="of the filter: the paper has holdout")
    chunk: int = Field(16, ge=1, le=4096, description="answers scored at once")


class TokenRound(NamedTuple):
    """What a round did. scores is None without a filter."""

    mean_reward: float
    kl: float
    kept: tuple[int, ...]
    scores: Scores | None
    warning: str | None


def adapted(coefficient: float, kl: float, target: float, answers: int, horizon: float) -> float:
    """The divergence's weight after a round: * (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon).

    (Ziegler et al. 2019.)
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * answers / horizon)


class TokenPPO:
    """PPO rounds on a PEFT model; its frozen base, with the adapter off, is the reference policy.

    reward(prompt, answer) scores token ids. Dropout stays off: a record's gradient must be that of
    the policy that sampled it.
    """

    def __init__(
        self,
        model: Any,
        reward: Reward,
        settings: TokenPPOSettings,
        seed: int,
        *,
        end: int | None = None,
    ) -> None:
        self.model, self.reward, self.settings, self.end = model, reward, settings, end
        self.policy = TokenPolicy(model).eval()
        self.kl_coef = settings.kl_coef
        self._generator = torch.Generator().manual_seed(seed)
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        self._optimizer = torch.optim.Adam(trained, lr=settings.learning_rate)

    def roll_out(self, prompts: Sequence[Sequence[int]]) -> tuple[Answers, Tensor, float]:
        """Answers to the prompts, whitened advantages in one block; rewards (B,); mean KL."""
        settings = self.settings
        answers = sample(self.model, prompts, settings.new_tokens, self._generator, end=self.end)
        rows = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
        ids, attention, mask_BT = padded(rows, [len(prompt) for prompt in prompts])
        scores_B = torch.tensor([self.reward(p, a) for p, a in zip(prompts, answers, strict=True)])
        with torch.no_grad():
            log_prob_BT, values_BT = self.policy(ids, attention)
            with self.model.disable_adapter():
                reference_BT, _ = self.policy(ids, attention)
        rewards_BT = token_rewards(
            scores_B, log_prob_BT, reference_BT, mask_BT, last_token(mask_BT), self.kl_coef
        )
        values_BT = values_BT * mask_BT
        advantages_BT, returns_BT = token_gae(
            rewards_BT, values_BT, mask_BT, settings.gamma, settings.gae_lambda
        )
        kl = float(((log_prob_BT - reference_BT) * mask_BT).sum(dim=1).mean())
        batch = Answers(
            ids,
            attention,
            mask_BT,
            log_prob_BT,
            values_BT,
            whiten(advantages_BT, mask_BT),
            returns_BT,
        )
        return batch, scores_B, kl

    def round(
        self,
        prompts: Sequence[Sequence[int]],
        validation: Sequence[Sequence[int]] | None = None,
    ) -> TokenRound:
        """Sample, score and filter if asked, update.

        validation: prompts of the filter's held-out answers, sampled from the same policy.
        """
        settings = self.settings
        batch, rewards_B, kl = self.roll_out(prompts)
        scores, warning = None, None
        kept = list(range(len(prompts)))
        if settings.filter:
            held_out = self.roll_out(validation)[0] if validation else None
            scores = score_answers(
                self.policy,
                batch,
                settings.target,
                held_out,
                reference=settings.reference,
                clip_range=settings.clip_range,
                vf_clip=settings.vf_clip,
                vf_coef=settings.vf_coef,
                chunk=settings.chunk,
            )
            kept = keep_positive(scores.score_N)
            warning = None if bool((scores.score_N > 0).any()) else NONE_POSITIVE
        self._update(batch.at(torch.tensor(kept)))
        if settings.kl_target is not None:
            self.kl_coef = adapted(
                self.kl_coef, kl, settings.kl_target, len(prompts), settings.kl_horizon
            )
        return TokenRound(float(rewards_B.mean()), kl, tuple(kept), scores, warning)

    def _update(self, batch: Answers) -> None:
        settings = self.settings
        for _ in range(settings.epochs):
            order = torch.randperm(len(batch.ids), generator=self._generator)
            for rows in torch.split(order, settings.minibatch_size):
                loss_B, _, _ = answer_losses(
                    self.policy,
                    batch.at(rows),
                    clip_range=settings.clip_range,
                    vf_clip=settings.vf_clip,
                    vf_coef=settings.vf_coef,
                )
                self._optimizer.zero_grad(set_to_none=True)
                loss_B.mean().backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()
