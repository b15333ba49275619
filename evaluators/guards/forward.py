"""One pass of a guard model over padded inputs, without generation unless text is the verdict."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Side = Literal["left", "right"]


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients; the mode of every module is restored."""
    import torch

    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def padded(
    rows: Sequence[Sequence[int]], pad: int, side: Side
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Token ids and attention mask [B, T]."""
    import torch

    width = max(len(row) for row in rows)
    ids_B_T = torch.full((len(rows), width), pad, dtype=torch.long)
    mask_B_T = torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        ids_B_T[index, start : start + len(row)] = torch.tensor(row, dtype=torch.long)
        mask_B_T[index, start : start + len(row)] = 1
    return ids_B_T, mask_B_T


def last_logits(model: Any, rows: Sequence[Sequence[int]], pad: int, side: Side) -> "torch.Tensor":
    """Logits [B, V], float64, of the token after each row.

    Left: every row ends in the last column. Right: gathered at each row's own last column.
    Positions count from a row's own first token, so both sides give the same up to rounding.
    """
    import torch

    ids_B_T, mask_B_T = (tensor.to(model.device) for tensor in padded(rows, pad, side))
    parameters = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"input_ids": ids_B_T, "attention_mask": mask_B_T}
    if "use_cache" in parameters:
        arguments["use_cache"] = False
    if "position_ids" in parameters:
        arguments["position_ids"] = (mask_B_T.cumsum(1) - 1).clamp(min=0)
    ends = [ids_B_T.shape[1] - 1 if side == "left" else len(row) - 1 for row in rows]
    kept = sorted(set(ends))
    if "logits_to_keep" in parameters:
        # Logits of every position would hold B T V numbers, and V is up to 256,000.
        arguments["logits_to_keep"] = (
            1 if side == "left" else torch.tensor(kept, device=model.device)
        )
        ends = [kept.index(end) for end in ends]
    logits_B_P_V: torch.Tensor = model(**arguments).logits
    return torch.stack(
        [logits_P_V[end] for logits_P_V, end in zip(logits_B_P_V, ends, strict=True)]
    ).double()


def class_logits(model: Any, rows: Sequence[Sequence[int]], pad: int, side: Side) -> "torch.Tensor":
    """Logits [B, K], float64, of a sequence classifier.

    Classifiers on decoders read the last token that is not `pad`, by the model's configuration.
    For the pass that is the `pad` given here, which must occur in no row.
    """
    ids_B_T, mask_B_T = (tensor.to(model.device) for tensor in padded(rows, pad, side))
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    before = getattr(config, "pad_token_id", None)
    config.pad_token_id = pad
    try:
        logits_B_K: torch.Tensor = model(input_ids=ids_B_T, attention_mask=mask_B_T).logits
    finally:
        config.pad_token_id = before
    return logits_B_K.double()


def greedy_text(
    model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], pad: int, max_new_tokens: int
) -> list[str]:
    """What the model writes after each row, greedily, special tokens left out."""
    from transformers import GenerationConfig

    ids_B_T, mask_B_T = (tensor.to(model.device) for tensor in padded(rows, pad, "left"))
    own = getattr(model, "generation_config", None)
    ends = getattr(own, "eos_token_id", None)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
        eos_token_id=ends if ends is not None else tokenizer.eos_token_id,
    )
    output_B_T = model.generate(
        input_ids=ids_B_T, attention_mask=mask_B_T, generation_config=settings
    )
    return [
        str(text)
        for text in tokenizer.batch_decode(
            output_B_T[:, ids_B_T.shape[1] :], skip_special_tokens=True
        )
    ]


def unused_token(rows: Sequence[Sequence[int]], preferred: int | None, vocabulary: int) -> int:
    """An id for padding that occurs in no row: the tokenizer's own where possible."""
    used = {token for row in rows for token in row}
    if preferred is not None and preferred not in used:
        return preferred
    return next(token for token in range(vocabulary + 1) if token not in used)
