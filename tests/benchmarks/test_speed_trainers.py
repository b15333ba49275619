from pathlib import Path

import pytest
import torch

from benchmarks.trainers import TRAINERS, train_here, train_there
from benchmarks.workload import adapted_model, mixed_rows


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_changes_the_adapter(name: str, tiny_model_folder: Path, tmp_path: Path):
    if name == "trl":
        pytest.importorskip("trl", reason="trl is not installed; its trainer cannot be compared")
    model = adapted_model(str(tiny_model_folder))
    rows = mixed_rows(9, 0, shortest=8, longest=40, median=16.0, vocabulary=258)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    if name == "tunegate":
        train_here(model, rows, tmp_path)
    else:
        train_there(name, model, rows, tmp_path)
    after = dict(model.named_parameters())
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
