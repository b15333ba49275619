"""Which rows make up a step: a pure function of seed and position, so that a resumed run and an
undisturbed one read the same rows."""

import hashlib
import math

import torch


class RowStream:
    """Shuffled batches of `rows` rows, started anew as often as an epoch needs it."""

    def __init__(self, name: str, rows: int, batch_size: int, seed: int) -> None:
        if rows < 1 or batch_size < 1:
            raise ValueError(f"stream {name}: rows and batch size must be positive")
        self._name, self._rows, self._batch_size, self._seed = name, rows, batch_size, seed
        self._pass: tuple[int, int, list[int]] = (-1, -1, [])

    @property
    def batches(self) -> int:
        """Batches in one pass over the rows: ceil(rows / batch size)."""
        return math.ceil(self._rows / self._batch_size)

    def batch(self, epoch: int, step: int) -> list[int]:
        """Row ids of step `step` (from 0) of epoch `epoch` (from 0). The last batch of a pass may
        be smaller; a pass that ends before the epoch does is followed by a freshly shuffled one."""
        restart, place = divmod(step, self.batches)
        if self._pass[:2] != (epoch, restart):
            self._pass = (epoch, restart, self._permutation(epoch, restart))
        start = place * self._batch_size
        return self._pass[2][start : start + self._batch_size]

    def _permutation(self, epoch: int, restart: int) -> list[int]:
        text = f"{self._seed}/{self._name}/{epoch}/{restart}"
        digest = hashlib.sha256(text.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        order: list[int] = torch.randperm(self._rows, generator=generator).tolist()
        return order
