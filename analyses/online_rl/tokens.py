"""Answers of a language model as PPO records: log-probabilities, values, rewards, advantages.

Position t of every (B, T) array belongs to the token that stands at t + 1 of ids, so T is one less
than the longest row. mask is 1 at answer tokens.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from analyses.context import AnalysisError
from analyses.online_rl.buffer import EPSILON


class Answers(NamedTuple):
    """A batch of prompts with answers, right-padded; ids and attention are (B, T + 1)."""

    ids: Tensor
    attention: Tensor
    mask_BT: Tensor
    old_log_prob_BT: Tensor
    old_values_BT: Tensor
    advantages_BT: Tensor
    returns_BT: Tensor

    def at(self, rows: Tensor) -> "Answers":
        """These answers, without columns that only longer ones need."""
        width = int(self.attention[rows].sum(dim=1).max())
        return Answers(
            *(field[rows, :width] for field in self[:2]),
            *(field[rows, : width - 1] for field in self[2:]),
        )


class TokenPolicy(nn.Module):
    """A causal language model and, for PPO, a linear value head on its last hidden states."""

    def __init__(self, model: nn.Module, *, with_value: bool = True) -> None:
        super().__init__()
        self.model = model
        width = int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr,operator]
        self.value_net = nn.Linear(width, 1) if with_value else None
        if self.value_net is not None:
            nn.init.zeros_(self.value_net.weight)
            nn.init.zeros_(self.value_net.bias)

    def forward(self, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values, (B, T) each, float32; values are 0 without a head."""
        out: Any = self.model(
            input_ids=ids,
            attention_mask=attention,
            output_hidden_states=self.value_net is not None,
            use_cache=False,
        )
        log_prob_BT = token_log_prob(out.logits, ids)
        if self.value_net is None:
            return log_prob_BT, torch.zeros_like(log_prob_BT)
        hidden = out.hidden_states[-1][:, :-1].to(self.value_net.weight.dtype)
        return log_prob_BT, self.value_net(hidden).squeeze(2).float()


def token_log_prob(logits: Tensor, ids: Tensor) -> Tensor:
    """log pi of each token after the first, (B, T)."""
    log_prob = functional.log_softmax(logits[:, :-1].float(), dim=2)
    return log_prob.gather(2, ids[:, 1:, None]).squeeze(2)


def masked_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the answer tokens of each row, (B,)."""
    return (x_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1)


def whiten(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(unbiased variance + 1e-8) over all marked entries; 0 elsewhere."""
    mask = torch.ones_like(x) if mask is None else mask
    count = mask.sum()
    mean = (x * mask).sum() / count
    variance = ((x - mean).square() * mask).sum() / (count - 1).clamp(min=1)
    return (x - mean) * torch.rsqrt(variance + EPSILON) * mask


def token_rewards(
    scores_B: Tensor,
    log_prob_BT: Tensor,
    reference_BT: Tensor,
    mask_BT: Tensor,
    last_B: Tensor,
    kl_coef: float,
) -> Tensor:
    """-kl_coef (log pi - log pi_ref) at each answer token, plus the answer's score at its last."""
    rewards_BT = -kl_coef * (log_prob_BT - reference_BT) * mask_BT
    return rewards_BT.scatter_add(1, last_B[:, None], scores_B[:, None].to(rewards_BT.dtype))


def token_gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages (not whitened) and returns over the answer tokens; 0 elsewhere."""
    advantages = torch.zeros_like(rewards_BT)
    following = carried = torch.zeros_like(rewards_BT[:, 0])
    for t in range(rewards_BT.shape[1] - 1, -1, -1):
        here = mask_BT[:, t]
        delta = rewards_BT[:, t] + gamma * following - values_BT[:, t]
        carried = (delta + gamma * gae_lambda * carried) * here
        following = values_BT[:, t] * here
        advantages[:, t] = carried
    return advantages, (advantages + values_BT) * mask_BT


def padded(rows: Sequence[Sequence[int]], starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """ids and attention (B, T + 1) and mask (B, T) of token rows; starts: prompt lengths.

    Raises AnalysisError for a row without an answer or without a prompt.
    """
    width = max(len(row) for row in rows)
    ids, attention = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    mask_BT = torch.zeros(len(rows), width - 1)
    for k, (row, start) in enumerate(zip(rows, starts, strict=True)):
        if not 0 < start < len(row):
            raise AnalysisError(f"answer {k}: prompt and answer need a token each")
        ids[k, : len(row)] = torch.tensor(row)
        attention[k, : len(row)] = 1
        mask_BT[k, start - 1 : len(row) - 1] = 1
    return ids, attention, mask_BT


def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    generator: torch.Generator,
    *,
    end: int | None = None,
) -> list[list[int]]:
    """Answers at temperature 1, without top-k or top-p; `end` closes one and is kept."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    answers: list[list[int]] = [[] for _ in prompts]
    running = torch.ones(len(prompts), dtype=torch.bool)
    cache: Any = None
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    # Newer transformers renamed the argument; the old name still exists in older releases only.
    names = inspect.signature(inner.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        for _ in range(new_tokens):
            out: Any = model(
                input_ids=ids,
                attention_mask=attention,
                position_ids=positions,
                use_cache=True,
                **{cache_name: cache},
            )
            cache = out.past_key_values
            probabilities = torch.softmax(out.logits[:, -1].float(), dim=1)
            ids = torch.multinomial(probabilities, 1, generator=generator)
            for k in running.nonzero().flatten().tolist():
                answers[k].append(int(ids[k]))
            if end is not None:
                running = running & (ids[:, 0] != end)
                if not bool(running.any()):
                    break
            attention = torch.cat([attention, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
    return answers
