"""Chat rows as tokens with loss on the trained answers, and batches of them."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analyses.attribution.spec import Target
from analyses.context import AnalysisError
from jobspec.chat import ChatMessage, ChatRow

IGNORED = -100


class EncodedRow(NamedTuple):
    """labels equal ids where the token is trained and IGNORED elsewhere."""

    line: int
    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def row_id(self) -> str:
        """Hash of tokens and mask, 16 hex digits."""
        return hashlib.sha256(repr((self.ids, self.labels)).encode()).hexdigest()[:16]

    @property
    def trained_tokens(self) -> int:
        return sum(label != IGNORED for label in self.labels[1:])


class TokenBatch(NamedTuple):
    """Right-padded rows, int64 [B, T]."""

    ids_BT: Tensor
    mask_BT: Tensor
    labels_BT: Tensor


class UnreadableRow(ValueError):
    """The chat template refuses or rewrites a conversation."""


def encode(tokenizer: Any, row: ChatRow) -> EncodedRow:
    """Tokens as the tuning had them: the text is cut where the template puts an assistant turn, and
    each piece is tokenised by itself. Of a trained turn, the text up to the end-of-turn token
    carries loss. Raises UnreadableRow."""
    ids: list[int] = []
    labels: list[int] = []
    written = ""
    for index, message in enumerate(row.messages):
        if message.role != "assistant":
            continue
        before = _render(tokenizer, row.messages[:index], True)
        after = _render(tokenizer, row.messages[: index + 1], False)
        if not (before.startswith(written) and after.startswith(before)):
            raise UnreadableRow(f"the chat template rewrites what precedes messages[{index}]")
        for text, trained in ((before[len(written) :], False), (after[len(before) :], True)):
            tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            ids += tokens
            carries = trained and message.trained
            labels += _trained(tokens, tokenizer) if carries else [IGNORED] * len(tokens)
        written = after
    return EncodedRow(row.line, tuple(ids), tuple(labels))


def encode_file(
    tokenizer: Any, rows: Sequence[ChatRow], max_length: int
) -> tuple[list[EncodedRow], list[str]]:
    """The rows of a file and warnings; rows longer than max_length are cut, as in tuning, and rows
    that then train nothing are left out. Raises AnalysisError where none is left."""
    encoded: list[EncodedRow] = []
    cut = dropped = 0
    for row in rows:
        try:
            whole = encode(tokenizer, row)
        except UnreadableRow as error:
            raise AnalysisError(
                f"training_file line {row.line}: {error}; was the job tuned on this file?",
                "training_file",
            ) from error
        short = EncodedRow(row.line, whole.ids[:max_length], whole.labels[:max_length])
        if short.trained_tokens == 0:
            dropped += 1
            continue
        cut += len(whole.ids) > max_length
        encoded.append(short)
    if not encoded:
        raise AnalysisError("training_file: no row trains a token", "training_file")
    warnings = []
    if cut:
        warnings.append(f"{cut} rows are longer than {max_length} tokens and were cut.")
    if dropped:
        warnings.append(f"{dropped} rows train no token within {max_length} and have no score.")
    return encoded, warnings


def encode_answer(
    tokenizer: Any, prompt: str, answer: str, context_length: int, param: str
) -> EncodedRow:
    """A target as a row of its own. Raises AnalysisError: no token, or longer than the context."""
    row = ChatRow(0, (ChatMessage("user", prompt, False), ChatMessage("assistant", answer, True)))
    encoded = encode(tokenizer, row)
    if encoded.trained_tokens == 0:
        raise AnalysisError(f"{param}: has no token under this model's tokenizer", param)
    if len(encoded.ids) > context_length:
        raise AnalysisError(
            f"{param}: {len(encoded.ids)} tokens with its prompt, the model's context holds "
            f"{context_length}; shorten it",
            param,
        )
    return encoded


class TargetRows(NamedTuple):
    """Targets as rows: one row an answer, and sign_QR with g = sign_QR @ losses_R."""

    rows: list[EncodedRow]
    sign_QR: Tensor


def target_rows(
    tokenizer: Any, targets: Sequence[Target], context_length: int, where: str = "targets"
) -> TargetRows:
    """g_q = NLL(completion) - NLL(contrast), means over the answer's own tokens, nats."""
    rows: list[EncodedRow] = []
    signs: list[tuple[int, int, float]] = []
    for q, target in enumerate(targets):
        answers = [("completion", target.completion, 1.0)]
        if target.contrast is not None:
            answers.append(("contrast", target.contrast, -1.0))
        for name, text, sign in answers:
            signs.append((q, len(rows), sign))
            param = f"{where}.{q}.{name}"
            rows.append(encode_answer(tokenizer, target.prompt, text, context_length, param))
    sign_QR = torch.zeros(len(targets), len(rows))
    for q, r, sign in signs:
        sign_QR[q, r] = sign
    return TargetRows(rows, sign_QR)


def batches(rows: Sequence[EncodedRow], batch_size: int) -> Iterator[list[int]]:
    """Indices of rows, short ones first, so that a batch holds rows of like length."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index].ids))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def collate(rows: Sequence[EncodedRow], device: torch.device) -> TokenBatch:
    width = max(len(row.ids) for row in rows)
    ids_BT = torch.zeros((len(rows), width), dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    labels_BT = torch.full_like(ids_BT, IGNORED)
    for index, row in enumerate(rows):
        length = len(row.ids)
        ids_BT[index, :length] = torch.tensor(row.ids)
        mask_BT[index, :length] = 1
        labels_BT[index, :length] = torch.tensor(row.labels)
    return TokenBatch(ids_BT.to(device), mask_BT.to(device), labels_BT.to(device))


def _render(tokenizer: Any, messages: Sequence[ChatMessage], prompt: bool) -> str:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        )
    except Exception as error:  # jinja2's own classes, raised by the template of any model
        raise UnreadableRow(f"the chat template refuses it: {error}") from error


def _trained(tokens: list[int], tokenizer: Any) -> list[int]:
    """Up to and with the first end-of-turn token."""
    end = tokenizer.eos_token_id
    last = tokens.index(end) if end in tokens else len(tokens) - 1
    return [token if place <= last else IGNORED for place, token in enumerate(tokens)]
