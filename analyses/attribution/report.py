"""From scores to what a reader needs: ranks, z-scores, duplicates, controls, modules."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SPECIFIC_Z = 1.0
TOP_MODULES = 3
UNCONVERGED = 0.1
_FACTOR = re.compile(r"\.lora_[AB]\..*$")


def z_scores(score_N: Array) -> Array:
    """(score - mean) / standard deviation over rows; 0 where all are equal."""
    spread = float(score_N.std())
    return np.zeros_like(score_N) if spread == 0 else (score_N - score_N.mean()) / spread


def ranks(score_N: Array) -> NDArray[np.int64]:
    """1 for the largest; the earlier row first among equal ones."""
    found = np.empty(len(score_N), dtype=np.int64)
    found[np.argsort(-score_N, kind="stable")] = np.arange(1, len(score_N) + 1)
    return found


def specific(z_N: Array, control_z_N: Array) -> NDArray[np.bool_]:
    """A standard deviation above the mean row for the targets, and not for the benign controls."""
    return np.asarray((z_N > SPECIFIC_Z) & (control_z_N <= SPECIFIC_Z))


def copies(row_ids: Sequence[str]) -> NDArray[np.int64]:
    """How many rows have the same tokens, for each row."""
    counts = Counter(row_ids)
    return np.array([counts[row_id] for row_id in row_ids])


def module_names(block_names: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Names of the adapted layers, and each block's place among them."""
    layers = [_FACTOR.sub("", name).removeprefix("base_model.model.") for name in block_names]
    names = list(dict.fromkeys(layers))
    return names, np.array([names.index(layer) for layer in layers])


def top_modules(
    names: Sequence[str], block_dots_M: Array, place_M: NDArray[np.int64]
) -> tuple[str, ...]:
    """The layers whose share of one row's inner product is largest, in the sign of the sum."""
    shares = np.bincount(place_M, weights=block_dots_M, minlength=len(names))
    total = float(shares.sum())
    if total == 0:
        return ()
    order = np.argsort(-shares * np.sign(total), kind="stable")[:TOP_MODULES]
    return tuple(names[index] for index in order if shares[index] * total > 0)


def checked_rows(score_N: Array, count: int, seed: int) -> list[int]:
    """A third each of the top, the bottom and the rest at random; all rows where they are few."""
    order = np.argsort(-score_N, kind="stable")
    if len(order) <= count:
        return sorted(order.tolist())
    third = count // 3
    top, bottom = order[:third], order[len(order) - third :]
    between = order[third : len(order) - third]
    chosen = np.random.default_rng(seed).choice(between, count - 2 * third, replace=False)
    return sorted([*top.tolist(), *bottom.tolist(), *chosen.tolist()])
