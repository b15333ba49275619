"""Response negative log-likelihood per row, computed only where there is something to predict."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from defenses.cross_entropy import token_nll_M

IGNORED_LABEL = -100


class UnsupervisedRowError(ValueError):
    """A row of the batch has no token to learn from, so its mean loss would be 0/0."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        super().__init__(
            f"batch rows {rows} have no supervised token (every shifted label is {IGNORED_LABEL}); "
            "drop rows whose response was cut away before they reach the loss"
        )


class ResponseScores(NamedTuple):
    """What one forward pass says about each row.

    nll: [B] mean negative log-likelihood in nats per supervised token, differentiable.
    correct: [B] supervised tokens whose most likely prediction is right, detached int64.
    token_count: [B] supervised tokens of the row, detached int64.
    token_nll: [B, T - 1] the same per token, differentiable, 0 where nothing is supervised; place
    t holds the token at t + 1. supervised: bool [B, T - 1].
    """

    nll: Tensor
    correct: Tensor
    token_count: Tensor
    token_nll: Tensor
    supervised: Tensor


def response_nll_B(
    model: nn.Module, input_ids_BT: Tensor, attention_mask_BT: Tensor, labels_BT: Tensor
) -> Tensor:
    """Mean negative log-likelihood of each row's response; see response_nll_and_accuracy_B."""
    return response_nll_and_accuracy_B(model, input_ids_BT, attention_mask_BT, labels_BT).nll


def response_token_mean_nll(
    model: nn.Module, input_ids_BT: Tensor, attention_mask_BT: Tensor, labels_BT: Tensor
) -> Tensor:
    """Mean over all supervised tokens of the batch, so that long responses count for more.

    h = (sum_i n_i l_i) / (sum_i n_i),  n_i = supervised tokens of row i, l_i = response_nll_B.
    This is the reduction of Hugging Face causal models, and the one Panacea is released with
    (arXiv 2501.18100); BDS uses the per-row mean instead.
    """
    scores = response_nll_and_accuracy_B(model, input_ids_BT, attention_mask_BT, labels_BT)
    share_B = scores.token_count.to(scores.nll) / scores.token_count.sum()
    return (scores.nll * share_B).sum()


def response_nll_and_accuracy_B(
    model: nn.Module, input_ids_BT: Tensor, attention_mask_BT: Tensor, labels_BT: Tensor
) -> ResponseScores:
    """Per-row response loss and token accuracy from one forward pass.

        l_i = -(1/n_i) sum_{t: labels[i,t+1] != -100} log p(labels[i,t+1] | input[i,:t+1])

    input_ids_BT, attention_mask_BT, labels_BT: int64 [B, T]; labels carry -100 on prompt and
    padding. Returns nll in float32 (float64 where the model computes in float64), nats/token.

    The vocabulary projection runs on supervised positions only (derived: same value and gradient
    as the full logits, a fraction of their memory). A model that does not send [B, T, D] hidden
    states through its output embeddings is served from its full logits instead.

    Raises UnsupervisedRowError if a row has no supervised token.
    """
    targets_BT = labels_BT[:, 1:]
    supervised_BT = targets_BT != IGNORED_LABEL
    token_count_B = supervised_BT.sum(dim=1)
    if bool((token_count_B == 0).any()):
        raise UnsupervisedRowError((token_count_B == 0).nonzero().flatten().tolist())

    row_M, position_M = supervised_BT.nonzero(as_tuple=True)
    target_M = targets_BT[row_M, position_M]
    logits_MV = _supervised_logits_MV(model, input_ids_BT, attention_mask_BT, row_M, position_M)
    target_M = target_M.to(logits_MV.device)
    hit_M = (logits_MV.detach().argmax(dim=-1) == target_M).to(torch.int64)
    nll_M = token_nll_M(logits_MV, target_M)

    # Scattering to distinct places and summing a row is reproducible on a GPU; adding into a
    # shared accumulator is not.
    row_M, position_M = row_M.to(nll_M.device), position_M.to(nll_M.device)
    nll_BT = nll_M.new_zeros(targets_BT.shape).index_put((row_M, position_M), nll_M)
    count_B = token_count_B.to(nll_M.device)
    hit_BT = torch.zeros_like(supervised_BT, dtype=torch.int64, device=nll_M.device)
    hit_BT[row_M, position_M] = hit_M
    return ResponseScores(
        nll_BT.sum(dim=1) / count_B,
        hit_BT.sum(dim=1),
        count_B,
        nll_BT,
        supervised_BT.to(nll_M.device),
    )


def _supervised_logits_MV(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    row_M: Tensor,
    position_M: Tensor,
) -> Tensor:
    """Logits at the M given places, [M, V].

    A hook in front of the output embeddings narrows the hidden states. Going through the model's
    own forward keeps its soft-capping and logit scaling, and any wrapper's gradient exchange.
    """
    narrowed = False

    def keep_supervised(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal narrowed
        hidden_BTD = inputs[0]
        if narrowed or hidden_BTD.shape[:-1] != input_ids_BT.shape:
            return None
        narrowed = True
        device = hidden_BTD.device
        hidden_MD = hidden_BTD[row_M.to(device), position_M.to(device)]
        return (hidden_MD.unsqueeze(0), *inputs[1:])

    head = _output_embeddings(model)
    handle = head.register_forward_pre_hook(keep_supervised) if head is not None else None
    try:
        logits: Tensor = model(
            input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False
        ).logits
    finally:
        if handle is not None:
            handle.remove()
    if narrowed:
        return logits.squeeze(0)
    return logits[row_M.to(logits.device), position_M.to(logits.device)]


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    """The vocabulary projection of a plain, peft-wrapped or data-parallel model, if it has one."""
    inner: Any = getattr(model, "module", model)
    find = getattr(inner, "get_output_embeddings", None)
    if find is None:
        return None
    try:
        head = find()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None
