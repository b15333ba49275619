from pathlib import Path

import torch

from benchmarks.dp_step import plain_ways, private_ways
from benchmarks.steps import Steps


def test_every_way_moves_the_adapter_and_leaves_no_hook(tiny_model_folder: Path):
    steps = Steps(str(tiny_model_folder))
    for take in {**plain_ways(steps), **private_ways(steps)}.values():
        before = {name: p.detach().clone() for name, p in steps.parameters.items()}
        take()
        assert any(not torch.equal(before[name], p) for name, p in steps.parameters.items())
        assert not hasattr(steps.model, "autograd_grad_sample_hooks")
