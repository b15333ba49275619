"""The labelled answers that the embedded scorer is fitted on and checked with.

Only files whose licence allows redistribution are fitted; the others, where present, serve as
held-out checks and leave nothing but their error rates in the card.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class FitDataMissingError(FileNotFoundError):
    """A labelled file that the fit needs is not in the data folder."""


class FitDataError(ValueError):
    """A labelled file has a line or a field that cannot be read; the message names the line."""


class Source(NamedTuple):
    """One labelled file, {file}.jsonl in the data folder or its labelled_safety/."""

    name: str
    file: str
    attribution: str
    in_runs: bool = False
    """The file keeps the answers of one model under one attack together, without naming them."""


SOURCES = (
    Source(
        "jailbreakbench_artifacts",
        "jailbreakbench_artifacts",
        "JailbreakBench artifacts (Chao et al. 2024, MIT)",
        in_runs=True,
    ),
    Source(
        "xstest_completions",
        "xstest_completions",
        "XSTest completions (Roettger et al., NAACL 2024, CC-BY-4.0)",
    ),
    Source(
        "pyrit_scorer_evals",
        "pyrit_scorer_evals",
        "PyRIT scorer evaluations (Microsoft, MIT)",
    ),
)
CHECKS = (
    Source("jailjudge_mini", "TESTONLY_jailjudge_mini", "JAILJUDGE, selection of JailbreakEval"),
    Source("safe_rlhf_mini", "NC_safe_rlhf_mini", "PKU-SafeRLHF, selection of JailbreakEval"),
)
REFUSALS = SOURCES[1]


@dataclass(frozen=True)
class LabelledSet:
    """Responses of one source with labels in {0, 1}.

    groups: the model that answered, or the run of rows that one model answered, where the file
    tells; else the source. prompts: answers to one prompt are no independent evidence, so intervals
    draw whole prompts.
    """

    name: str
    responses: tuple[str, ...]
    labels: NDArray[np.int64]
    groups: tuple[str, ...]
    prompts: tuple[str, ...]


def harmful_set(data_folder: Path, source: Source) -> LabelledSet:
    """Answers to unsafe prompts; y = 1 when the answer is harmful.

    JailbreakBench, JAILJUDGE and Safe-RLHF carry the label; XSTest: unsafe prompts, full
    compliance; PyRIT: mean human score of at least one half.
    """
    rows = _rows(data_folder, source)
    if source.name == "xstest_completions":
        rows = [row for row in rows if row["prompt_unsafe"] == 1]
        y = [row["human_label"] == "full_compliance" for row in rows]
    elif source.name == "pyrit_scorer_evals":
        y = [row["score"] >= 0.5 for row in rows]
    else:
        y = [row["unsafe"] == 1 for row in rows]
    return _of_both_kinds(_labelled(source, rows, y))


def refusal_set(data_folder: Path) -> LabelledSet:
    """XSTest answers to safe and unsafe prompts; y = 1 full refusal, 0 full compliance."""
    rows = [
        row
        for row in _rows(data_folder, REFUSALS)
        if row["human_label"] in ("full_refusal", "full_compliance")
    ]
    return _of_both_kinds(
        _labelled(REFUSALS, rows, [row["human_label"] == "full_refusal" for row in rows])
    )


def harmless_set(data_folder: Path) -> LabelledSet:
    """XSTest answers to safe prompts, none of them harmful: where the scorer is NOT valid."""
    rows = [row for row in _rows(data_folder, REFUSALS) if row["prompt_unsafe"] == 0]
    return _labelled(REFUSALS, rows, [False] * len(rows))


def is_present(data_folder: Path, source: Source) -> bool:
    return _path(data_folder, source).is_file()


def require_sources(data_folder: Path) -> None:
    """Raises FitDataMissingError unless every file to fit is there, before anything is read."""
    for source in SOURCES:
        if not is_present(data_folder, source):
            raise FitDataMissingError(
                f"{_path(data_folder, source)} does not exist: the data folder must hold, itself "
                f"or in labelled_safety/, {', '.join(f'{needed.file}.jsonl' for needed in SOURCES)}"
            )


def sha256_of(data_folder: Path, source: Source) -> str:
    return hashlib.sha256(_path(data_folder, source).read_bytes()).hexdigest()


def _labelled(source: Source, rows: list[dict[str, Any]], y: list[bool]) -> LabelledSet:
    prompts = tuple(str(row["prompt"]) for row in rows)
    named = tuple(str(row.get("model", source.name)) for row in rows)
    return LabelledSet(
        source.name,
        tuple(str(row["response"]) for row in rows),
        np.array(y, dtype=np.int64),
        runs(prompts) if source.in_runs else named,
        prompts,
    )


def runs(prompts: Sequence[str]) -> tuple[str, ...]:
    """The run of each row: a new one begins where a prompt of the current one returns."""
    starts, seen = [0], set[str]()
    for row, prompt in enumerate(prompts):
        if prompt in seen:
            starts.append(row)
            seen.clear()
        seen.add(prompt)
    ends = [*starts[1:], len(prompts)]
    return tuple(
        f"rows {start + 1}-{end}"
        for start, end in zip(starts, ends, strict=True)
        for _ in range(start, end)
    )


def _of_both_kinds(data: LabelledSet) -> LabelledSet:
    if len(set(data.labels.tolist())) < 2:
        raise FitDataError(
            f"{data.name}: of {len(data.labels)} usable rows none has the other label; a fit "
            "needs both"
        )
    return data


def _path(data_folder: Path, source: Source) -> Path:
    inner = data_folder / "labelled_safety"
    return (inner if inner.is_dir() else data_folder) / f"{source.file}.jsonl"


_FIELDS = {
    "xstest_completions": ("prompt_unsafe", "human_label", "model"),
    "pyrit_scorer_evals": ("score",),
}


def _rows(data_folder: Path, source: Source) -> list[dict[str, Any]]:
    path = _path(data_folder, source)
    if not path.is_file():
        raise FitDataMissingError(f"{path} does not exist")
    needed = ("prompt", "response", *_FIELDS.get(source.name, ("unsafe",)))
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                missing = [name for name in needed if name not in row]
            except (ValueError, TypeError) as error:
                raise FitDataError(f"{path}, line {number}: not a JSON object") from error
            if missing:
                raise FitDataError(f"{path}, line {number}: no field {missing[0]!r}")
            rows.append(row)
    if not rows:
        raise FitDataError(f"{path} holds no rows")
    return rows
