"""A table that grows in a folder: each addition is a Parquet file that is whole or absent."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


class PartFiles:
    """Rows of one schema in numbered files. Several processes may add to the same folder."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.folder = folder
        self._schema = schema

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows: written aside, flushed to the disk, then renamed."""
        if not rows:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(list(rows), self._schema)
        handle, aside = tempfile.mkstemp(prefix=".part-", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                pq.write_table(table, stream)
                stream.flush()
                os.fsync(stream.fileno())
            # The random end keeps apart what two processes add at once.
            end = Path(aside).name.removeprefix(".part-")
            number = len(self._paths())
            Path(aside).rename(self.folder / f"part-{number:06d}-{end}.parquet")
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
        _flush_folder(self.folder)

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows, in the order in which they were added; a damaged file is as good as none."""
        for path in self._paths():
            try:
                table = pq.read_table(path, schema=self._schema)
            except (pa.ArrowInvalid, pa.ArrowTypeError, FileNotFoundError):
                continue
            yield from table.to_pylist()

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.parquet"))


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
