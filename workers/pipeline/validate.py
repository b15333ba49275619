"""Validation: what a file really means to this base model, before any step is taken."""

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jobspec.chat import ChatRow, read_chat_rows
from jobspec.findings import MIN_ROWS, FileReport
from jobspec.formats import detect_format, format_of, wrong_format
from jobspec.hyperparameters import Method
from jobspec.json_lines import DEFAULT_MAX_LINE_BYTES
from jobspec.preference import PreferenceRow, read_preference_rows
from workers.pipeline.failure import FailureCode, PipelineFailure
from workers.pipeline.rows import (
    PairRow,
    RowTooLong,
    TemplateMismatch,
    TokenRow,
    encode_pair,
    encode_row,
)

LISTED_LINES = 20
MAX_DETAILS = 100

Row = TypeVar("Row", ChatRow, PreferenceRow)
Encoded = TypeVar("Encoded", TokenRow, PairRow)


class Dataset(NamedTuple):
    """A checked file: chat rows, their tokens, and the numbers that the job shows.

    For a preference file, chat and rows are the chosen sides, and pairs are what is tuned on.
    """

    chat: list[ChatRow]
    rows: list[TokenRow]
    report: dict[str, Any]
    pairs: list[PairRow] | None = None

    @property
    def tuned(self) -> list[TokenRow] | list[PairRow]:
        """What one step of tuning reads: rows, or pairs where there are any."""
        return self.rows if self.pairs is None else self.pairs


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
    invalid_training_file or invalid_validation_file (by `param`; also for a preference file),
    invalid_n_examples, or context_length_exceeded where rows are too long and `truncate` is off.
    """
    _check_format(path, "supervised", param, max_line_bytes)
    chat, found = read_chat_rows(path, max_line_bytes=max_line_bytes)
    _check_findings(len(chat), found, param, min_rows)
    rows = _encode_all(
        chat,
        lambda row: encode_row(tokenizer, row, max_length, truncate=truncate),
        param,
        truncate=truncate,
    )
    report = {
        **token_report(rows),
        **_warnings(found),
        **_duplicates([(row.line, _key(row)) for row in chat]),
    }
    return Dataset(chat, rows, report)


def load_preferences(
    path: Path,
    tokenizer: Any,
    max_length: int,
    *,
    param: str,
    truncate: bool,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    min_rows: int = MIN_ROWS,
) -> Dataset:
    """Read and tokenise a preference file; arguments and failures as load_dataset.

    The report counts the tokens of both sides. Its equal examples are pairs whose sides have the
    same tokens, because they were cut or the template trims them: they train nothing.
    """
    _check_format(path, "dpo", param, max_line_bytes)
    preferences, found = read_preference_rows(path, max_line_bytes=max_line_bytes)
    _check_findings(len(preferences), found, param, min_rows)
    pairs = _encode_all(
        preferences,
        lambda row: encode_pair(tokenizer, row, max_length, truncate=truncate),
        param,
        truncate=truncate,
    )
    equal = [pair.line for pair in pairs if pair.chosen.ids == pair.rejected.ids]
    report = {
        **token_report(pairs),
        **_warnings(found),
        **_duplicates(
            [(row.line, _key(row.chosen_side) + _key(row.rejected_side)) for row in preferences]
        ),
        "equal_examples": len(equal),
        "equal_lines": equal[:LISTED_LINES],
    }
    return Dataset(
        [row.chosen_side for row in preferences], [pair.chosen for pair in pairs], report, pairs
    )


def _failure_code(param: str) -> FailureCode:
    return "invalid_validation_file" if param == "validation_file" else "invalid_training_file"


def _check_format(path: Path, method: Method, param: str, max_line_bytes: int) -> None:
    seen = detect_format(path, max_line_bytes=max_line_bytes)
    if seen is not None and seen != format_of(method):
        raise PipelineFailure(
            _failure_code(param),
            f"The file cannot be used. {wrong_format(seen, method)}",
            param=param,
        )


def _check_findings(rows: int, found: FileReport, param: str, min_rows: int) -> None:
    if found.error_count:
        raise PipelineFailure(
            _failure_code(param),
            found.summary(),
            param=param,
            details=[finding.sentence() for finding in found.errors],
        )
    if rows < min_rows:
        raise PipelineFailure(
            "invalid_n_examples",
            f"The file has {rows} examples; at least {min_rows} are needed.",
            param=param,
        )


def _encode_all(
    rows: Sequence[Row], encode: Callable[[Row], Encoded], param: str, *, truncate: bool
) -> list[Encoded]:
    """Every row encoded; raises PipelineFailure naming the lines that cannot be."""
    encoded: list[Encoded] = []
    mismatches: list[str] = []
    too_long: list[str] = []
    for row in rows:
        try:
            encoded.append(encode(row))
        except TemplateMismatch as error:
            mismatches.append(f"Line {row.line}: {error}.")
        except RowTooLong as error:
            too_long.append(
                f"Line {row.line}: {error.tokens:,} tokens or more, the limit is {error.limit:,}"
                + (" and no trained token would be left." if truncate else ".")
            )
    if mismatches:
        raise PipelineFailure(
            _failure_code(param),
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
    return encoded


def token_report(rows: Sequence[TokenRow] | Sequence[PairRow]) -> dict[str, Any]:
    """Counts and percentiles of tokens, and which rows were cut."""
    lengths = sorted(row.tokens for row in rows)
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


def _warnings(found: FileReport) -> dict[str, Any]:
    return {
        "warnings": [finding.sentence() for finding in found.warnings],
        "warning_count": found.warning_count,
    }


def _duplicates(keys: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Rows that stood before, by line."""
    first: set[str] = set()
    lines = []
    for line, key in keys:
        if key in first:
            lines.append(line)
        first.add(key)
    return {"duplicate_examples": len(lines), "duplicate_lines": lines[:LISTED_LINES]}


def _key(row: ChatRow) -> str:
    text = json.dumps([(message.role, message.content) for message in row.messages])
    return hashlib.sha256(text.encode()).hexdigest()
