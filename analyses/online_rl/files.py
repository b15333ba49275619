"""Files of a recorded round: columns of the buffer, tensors of the policy. No pickle is read."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyses.context import AnalysisError

Columns = dict[str, NDArray[Any]]


def read_columns(path: Path, param: str) -> Columns:
    """The columns of an npz, Parquet or JSON lines file, told apart by content.

    Raises AnalysisError naming the file's field, and the line of JSON lines.
    """
    head = path.open("rb").read(4)
    try:
        if head[:2] == b"PK":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        if head == b"PAR1":
            import pyarrow.parquet as pq

            table = pq.read_table(path)
            return {name: np.array(table[name].to_pylist()) for name in table.column_names}
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise AnalysisError(f"the file of {param} cannot be read: {error}", param) from error
    rows = read_lines(path, param)
    if not rows:
        return {}
    names = list(rows[0])
    for number, row in enumerate(rows, start=1):
        if set(row) != set(names):
            raise AnalysisError(
                f"{param}, line {number}: the fields differ from those of line 1", param
            )
    try:
        return {name: np.array([row[name] for row in rows]) for name in names}
    except ValueError as error:
        raise AnalysisError(f"{param}: values of unequal length: {error}", param) from error


def read_lines(path: Path, param: str) -> list[dict[str, Any]]:
    """The objects of a JSON lines file. Raises AnalysisError with the line."""
    rows = []
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise AnalysisError(
            f"the file of {param} is no npz, Parquet or JSON lines", param
        ) from error
    for number, line in enumerate(io.StringIO(text), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise AnalysisError(f"{param}, line {number}: no JSON: {error}", param) from error
        if not isinstance(row, dict):
            raise AnalysisError(f"{param}, line {number}: a JSON object is needed", param)
        rows.append(row)
    return rows


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors or npz file. Raises AnalysisError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.open("rb").read(2) == b"PK":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.as_tensor(arrays[name]) for name in arrays.files}
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (TypeError, ValueError, OSError, zipfile.BadZipFile, SafetensorError) as error:
        raise AnalysisError(
            f"the policy file is no safetensors or npz: {error}", "policy"
        ) from error
