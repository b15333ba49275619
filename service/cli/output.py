"""What every command shares: JSON on request, progress on stderr, errors in one line."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

OK = 0
FAILED = 1
UNAVAILABLE = 2
USAGE = 3

EXIT_CODES = (
    "Exit codes: 0 success or passed; 1 failed (the job, or the gate); 2 inconclusive, or "
    "something the command needs is not available; 3 usage or bad input."
)

JSON_HELP = "print the result as JSON on stdout"


class CommandError(Exception):
    """A command's end with a reason for the person who typed it."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Ended(Exception):
    """A command's end with another exit code than 0, after its answer was printed."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def note(message: str) -> None:
    """A line of progress. stdout is kept for the result."""
    print(message, file=sys.stderr, flush=True)


def answer(as_json: bool, data: Any, text: str) -> None:
    """The command's result: one JSON document, or words."""
    print(json.dumps(data, ensure_ascii=False) if as_json else text, flush=True)


def table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as a table on stdout; without a terminal nothing is cut or coloured."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        cells = [row.get(column) for column in columns]
        grid.add_row(*("" if cell is None else str(cell) for cell in cells))
    console = Console()
    Console(width=None if console.is_terminal else 1000).print(grid)
