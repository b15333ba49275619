"""Where the randomness of a private step comes from.

The guarantee rests on the attacker not knowing it: neither the noise, nor which rows were drawn. A
job's seed is public, so nothing of a private job follows from it.
"""

import hashlib
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor


class StepRandomness(Protocol):
    """All that one step draws."""

    def included(self, rows: int, rate: float) -> list[int]:
        """A Poisson sample: each of `rows` ids with probability `rate`, independently."""
        ...

    def normal(self, like: Tensor) -> Tensor:
        """Independent standard normal numbers of the shape, type and device of `like`."""
        ...

    def seed(self) -> int:
        """For what else draws in a step, such as dropout of the base."""
        ...


# Of a step (from 0). A run that goes on from a checkpoint asks with the number of its next step.
Randomness = Callable[[int], StepRandomness]


class SecretStep:
    """From the operating system's generator for keys. Kept nowhere, so no run can be repeated.

    Normal numbers are Phi^-1(u) of 53-bit u in float64. torch's own generator on a CPU starts from
    32 bits, few enough to be tried out.
    """

    def included(self, rows: int, rate: float) -> list[int]:
        return [int(row) for row in np.flatnonzero(_uniform(rows) < rate)]

    def normal(self, like: Tensor) -> Tensor:
        z = torch.from_numpy(ndtri(_uniform(like.numel()))).reshape(like.shape)
        return z.to(device=like.device, dtype=like.dtype)

    def seed(self) -> int:
        return int.from_bytes(os.urandom(7), "big")


def secret(step: int) -> StepRandomness:
    """Fresh randomness for any step, also for one that is taken again after a crash."""
    return SecretStep()


class SeededStep:
    """A function of seed and step, for tests: whoever knows the seed can take the noise off."""

    def __init__(self, seed: int, step: int) -> None:
        self._generator = torch.Generator().manual_seed(_number(f"{seed}/private/{step}"))

    def included(self, rows: int, rate: float) -> list[int]:
        u = torch.rand(rows, generator=self._generator, dtype=torch.float64)
        found: list[int] = (u < rate).nonzero().flatten().tolist()
        return found

    def normal(self, like: Tensor) -> Tensor:
        z = torch.randn(like.shape, generator=self._generator, dtype=torch.float64)
        return z.to(device=like.device, dtype=like.dtype)

    def seed(self) -> int:
        return int(torch.randint(2**53, (), generator=self._generator))


def seeded(seed: int) -> Randomness:
    """Reproducible randomness. No two steps share numbers, whatever a run was resumed from."""
    return lambda step: SeededStep(seed, step)


def _uniform(count: int) -> NDArray[np.float64]:
    """Numbers within (0, 1), 53 bits each."""
    bits: NDArray[Any] = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
