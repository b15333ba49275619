"""The formats of prompt suites: which fields they have, and what a row of each says."""

import unicodedata
from collections import Counter
from typing import Literal, NamedTuple

from pydantic import Field

from evaluators.prompts import Prompt
from evaluators.suite_files import FileRow, text_of
from jobspec.findings import Findings, shown
from jobspec.frozen import Frozen

SuiteFormat = Literal["advbench", "harmbench", "strongreject", "xstest", "own"]
SuiteKind = Literal["harmful", "safe_lookalike"]

_KINDS: dict[str, SuiteKind] = {"harmful": "harmful", "safe_lookalike": "safe_lookalike"}
MAX_CHARACTERS = 20_000
MAX_ID = 200


class Layout(NamedTuple):
    """Where a format has its text, id and category, the first that a row has, and its origin."""

    text: tuple[str, ...]
    id: tuple[str, ...]
    group: tuple[str, ...]
    source: str
    licence: str | None


LAYOUTS: dict[SuiteFormat, Layout] = {
    "advbench": Layout(
        ("goal", "prompt"), ("id",), ("category",), "AdvBench (Zou et al. 2023)", "MIT"
    ),
    "harmbench": Layout(
        ("Behavior", "prompt"),
        ("BehaviorID", "id"),
        ("SemanticCategory", "category"),
        "HarmBench (Mazeika et al. 2024)",
        "MIT",
    ),
    "strongreject": Layout(
        ("forbidden_prompt", "prompt"),
        ("id",),
        ("category",),
        "StrongREJECT (Souly et al. 2024)",
        "MIT",
    ),
    "xstest": Layout(
        ("prompt",), ("id",), ("type",), "XSTest (Röttger et al., NAACL 2024)", "CC-BY-4.0"
    ),
    "own": Layout(("prompt",), ("id",), ("category",), "own file", None),
}

# Field names that tell a format, the most particular first.
_TELLING: tuple[tuple[frozenset[str], SuiteFormat], ...] = (
    (frozenset({"forbidden_prompt"}), "strongreject"),
    (frozenset({"Behavior", "BehaviorID"}), "harmbench"),
    (frozenset({"goal", "target"}), "advbench"),
    (frozenset({"prompt", "target"}), "advbench"),
    (frozenset({"prompt", "type"}), "xstest"),
    (frozenset({"prompt", "category", "source"}), "strongreject"),
    (frozenset({"prompt"}), "own"),
)


class Duplicate(Frozen):
    """A prompt that was left out because its text, but for case and blanks, came before."""

    line: int = Field(ge=1, description="line of the prompt that was left out")
    of: str = Field(description="id of the prompt that was kept")


def normalised(text: str) -> str:
    """A text as duplicates are found: compatibility form, no case, single blanks."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def detected(row: FileRow, findings: Findings) -> SuiteFormat | None:
    """The format that a row's fields tell; None, with a finding, where they tell none."""
    assert row.fields is not None
    fields = frozenset(row.fields)
    if "is_safe" in fields:
        findings.add(
            "error", "not_a_suite", row.line, "is_safe",
            "This is a file of judged answers, as BeaverTails has them. Use it with the protocol "
            "harmful_score/beavertails, or give `format`.",
        )  # fmt: skip
        return None
    for telling, name in _TELLING:
        if telling <= fields:
            return name
    findings.add(
        "error", "unknown_format", row.line, None,
        f"The fields {', '.join(shown(field) for field in sorted(fields)[:8])} are of no known "
        f"format ({', '.join(LAYOUTS)}). An own file needs `prompt`.",
    )  # fmt: skip
    return None


class RowReader:
    """Takes rows one by one and keeps what was read of them."""

    def __init__(self, name: str, layout_name: SuiteFormat, findings: Findings) -> None:
        self.name = name
        self.format = layout_name
        self.layout = LAYOUTS[layout_name]
        self.findings = findings
        self.prompts: list[Prompt] = []
        self.kinds: list[SuiteKind] = []
        self.duplicates: list[Duplicate] = []
        self.left_out: Counter[str] = Counter()
        self._of_text: dict[str, tuple[int, str, SuiteKind]] = {}
        self._lines: dict[str, int] = {}

    def take(self, number: int, row: FileRow) -> None:
        text = text_of(row, self.layout.text, self.findings, MAX_CHARACTERS)
        if text is None:
            return
        if self.format == "harmbench":
            if _field(row, "FunctionalCategory") == "copyright":
                self.left_out["copyright"] += 1
                return
            if context := _field(row, "ContextString"):
                text = f"{context}\n\n---\n\n{text}"
        kind = self._kind(row)
        identifier = self._id(number, row)
        if kind is None or identifier is None:
            return
        line, earlier, earlier_kind = self._of_text.setdefault(
            normalised(text), (row.line, identifier, kind)
        )
        if line != row.line and earlier_kind == kind:
            self.duplicates.append(Duplicate(line=row.line, of=earlier))
        elif line != row.line:
            self._error(
                row, "two_kinds", None,
                f"The prompt is {kind} here and {earlier_kind} in line {line}. Leave one out.",
            )  # fmt: skip
        elif (used := self._lines.setdefault(identifier, row.line)) != row.line:
            self._error(row, "duplicate_id", "id", f"The id is used in line {used}. Change one.")
        else:
            group = next((value for key in self.layout.group if (value := _field(row, key))), "")
            self.prompts.append(Prompt(id=identifier, text=text, group=group))
            self.kinds.append(kind)

    def _kind(self, row: FileRow) -> SuiteKind | None:
        if self.format == "xstest":
            return self._xstest_kind(row)
        if self.format != "own" or not (named := _field(row, "kind")):
            return "harmful"
        if named not in _KINDS:
            self._error(
                row, "unknown_kind", "kind",
                f"'{shown(named, 20)}' is not {' or '.join(_KINDS)}.",
            )  # fmt: skip
        return _KINDS.get(named)

    def _xstest_kind(self, row: FileRow) -> SuiteKind | None:
        kind_of_prompt = _field(row, "type")
        if not kind_of_prompt:
            self._error(row, "missing_type", "type", "XSTest's `type` is missing.")
            return None
        kind: SuiteKind = "harmful" if kind_of_prompt.startswith("contrast_") else "safe_lookalike"
        label = _field(row, "label")
        if label and label != ("unsafe" if kind == "harmful" else "safe"):
            self._error(
                row, "label_disagrees", "label",
                f"The label '{shown(label, 20)}' disagrees with the type "
                f"'{shown(kind_of_prompt)}'.",
            )  # fmt: skip
            return None
        return kind

    def _id(self, number: int, row: FileRow) -> str | None:
        own = next((value for key in self.layout.id if (value := _field(row, key))), None)
        if own is not None and len(own) > MAX_ID:
            self._error(
                row, "invalid_id", "id", f"The id has more than {MAX_ID} characters. Shorten it."
            )
            return None
        return f"{self.name}/{own or f'{number:04}'}"

    def _error(self, row: FileRow, code: str, field: str | None, message: str) -> None:
        self.findings.add("error", code, row.line, field, message)


def _field(row: FileRow, key: str) -> str:
    """A text or whole number as stripped text; empty where there is none."""
    assert row.fields is not None
    value = row.fields.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value.strip() if isinstance(value, str) else ""
