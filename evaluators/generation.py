"""Batched decoding of chat prompts with any transformers causal language model."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import torch

Row = tuple[int, int]

# Rows whose nucleus lies within the most likely tokens need no sort of the whole vocabulary.
_NUCLEUS_SHORTLIST = 256


class Decoding(BaseModel):
    """How responses are drawn. Temperature 0 is greedy: every sample of a prompt is the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: int = Field(
        default=64, ge=1, le=8192, description="Most tokens of one response."
    )
    temperature: float = Field(
        default=0.0, ge=0.0, le=5.0, description="Divides the logits; 0 takes the likeliest token."
    )
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Nucleus: smallest set with this probability."
    )
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Drops tokens with p < min_p * max p, p after the temperature; 0 keeps all.",
    )
    n_samples: int = Field(default=1, ge=1, le=1000, description="Responses per prompt.")


class Generation(BaseModel):
    """One response: its text, its length in tokens (end token not counted), and whether it ended
    because a limit was reached instead of by the model's end token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    tokens: int = Field(ge=0)
    truncated: bool


class GenerationStoppedError(RuntimeError):
    """The caller's `stop` asked to end; no partial result is returned."""


class PromptTooLongError(ValueError):
    """Prompts fill the model's context, so nothing can be generated for them; `indices` lists all
    of them."""

    def __init__(self, message: str, indices: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.indices = tuple(indices)


class ChatTemplateMissingError(ValueError):
    """The tokenizer has no chat template, so a conversation has no defined token sequence."""


class CacheUnsupportedError(TypeError):
    """The model returns no key-value cache whose rows can be selected."""


def generate(
    model: Any,
    tokenizer: Any,
    conversations: Sequence[Sequence[Mapping[str, Any]] | str],
    decoding: Decoding,
    *,
    seed: int = 0,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    kept: Mapping[Row, Generation] | None = None,
    on_batch: Callable[[Mapping[Row, Generation]], None] | None = None,
) -> list[list[Generation]]:
    """Draw `decoding.n_samples` responses for each conversation; outer list in input order.

    Each conversation is rendered by the tokenizer's chat template with the generation prompt and
    passed as it is: a system turn that the caller wants must be in it. A conversation that is a
    string is a finished text: it is tokenised without a chat template, with the special tokens
    that the tokenizer itself adds. Batches hold prompts of similar length, padded on the left,
    with positions counted from each prompt's own first token. The key-value cache of a prompt is
    filled once for all its samples in a batch, and a finished row leaves the batch.

    With p_V = softmax(logits / temperature), sampling sorts p_V downwards, keeps the shortest
    head with mass >= top_p, of that the tokens with p >= min_p * max p, and inverts the cumulative
    sum of what is left at u * mass, where u is the t-th uniform number of a stream seeded by
    (seed, prompt index, sample index). Temperature, then top_p, then min_p is the order of
    transformers; max p is the same before and after top_p. Results do not depend on the batch
    size, except where a padded and an unpadded forward pass differ in the last bits and two tokens
    are that close; greedy decoding has the same proviso.

    `progress(done, total)` counts finished responses. `stop()` is asked before every token.
    `on_batch` is given the responses of every finished batch by (prompt index, sample index), and
    `kept` holds such responses of an earlier call, which are not drawn again: with both, a call
    that was stopped or ran out of memory goes on where it ended, to the same responses. Greedy
    responses are all of sample 0.
    The model is put in evaluation mode and every module's mode is restored afterwards.

    Raises ChatTemplateMissingError, PromptTooLongError (names the conversation's index),
    GenerationStoppedError and CacheUnsupportedError.
    """
    import torch

    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    prompts = _prompt_tokens(tokenizer, conversations)
    limit = _context_limit(model)
    samples = 1 if decoding.temperature == 0.0 else decoding.n_samples
    results: dict[Row, Generation] = {
        row: generation for row, generation in (kept or {}).items() if row[0] < len(prompts)
    }
    rows = [
        (prompt, sample)
        for prompt in sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
        for sample in range(samples)
        if (prompt, sample) not in results
    ]
    if limit is not None:
        too_long = sorted({prompt for prompt, _ in rows if len(prompts[prompt]) >= limit})
        if too_long:
            raise PromptTooLongError(
                f"conversation {too_long[0]} has {len(prompts[too_long[0]])} tokens and the "
                f"model's context holds {limit}: shorten it",
                too_long,
            )
    copies = decoding.n_samples // samples
    total = len(prompts) * decoding.n_samples
    done = total - len(rows) * copies

    def finished(count: int) -> None:
        nonlocal done
        done += count * copies
        if progress is not None:
            progress(done, total)

    # no_grad, not inference_mode: buffers that a model creates lazily would otherwise be
    # unusable in a later training step.
    with torch.no_grad(), _evaluation_mode(model):
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            outputs = _decode_batch(
                model, tokenizer, prompts, batch, decoding, seed, limit, finished, stop
            )
            found = {
                row: Generation(
                    text=tokenizer.decode(tokens, skip_special_tokens=True),
                    tokens=len(tokens),
                    truncated=not ended,
                )
                for row, (tokens, ended) in zip(batch, outputs, strict=True)
            }
            results |= found
            if on_batch is not None:
                on_batch(found)
    return [
        [results[prompt, sample] for sample in range(samples)] * copies
        for prompt in range(len(prompts))
    ]


def _prompt_tokens(
    tokenizer: Any, conversations: Sequence[Sequence[Mapping[str, Any]] | str]
) -> list[list[int]]:
    has_template = getattr(tokenizer, "chat_template", None) is not None
    prompts = []
    for conversation in conversations:
        if isinstance(conversation, str):
            prompts.append(list(tokenizer(conversation)["input_ids"]))
            continue
        if not has_template:
            raise ChatTemplateMissingError(
                "the tokenizer has no chat template: set tokenizer.chat_template to the model's own"
            )
        text = tokenizer.apply_chat_template(
            [dict(message) for message in conversation], add_generation_prompt=True, tokenize=False
        )
        # The template already writes the beginning-of-text token where the model wants one.
        prompts.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return prompts


def _context_limit(model: Any) -> int | None:
    limit = getattr(model.config, "max_position_embeddings", None)
    return int(limit) if isinstance(limit, int) and limit > 0 else None


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    found: set[int] = set()
    config = getattr(model, "generation_config", None)
    for value in (tokenizer.eos_token_id, getattr(config, "eos_token_id", None)):
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [int(value)])
    return sorted(found)


def _forward_parameters(model: Any) -> frozenset[str]:
    """Names of the arguments that the innermost model's forward takes."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return frozenset(inspect.signature(inner.forward).parameters)


def _decode_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    batch: Sequence[tuple[int, int]],
    decoding: Decoding,
    seed: int,
    limit: int | None,
    finished: Callable[[int], None],
    stop: Callable[[], bool] | None,
) -> list[tuple[list[int], bool]]:
    """Tokens of each row without the end token, and whether the end token came."""
    import torch

    device = next(model.parameters()).device
    parameters = _forward_parameters(model)
    # Newer transformers renamed the argument; the old name still exists in older releases only.
    cache_name = "cache" if "cache" in parameters else "past_key_values"
    ends = torch.tensor(_end_tokens(model, tokenizer), device=device)
    unique = list(dict.fromkeys(prompt for prompt, _ in batch))
    # Padding is masked, so any valid id serves; some tokenizers have no pad token.
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids_P_T, mask_P_T = _left_padded([prompts[prompt] for prompt in unique], int(pad))
    place = {prompt: row for row, prompt in enumerate(unique)}
    expand_B = torch.tensor([place[prompt] for prompt, _ in batch])
    uniforms_B_T = None
    if decoding.temperature > 0.0:
        uniforms_B_T = torch.stack(
            [_uniforms(seed, prompt, sample, decoding.max_new_tokens) for prompt, sample in batch]
        ).to(device)

    outputs: list[list[int]] = [[] for _ in batch]
    ended = [False] * len(batch)
    alive = list(range(len(batch)))
    length_B = mask_P_T.sum(1)[expand_B]
    mask_B_T = mask_P_T.to(device)
    input_B_T = ids_P_T.to(device)
    cache: Any = None
    for step in range(decoding.max_new_tokens):
        if stop is not None and stop():
            raise GenerationStoppedError("generation was stopped by its caller")
        arguments: dict[str, Any] = {
            "input_ids": input_B_T,
            "attention_mask": mask_B_T,
            cache_name: cache,
            "use_cache": True,
        }
        if "position_ids" in parameters:
            positions_B_T = (mask_B_T.cumsum(1) - 1).clamp(min=0)
            arguments["position_ids"] = positions_B_T[:, -input_B_T.shape[1] :]
        if "logits_to_keep" in parameters:
            arguments["logits_to_keep"] = 1
        output = model(**arguments)
        cache = getattr(output, cache_name)
        logits_B_V = output.logits[:, -1].float()
        if step == 0:
            index_B = expand_B.to(device)
            logits_B_V, mask_B_T = logits_B_V[index_B], mask_B_T[index_B]
            if len(unique) != len(batch):
                _select_rows(cache, index_B)
        if uniforms_B_T is None:
            token_B = logits_B_V.argmax(dim=-1)
        else:
            rows_B = torch.tensor(alive, device=device)
            token_B = _sample(
                logits_B_V,
                uniforms_B_T[rows_B, step],
                decoding.temperature,
                decoding.top_p,
                decoding.min_p,
            )
        end_B = torch.isin(token_B, ends).tolist()
        keep = []
        for position, (row, token) in enumerate(zip(alive, token_B.tolist(), strict=True)):
            if end_B[position]:
                ended[row] = True
                continue
            outputs[row].append(token)
            full = limit is not None and int(length_B[row]) + len(outputs[row]) >= limit
            if not full and step + 1 < decoding.max_new_tokens:
                keep.append(position)
        if len(keep) < len(alive):
            finished(len(alive) - len(keep))
        if not keep:
            break
        if len(keep) < len(alive):
            keep_B = torch.tensor(keep, device=device)
            _select_rows(cache, keep_B)
            mask_B_T, token_B = mask_B_T[keep_B], token_B[keep_B]
            alive = [alive[position] for position in keep]
        mask_B_T = torch.cat([mask_B_T, mask_B_T.new_ones((len(alive), 1))], dim=1)
        input_B_T = token_B.unsqueeze(1)
    return list(zip(outputs, ended, strict=True))


def _left_padded(prompts: Sequence[Sequence[int]], pad: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Token ids and attention mask [P, T]; every prompt ends in the last column."""
    import torch

    width = max(len(tokens) for tokens in prompts)
    ids_P_T = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask_P_T = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, tokens in enumerate(prompts):
        ids_P_T[row, width - len(tokens) :] = torch.tensor(tokens, dtype=torch.long)
        mask_P_T[row, width - len(tokens) :] = 1
    return ids_P_T, mask_P_T


def _select_rows(cache: Any, index_B: "torch.Tensor") -> None:
    select = getattr(cache, "batch_select_indices", None) or getattr(cache, "reorder_cache", None)
    if select is None:
        raise CacheUnsupportedError(
            f"the model keeps its state in {type(cache).__name__}, which cannot select rows: "
            "use a causal language model with a transformers key-value cache"
        )
    select(index_B)


def _uniforms(seed: int, prompt: int, sample: int, count: int) -> "torch.Tensor":
    import torch

    digest = hashlib.sha256(f"{seed}/{prompt}/{sample}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _sample(
    logits_B_V: "torch.Tensor",
    u_B: "torch.Tensor",
    temperature: float,
    top_p: float,
    min_p: float = 0.0,
) -> "torch.Tensor":
    """Token ids [B] by inverse transform of the distribution that top_p and min_p leave, at u_B."""
    import torch

    p_B_V = torch.softmax(logits_B_V / temperature, dim=-1).double()
    if top_p >= 1.0:
        return _invert(_likely(p_B_V, min_p), u_B)
    shortlist = min(_NUCLEUS_SHORTLIST, p_B_V.shape[1])
    p_B_K, token_B_K = p_B_V.topk(shortlist, dim=-1)
    index_B = _invert(_likely(_nucleus(p_B_K, top_p), min_p), u_B)
    picked_B = token_B_K.gather(1, index_B.unsqueeze(1)).squeeze(1)
    wide_B = p_B_K.sum(-1) < top_p
    if bool(wide_B.any()):
        p_W_V, token_W_V = p_B_V[wide_B].sort(dim=-1, descending=True)
        index_W = _invert(_likely(_nucleus(p_W_V, top_p), min_p), u_B[wide_B])
        picked_B[wide_B] = token_W_V.gather(1, index_W.unsqueeze(1)).squeeze(1)
    return picked_B


def _nucleus(p_B_K: "torch.Tensor", top_p: float) -> "torch.Tensor":
    """Zero every entry of the sorted p_B_K that comes after mass top_p is reached."""
    before_B_K = p_B_K.cumsum(-1) - p_B_K
    return p_B_K.where(before_B_K < top_p, p_B_K.new_zeros(()))


def _likely(p_B_K: "torch.Tensor", min_p: float) -> "torch.Tensor":
    """Zero every entry below min_p times the row's largest; with min_p 0 the very same tensor."""
    if min_p == 0.0:
        return p_B_K
    floor_B_1 = min_p * p_B_K.amax(-1, keepdim=True)
    return p_B_K.where(p_B_K >= floor_B_1, p_B_K.new_zeros(()))


def _invert(p_B_K: "torch.Tensor", u_B: "torch.Tensor") -> "torch.Tensor":
    """First index whose cumulative mass exceeds u * total mass."""
    import torch

    cumulative_B_K = p_B_K.cumsum(-1)
    target_B_1 = (u_B * cumulative_B_K[:, -1]).unsqueeze(1)
    index_B = torch.searchsorted(cumulative_B_K, target_B_1, right=True).squeeze(1)
    # u < 1, but rounding may reach the end; step back to the last entry with any mass.
    last_B = (p_B_K > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(index_B, last_B)
