"""What a check of a file finds: every fault with line and field, and what to do about it."""

from typing import Literal, NamedTuple

MIN_ROWS = 10
MAX_FINDINGS = 100

Severity = Literal["error", "warning"]


class Finding(NamedTuple):
    """One fault of a file: what, where (1-based line, JSON path) and what to do about it."""

    severity: Severity
    code: str
    line: int | None
    path: str | None
    message: str

    def sentence(self) -> str:
        where = "" if self.line is None else f"Line {self.line}: "
        field = "" if self.path is None else f" (field {self.path})"
        return f"{where}{self.message}{field}"


class FileReport(NamedTuple):
    """What is wrong with a file. `fatal`: it is not a JSON Lines text file at all."""

    rows: int
    findings: tuple[Finding, ...]
    error_count: int
    warning_count: int
    fatal: bool

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "warning")

    def summary(self, limit: int = 3) -> str:
        """The first errors in words, and how many more there are."""
        shown = [finding.sentence() for finding in self.errors[:limit]]
        more = self.error_count - len(shown)
        return " ".join([*shown, *([f"And {more} more errors."] if more > 0 else [])])


class Findings:
    """Collects findings, keeping the first 100 of each severity and counting all."""

    def __init__(self) -> None:
        self.kept: list[Finding] = []
        self.counts: dict[Severity, int] = {"error": 0, "warning": 0}
        self.fatal = False

    @property
    def errors(self) -> int:
        return self.counts["error"]

    def add(
        self,
        severity: Severity,
        code: str,
        line: int | None,
        path: str | None,
        message: str,
        *,
        fatal: bool = False,
    ) -> None:
        self.counts[severity] += 1
        self.fatal = self.fatal or fatal
        if self.counts[severity] <= MAX_FINDINGS:
            self.kept.append(Finding(severity, code, line, path, message))

    def check_count(self, rows: int, min_rows: int, what_a_line_is: str) -> None:
        """Add the fault of a file with no rows or too few."""
        if rows == 0 and self.errors == 0:
            self.add(
                "error", "empty_file", None, None,
                f"The file is empty. Put one JSON object with {what_a_line_is} on each line.",
                fatal=True,
            )  # fmt: skip
        elif rows < min_rows and not self.fatal:
            self.add(
                "error", "invalid_n_examples", None, None,
                f"The file has {rows} {'example' if rows == 1 else 'examples'}; at least "
                f"{min_rows} are needed. Add more lines.",
            )  # fmt: skip

    def report(self, rows: int) -> FileReport:
        return FileReport(
            rows=rows,
            findings=tuple(self.kept),
            error_count=self.counts["error"],
            warning_count=self.counts["warning"],
            fatal=self.fatal,
        )


def shown(text: str, limit: int = 40) -> str:
    """A key or role as a message may quote it: printable ASCII and short, never a tenant's text at
    length."""
    clean = "".join(char if char.isascii() and char.isprintable() else "?" for char in text[:limit])
    return clean + ("..." if len(text) > limit else "")
