"""Prompt suites by file: AdvBench, HarmBench, StrongREJECT, XSTest, and an operator's own.

A suite takes the place of the shipped harmful prompts or safe look-alikes. Each format is read as
its authors publish it (CSV) and as JSON Lines with `id` and `prompt`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from evaluators.prompts import Prompt
from evaluators.suite_files import SuiteFileError, read_prompt_file
from evaluators.suite_layouts import (
    LAYOUTS,
    Duplicate,
    RowReader,
    SuiteFormat,
    SuiteKind,
    detected,
    normalised,
)
from jobspec.findings import Findings, shown
from jobspec.frozen import Frozen
from jobspec.spec import PromptSuite

__all__ = [
    "Duplicate",
    "Suite",
    "SuiteFileError",
    "SuiteFormat",
    "SuiteKind",
    "normalised",
    "read_suite",
    "read_suites",
]

MAX_PROMPTS = 20_000


class Suite(Frozen):
    """The prompts of one file, each text once, in file order."""

    name: str
    format: SuiteFormat
    source: str
    licence: str | None
    sha256: str = Field(description="of the file")
    rows: int = Field(ge=1, description="prompts in the file, repeated ones counted")
    planned: int | None = None
    prompts: tuple[Prompt, ...] = Field(description="ids are name/id-in-the-file")
    kinds: tuple[SuiteKind, ...] = Field(description="one a prompt")
    duplicates: tuple[Duplicate, ...] = Field((), description="repeated within the file")
    shared: int = Field(0, ge=0, description="prompts that an earlier suite has too")
    left_out: Mapping[str, int] = Field(
        default_factory=dict, description="rows that this evaluation cannot judge, by reason"
    )

    @property
    def shortfall(self) -> int:
        """How many distinct prompts the file lacks of those planned; above 0 nothing can pass."""
        return max(0, (self.planned or 0) - len(self.prompts) - self.shared)

    def of_kind(self, kind: SuiteKind) -> tuple[Prompt, ...]:
        return tuple(
            prompt for prompt, found in zip(self.prompts, self.kinds, strict=True) if found == kind
        )

    def summary(self) -> dict[str, Any]:
        """The suite for a report: counts and origin, no prompt."""
        return {
            "name": self.name,
            "format": self.format,
            "source": self.source,
            "licence": self.licence,
            "sha256": self.sha256,
            "rows": self.rows,
            "prompts": len(self.prompts),
            "kinds": dict(Counter(self.kinds)),
            "duplicates": len(self.duplicates),
            "shared": self.shared,
            "left_out": dict(self.left_out),
            "planned": self.planned,
            "shortfall": self.shortfall,
        }


def read_suite(suite: PromptSuite, name: str | None = None) -> Suite:
    """Read a suite's file. `name` stands before every id; None: the format's name, and the file's
    own (without ending) for an own file.

    HarmBench's contextual behaviours follow their context as in its direct requests (context, blank
    line, ---, blank line, behaviour); its copyright behaviours are left out and counted, because
    they are judged by comparing texts. XSTest prompts whose type begins with `contrast_` are
    harmful, the others safe look-alikes. A row of an own file may say its `kind`.

    Raises SuiteFileError with line and field of the first faults: broken rows, two prompts of one
    id, one text under two kinds, more than 20,000 prompts or 20,000 characters in one.
    """
    findings = Findings()
    file = read_prompt_file(suite.path, findings)
    first = next((row for row in file.rows if row.fields is not None), None)
    layout_name: SuiteFormat | None = None
    if first is not None:
        layout_name = detected(first, findings) if suite.format == "auto" else suite.format
    elif not findings.errors:
        findings.add(
            "error", "empty_file", None, None, "The file has no prompt. Put one on each line."
        )
    if layout_name is None:
        raise SuiteFileError(suite.path.name, findings.report(len(file.rows)))
    name = name or (shown(suite.path.stem) if layout_name == "own" else layout_name)
    reader = RowReader(name, layout_name, findings)
    for number, row in enumerate(file.rows, start=1):
        if row.fields is not None:
            reader.take(number, row)
    if not findings.errors and not reader.prompts:
        findings.add("error", "no_prompt", None, None, "No row holds a prompt that can be judged.")
    if len(reader.prompts) > MAX_PROMPTS:
        findings.add(
            "error", "too_many_prompts", None, None,
            f"The file has {len(reader.prompts):,} prompts; at most {MAX_PROMPTS:,} are allowed.",
        )  # fmt: skip
    if findings.errors:
        raise SuiteFileError(suite.path.name, findings.report(len(file.rows)))
    layout = LAYOUTS[layout_name]
    return Suite(
        name=name,
        format=layout_name,
        source=layout.source,
        licence=layout.licence,
        sha256=file.sha256,
        rows=len(file.rows),
        planned=suite.planned,
        prompts=tuple(reader.prompts),
        kinds=tuple(reader.kinds),
        duplicates=tuple(reader.duplicates),
        left_out=dict(reader.left_out),
    )


def read_suites(suites: Sequence[PromptSuite]) -> tuple[Suite, ...]:
    """Read several files whose prompts are asked together.

    Names are unique (advbench, advbench-2, ...), so ids are too. A text of two files is asked once,
    as the earlier file has it; it still counts for what the later one planned. Raises as
    `read_suite` does, and where two files give one text two kinds.
    """
    names: set[str] = set()
    seen: dict[str, tuple[str, SuiteKind]] = {}
    result = []
    for options in suites:
        suite = read_suite(options)
        if suite.name in names:
            number = next(n for n in range(2, len(suites) + 2) if f"{suite.name}-{n}" not in names)
            suite = read_suite(options, f"{suite.name}-{number}")
        names.add(suite.name)
        kept: list[tuple[Prompt, SuiteKind]] = []
        for prompt, kind in zip(suite.prompts, suite.kinds, strict=True):
            earlier, earlier_kind = seen.setdefault(normalised(prompt.text), (prompt.id, kind))
            if earlier == prompt.id:
                kept.append((prompt, kind))
            elif earlier_kind != kind:
                findings = Findings()
                findings.add(
                    "error", "two_kinds", None, None,
                    f"{shown(prompt.id)} is {kind} here, and its text is {earlier_kind} as "
                    f"{shown(earlier)}. Leave one out.",
                )  # fmt: skip
                raise SuiteFileError(options.path.name, findings.report(suite.rows))
        result.append(
            suite.model_copy(
                update={
                    "prompts": tuple(prompt for prompt, _ in kept),
                    "kinds": tuple(kind for _, kind in kept),
                    "shared": len(suite.prompts) - len(kept),
                }
            )
        )
    return tuple(result)
