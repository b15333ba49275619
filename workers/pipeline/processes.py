"""The processes that share one tuning run, as torchrun starts them: same rows, same seed.

Every process holds the whole model and its own copy of the method. A step's rows are dealt out;
gradients are summed before anything is computed from them, and the per-row losses are put
together again, so that every process takes the same step and the scheduler's logits stay equal
everywhere without being sent.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from workers.pipeline.ranks import RENDEZVOUS_VARIABLE

Row = TypeVar("Row")

# One process may score or evaluate for a long time while the others wait.
TIMEOUT = timedelta(hours=12)


class Processes:
    """One of `count` equal processes. With count 1 every exchange does nothing."""

    def __init__(self, rank: int = 0, count: int = 1, group: dist.ProcessGroup | None = None):
        self.rank, self.count = rank, count
        # Numbers travel on the CPU; gradients where they are.
        self._numbers = group

    @property
    def leads(self) -> bool:
        """Whether this process speaks, writes checkpoints, evaluates and publishes."""
        return self.rank == 0

    def share(self, rows: Sequence[Row]) -> list[Row]:
        """This process's rows: every count-th, so that all get as many, give or take one."""
        return list(rows[self.rank :: self.count])

    def sum_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the processes, in one exchange."""
        if self.count == 1:
            return
        tensors = list(tensors)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        start = 0
        for tensor in tensors:
            part = flat[start : start + tensor.numel()]
            tensor.detach().copy_(part.view_as(tensor))
            start += tensor.numel()

    def sum_numbers(self, *values: float) -> list[float]:
        """The sum of each value over the processes."""
        if self.count == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, group=self._numbers)
        return [float(number) for number in numbers]

    def gather_shares(self, values: Tensor, total: int) -> Tensor:
        """Put shares together again: float64 [total] on the CPU, in the order before sharing."""
        whole = torch.zeros(total, dtype=torch.float64)
        whole[self.rank :: self.count] = values.detach().double().cpu()
        if self.count > 1:
            dist.all_reduce(whole, group=self._numbers)
        return whole

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in at least one process."""
        return self.sum_numbers(float(flag))[0] > 0

    def wait(self) -> None:
        """Until every process has come here."""
        if self.count > 1:
            dist.barrier(group=self._numbers)

    def close(self) -> None:
        """Leave the group, if this process is still in it."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


ALONE = Processes()


def connect() -> Processes:
    """Join the group that the environment describes, as torchrun or ranks.other_ranks set it;
    alone without it."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return ALONE
    rank = int(os.environ["RANK"])
    where = os.environ.get(RENDEZVOUS_VARIABLE, "env://")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=where,
        rank=rank,
        world_size=count,
        timeout=TIMEOUT,
    )
    numbers = dist.new_group(backend="gloo", timeout=TIMEOUT) if cuda else None
    return Processes(rank, count, numbers)


@contextmanager
def joined() -> Iterator[Processes]:
    """connect(), and leave the group at the end."""
    processes = connect()
    try:
        yield processes
    finally:
        processes.close()
