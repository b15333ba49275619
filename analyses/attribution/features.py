"""A store of all rows' gradients, whole or projected: new targets then need no pass over rows.

Files of a store: features.npy [N, K] (float32 whole, float16 projected and divided by the row's
norm), statistics.safetensors (what PassResult holds beside the inner products).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from analyses.attribution.gradients import Blocks, BlockVectors, PassResult
from analyses.attribution.projection import factored, factored_shape, rademacher
from analyses.attribution.rows import EncodedRow
from analyses.attribution.spec import Projection
from analyses.context import AnalysisError

VERSION = "1"
FEATURES, STATISTICS = "features.npy", "statistics.safetensors"
MOST_BYTES = 2 * 1024**3
MOST_GRAM_ROWS = 20_000


def store_key(
    adapter_sha256: str,
    base: str,
    rows: Sequence[EncodedRow],
    projection: Projection | None,
    seed: int,
) -> str:
    """Name of the folder: all that the features depend on. base: the base model and tokenizer."""
    described = None if projection is None else projection.model_dump(mode="json")
    digest = hashlib.sha256(
        json.dumps([VERSION, adapter_sha256, base, described, seed if projection else 0]).encode()
    )
    for row in rows:
        digest.update(row.row_id.encode())
    return digest.hexdigest()[:32]


class Projector:
    """Maps a block's vectors to their place among a row's K features."""

    def __init__(self, blocks: Blocks, projection: Projection | None, seed: int) -> None:
        self._blocks, self._projection, self._seed = blocks, projection, seed
        widths = []
        for block in blocks:
            if projection is not None and projection.kind == "factored":
                out, into = block.weight.shape
                one, other = factored_shape(out, into, projection.dimension)
                widths.append(one * other)
            else:
                widths.append(block.size)
        if projection is not None and projection.kind == "rademacher":
            widths = [projection.dimension]
        edges = np.concatenate([[0], np.cumsum(widths)])
        self.slices = [slice(int(a), int(b)) for a, b in pairwise(edges)]
        self.width = int(edges[-1])

    def place(self, block: int) -> slice:
        return self.slices[0] if self._whole_vector else self.slices[block]

    @property
    def _whole_vector(self) -> bool:
        return self._projection is not None and self._projection.kind == "rademacher"

    def __call__(self, values_BP: Tensor, block: int) -> Tensor:
        """[B, size] to [B, width of the place]; shares of one place are to be added."""
        chosen = self._projection
        if chosen is None:
            return values_BP
        if chosen.kind == "rademacher":
            return rademacher(values_BP, chosen.dimension, self._seed, block)
        out, into = self._blocks[block].weight.shape
        return factored(values_BP, out, into, chosen.dimension, self._seed, block)

    def features(self, vectors: BlockVectors) -> NDArray[np.float32]:
        """All blocks of D vectors as [D, K]."""
        found = torch.zeros((vectors[0].shape[0], self.width))
        for block, part in enumerate(vectors):
            found[:, self.place(block)] += self(part.float().cpu(), block)
        return found.numpy()


class FeatureStore:
    """Reads a finished store."""

    def __init__(self, folder: Path, projector: Projector, blocks: Blocks) -> None:
        self._features = np.load(folder / FEATURES, mmap_mode="r")
        self._statistics = load_file(folder / STATISTICS)
        self._projector, self._blocks = projector, blocks
        norms = self._statistics["norms_N"].numpy()
        whole = self._features.dtype == np.float32
        self._scale_N = np.ones_like(norms) if whole else norms

    def _block(self, place: slice) -> NDArray[np.float64]:
        values = np.asarray(self._features[:, place], dtype=np.float64)
        return np.asarray(values * self._scale_N[:, None])

    def dots(self, directions: BlockVectors, detail: int = 0) -> PassResult:
        """The same as a pass over the rows, from the features."""
        features_DK = self._projector.features(directions)
        count, rows = len(features_DK), len(self._features)
        dots_DN = np.zeros((count, rows))
        block_dots = torch.zeros((rows, len(self._blocks)))
        for number, place in enumerate(self._projector.slices):
            part_DN = features_DK[:, place].astype(np.float64) @ self._block(place).T
            dots_DN += part_DN
            if count and len(self._projector.slices) == len(self._blocks):
                block_dots[:, number] = torch.from_numpy(part_DN[detail]).float()
        found = self._statistics
        return PassResult(
            torch.from_numpy(dots_DN),
            block_dots,
            found["norms_N"],
            found["losses_N"],
            [found[f"mean.{number}"] for number in range(len(self._blocks))],
            found["mean_square_M"],
        )

    def grams(self, directions: BlockVectors) -> "list[tuple[NDArray[np.float64], Tensor]]":
        """(K [N, N], k [N, D]) of each block; raises AnalysisError for too many rows."""
        if len(self._features) > MOST_GRAM_ROWS:
            raise AnalysisError(
                f"datainf, fisher_if and trak hold an N x N matrix and stop at {MOST_GRAM_ROWS} "
                "rows; use grad_dot",
                "methods",
            )
        features_DK = self._projector.features(directions)
        found = []
        for place in self._projector.slices:
            part = self._block(place)
            dots_ND = part @ features_DK[:, place].astype(np.float64).T
            found.append((part @ part.T, torch.from_numpy(dots_ND)))
        return found


class FeatureWriter:
    """Takes gradients as a pass makes them; `finish` makes the store appear whole."""

    def __init__(self, folder: Path, projector: Projector, count: int, *, projected: bool) -> None:
        size = count * projector.width * (2 if projected else 4)
        if size > MOST_BYTES:
            raise AnalysisError(
                f"the gradients of {count} rows take {size / 1024**3:.1f} GiB, the store holds "
                f"{MOST_BYTES // 1024**3}; give `projection`, with a smaller dimension if it is "
                "given already",
                "projection",
            )
        self._folder, self._projector, self._projected = folder, projector, projected
        self._aside = folder.with_name(f".{folder.name}-{os.getpid()}")
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        self._features = np.lib.format.open_memmap(
            self._aside / FEATURES,
            mode="w+",
            dtype=np.float16 if projected else np.float32,
            shape=(count, projector.width),
        )
        self._open: tuple[list[int], Tensor, Tensor] | None = None

    def take(self, rows: Sequence[int], block: int, gradient_BP: Tensor) -> None:
        if self._open is None or self._open[0] != list(rows):
            self._flush()
            shape = (len(rows), self._projector.width)
            self._open = (list(rows), torch.zeros(shape), torch.zeros(len(rows)))
        _, values, squares = self._open
        values[:, self._projector.place(block)] += self._projector(gradient_BP, block).float().cpu()
        squares += gradient_BP.pow(2).sum(1).float().cpu()

    def _flush(self) -> None:
        if self._open is None:
            return
        rows, values, squares = self._open
        if self._projected:
            values = values / squares.sqrt().clamp(min=1e-30)[:, None]
        self._features[rows] = values.numpy()
        self._open = None

    def finish(self, found: PassResult) -> None:
        self._flush()
        self._features.flush()
        tensors = {
            "norms_N": found.norms_N,
            "losses_N": found.losses_N,
            "mean_square_M": found.mean_square_M,
            **{f"mean.{i}": part.cpu() for i, part in enumerate(found.mean_gradient)},
        }
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            self._aside / STATISTICS,
        )
        try:
            self._aside.rename(self._folder)
        except OSError:
            # Another run of the same request was faster; its store is the same.
            if not self._folder.is_dir():
                raise
        self.discard()

    def discard(self) -> None:
        """Remove what is not finished."""
        shutil.rmtree(self._aside, ignore_errors=True)
