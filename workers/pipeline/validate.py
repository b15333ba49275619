"""Validation: what a file really means to this base model, before any step is taken."""

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jobspec.chat import DEFAULT_MAX_LINE_BYTES, MIN_ROWS, ChatRow, read_chat_rows
from workers.pipeline.failure import FailureCode, PipelineFailure
from workers.pipeline.rows import RowTooLong, TemplateMismatch, TokenRow, encode_row

LISTED_LINES = 20
MAX_DETAILS = 100


class Dataset(NamedTuple):
    """A checked file: chat rows, their tokens, and the numbers that the job shows."""

    chat: list[ChatRow]
    rows: list[TokenRow]
    report: dict[str, Any]


def load_dataset(
    path: Path,
    tokenizer: Any,
    max_length: int,
    *,
    param: str,
    truncate: bool,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    min_rows: int = MIN_ROWS,
) -> Dataset:
    """Read and tokenise a chat file.

    Raises PipelineFailure with up to 100 sentences that each name a line: code
    invalid_training_file or invalid_validation_file (by `param`), invalid_n_examples, or
    context_length_exceeded where rows are too long and `truncate` is off.
    """
    code: FailureCode = (
        "invalid_validation_file" if param == "validation_file" else "invalid_training_file"
    )
    chat, found = read_chat_rows(path, max_line_bytes=max_line_bytes)
    if found.error_count:
        raise PipelineFailure(
            code,
            found.summary(),
            param=param,
            details=[finding.sentence() for finding in found.errors],
        )
    if len(chat) < min_rows:
        raise PipelineFailure(
            "invalid_n_examples",
            f"The file has {len(chat)} examples; at least {min_rows} are needed.",
            param=param,
        )
    rows: list[TokenRow] = []
    mismatches: list[str] = []
    too_long: list[str] = []
    for row in chat:
        try:
            rows.append(encode_row(tokenizer, row, max_length, truncate=truncate))
        except TemplateMismatch as error:
            mismatches.append(f"Line {row.line}: {error}.")
        except RowTooLong as error:
            too_long.append(
                f"Line {row.line}: {error.tokens:,} tokens or more, the limit is {error.limit:,}"
                + (" and no trained token would be left." if truncate else ".")
            )
    if mismatches:
        raise PipelineFailure(
            code,
            f"The base model cannot express {len(mismatches)} of the examples. {mismatches[0]}",
            param=param,
            details=mismatches[:MAX_DETAILS],
        )
    if too_long:
        raise PipelineFailure(
            "context_length_exceeded",
            f"{len(too_long)} of the examples are too long. {too_long[0]} Shorten or split them.",
            param=param,
            details=too_long[:MAX_DETAILS],
        )
    report = {
        **token_report(rows),
        "warnings": [finding.sentence() for finding in found.warnings],
        "warning_count": found.warning_count,
        **_duplicates(chat),
    }
    return Dataset(chat, rows, report)


def token_report(rows: Sequence[TokenRow]) -> dict[str, Any]:
    """Counts and percentiles of tokens, and which rows were cut."""
    lengths = sorted(len(row.ids) for row in rows)
    cut = [row.line for row in rows if row.truncated]
    return {
        "examples": len(rows),
        "tokens": sum(lengths),
        "trained_tokens": sum(row.trained_tokens for row in rows),
        "tokens_per_example": {
            "median": int(statistics.median(lengths)),
            "p95": lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))],
            "max": lengths[-1],
        },
        "truncated_examples": len(cut),
        "truncated_lines": cut[:LISTED_LINES],
    }


def overlap(training: Sequence[ChatRow], validation: Sequence[ChatRow]) -> dict[str, Any]:
    """Validation rows that also stand in the training file, by line of the validation file."""
    seen = {_key(row) for row in training}
    lines = [row.line for row in validation if _key(row) in seen]
    return {"overlapping_examples": len(lines), "overlapping_lines": lines[:LISTED_LINES]}


def _duplicates(chat: Sequence[ChatRow]) -> dict[str, Any]:
    counts = Counter(_key(row) for row in chat)
    repeated = sum(count - 1 for count in counts.values())
    first: set[str] = set()
    lines = []
    for row in chat:
        key = _key(row)
        if key in first:
            lines.append(row.line)
        first.add(key)
    return {"duplicate_examples": repeated, "duplicate_lines": lines[:LISTED_LINES]}


def _key(row: ChatRow) -> str:
    text = json.dumps([(message.role, message.content) for message in row.messages])
    return hashlib.sha256(text.encode()).hexdigest()
