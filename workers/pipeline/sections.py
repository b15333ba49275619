"""Results that survive the process: each section of a measurement is computed once and kept."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

Value = TypeVar("Value")


class Sections:
    """JSON files in a folder, one a section, each either whole or absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str, shape: TypeAdapter[Value], compute: Callable[[], Value]) -> Value:
        """The kept value of a section, else what `compute` returns (and keep it)."""
        path = self.folder / f"{name}.json"
        if path.is_file():
            return shape.validate_json(path.read_bytes())
        value = compute()
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_bytes(shape.dump_json(value))
        aside.replace(path)
        return value
