"""Results that survive the process: each section of a measurement is computed once and kept."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

Value = TypeVar("Value")


class Sections:
    """JSON files in a folder, one a section, each either whole or absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str, shape: TypeAdapter[Value], compute: Callable[[], Value]) -> Value:
        """The kept value of a section, else what `compute` returns (and keep it).

        A file that does not hold a value of this shape is as good as none.
        """
        path = self.folder / f"{name}.json"
        try:
            return shape.validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            value = compute()
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix=f".{name}-", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(shape.dump_json(value))
                stream.flush()
                os.fsync(stream.fileno())
            Path(aside).replace(path)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
        return value
