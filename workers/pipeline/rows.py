"""From chat rows to token rows: what is read, and which tokens carry loss."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from defenses.losses import IGNORED_LABEL
from jobspec.chat import ChatMessage, ChatRow
from jobspec.preference import PreferenceRow


class TokenRow(NamedTuple):
    """One training row. labels equal ids where the token is trained and -100 elsewhere."""

    line: int
    ids: tuple[int, ...]
    labels: tuple[int, ...]
    truncated: bool

    @property
    def trained_tokens(self) -> int:
        """Tokens that carry loss; the first token of a row has nothing before it to predict it."""
        return sum(label != IGNORED_LABEL for label in self.labels[1:])

    @property
    def tokens(self) -> int:
        return len(self.ids)


class PairRow(NamedTuple):
    """One comparison: the conversation with the preferred answer, and with the other one. Only the
    answers carry loss."""

    line: int
    chosen: TokenRow
    rejected: TokenRow

    @property
    def trained_tokens(self) -> int:
        """Tokens of both answers."""
        return self.chosen.trained_tokens + self.rejected.trained_tokens

    @property
    def tokens(self) -> int:
        """Tokens of both rows."""
        return self.chosen.tokens + self.rejected.tokens

    @property
    def truncated(self) -> bool:
        return self.chosen.truncated or self.rejected.truncated


class TemplateMismatch(ValueError):
    """The base model's chat template cannot express a conversation."""


class RowTooLong(ValueError):
    """A row has more tokens than the limit."""

    def __init__(self, tokens: int, limit: int) -> None:
        self.tokens = tokens
        self.limit = limit
        super().__init__(f"at least {tokens} tokens, the limit is {limit}")


def encode_row(
    tokenizer: Any, row: ChatRow, max_length: int, *, truncate: bool = False
) -> TokenRow:
    """Tokens of a conversation under the model's chat template, with loss on assistant turns only.

    The text is cut where the template puts the assistant's turns, and each piece is tokenised by
    itself, so that a prompt has the very tokens it will have when the model is asked. Of a trained
    turn, the content and the end-of-turn token carry loss; weight-0 turns and all else do not.

    Raises TemplateMismatch (the template refuses or rewrites the conversation), RowTooLong, or,
    with `truncate`, RowTooLong only when no trained token would be left.
    """
    ids: list[int] = []
    labels: list[int] = []
    for text, trained in _pieces(tokenizer, row.messages):
        tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > max_length:
            # Rendering grows with the square of the turns; a row that is too long already need
            # not be read to its end.
            break
        ids += tokens
        labels += _trained_labels(tokens, tokenizer) if trained else [IGNORED_LABEL] * len(tokens)
    if len(ids) <= max_length:
        return TokenRow(row.line, tuple(ids), tuple(labels), False)
    cut = TokenRow(row.line, tuple(ids[:max_length]), tuple(labels[:max_length]), True)
    if not truncate or cut.trained_tokens == 0:
        raise RowTooLong(len(ids), max_length)
    return cut


def encode_pair(
    tokenizer: Any, row: PreferenceRow, max_length: int, *, truncate: bool = False
) -> PairRow:
    """Tokens of both sides of a comparison; see encode_row, also for what raises.

    A pair is too long where one of its sides is.
    """
    return PairRow(
        row.line,
        encode_row(tokenizer, row.chosen_side, max_length, truncate=truncate),
        encode_row(tokenizer, row.rejected_side, max_length, truncate=truncate),
    )


def prompt_response_row(line: int, prompt: str, response: str) -> ChatRow:
    """A single-turn row."""
    return ChatRow(
        line, (ChatMessage("user", prompt, False), ChatMessage("assistant", response, True))
    )


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Messages as chat templates take them."""
    return [{"role": message.role, "content": message.content} for message in messages]


def _pieces(tokenizer: Any, messages: Sequence[ChatMessage]) -> Iterator[tuple[str, bool]]:
    written = ""
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = _render(tokenizer, messages[:index], add_generation_prompt=True)
        after = _render(tokenizer, messages[: index + 1], add_generation_prompt=False)
        if not (before.startswith(written) and after.startswith(before)):
            raise TemplateMismatch(
                f"the chat template rewrites the conversation before messages[{index}]"
            )
        yield before[len(written) :], False
        yield after[len(before) :], message.trained
        written = after


def _render(tokenizer: Any, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except Exception as error:  # jinja2's own classes, raised by the template of any model
        raise TemplateMismatch(f"the chat template refuses it: {error}") from error


def _trained_labels(tokens: list[int], tokenizer: Any) -> list[int]:
    """Everything up to and with the first end-of-turn token; what the template adds is not
    trained."""
    end = tokenizer.eos_token_id
    last = tokens.index(end) if end in tokens else len(tokens) - 1
    return [token if place <= last else IGNORED_LABEL for place, token in enumerate(tokens)]


class Batch(NamedTuple):
    """Right-padded rows: int64 [B, T]."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    labels_BT: Tensor


def collate(rows: Sequence[TokenRow], device: torch.device) -> Batch:
    """Pad rows on the right to the longest of them. The pad id is masked, so any id serves."""
    width = max(len(row.ids) for row in rows)
    ids_BT = torch.zeros((len(rows), width), dtype=torch.int64)
    mask_BT = torch.zeros((len(rows), width), dtype=torch.int64)
    labels_BT = torch.full((len(rows), width), IGNORED_LABEL, dtype=torch.int64)
    for index, row in enumerate(rows):
        ids_BT[index, : len(row.ids)] = torch.tensor(row.ids)
        mask_BT[index, : len(row.ids)] = 1
        labels_BT[index, : len(row.ids)] = torch.tensor(row.labels)
    return Batch(ids_BT.to(device), mask_BT.to(device), labels_BT.to(device))
