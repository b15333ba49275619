"""Our DPO loss and tokens against TRL's trainer, on TRL's own batch of the same pairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from defenses.dpo import pair_losses
from defenses.losses import response_nll_and_accuracy_B
from jobspec.chat import ChatMessage
from jobspec.preference import PreferenceRow
from workers.pipeline.rows import encode_pair

ANSWERS = [("yes", "no, never"), ("It is blue.", "Red"), ("four", "five"), ("a longer answer", "b")]


@pytest.fixture
def make_trainer(tiny_model_folder: Path, tmp_path: Path) -> Callable[[float], Any]:
    """TRL's trainer, whose policy has moved away from its reference."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
    datasets = pytest.importorskip("datasets", reason="TRL needs datasets: pip install datasets")
    policy = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"question {index}"}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
        for index, (chosen, rejected) in enumerate(ANSWERS)
    ]

    def make(beta: float) -> Any:
        return trl.DPOTrainer(
            model=policy,
            ref_model=AutoModelForCausalLM.from_pretrained(tiny_model_folder),
            args=trl.DPOConfig(
                output_dir=str(tmp_path),
                beta=beta,
                per_device_train_batch_size=len(ANSWERS),
                use_cpu=True,
                bf16=False,
                report_to=[],
                gradient_checkpointing=False,
                seed=0,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
        )

    return make


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_the_loss_is_trls_on_the_same_tokens(make_trainer: Callable[[float], Any], beta: float):
    trainer = make_trainer(beta)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        expected = trainer.compute_loss(trainer.model, dict(batch))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.masked_fill(batch["completion_mask"] == 0, -100)
    with torch.no_grad():
        scores = response_nll_and_accuracy_B(trainer.ref_model, ids, mask, labels)
        reference = -(scores.nll * scores.token_count).reshape(2, -1).T
        found = pair_losses(trainer.model, ids, mask, labels, reference, beta)
    assert float(found.loss_B.mean()) == pytest.approx(float(expected), rel=1e-5)


def test_the_rows_are_trls_rows(make_trainer: Callable[[float], Any]):
    trainer = make_trainer(0.1)
    batch = next(iter(trainer.get_train_dataloader()))
    pairs = [
        encode_pair(
            trainer.processing_class,
            PreferenceRow(
                index + 1,
                (ChatMessage("user", f"question {index}", False),),
                ChatMessage("assistant", chosen, True),
                ChatMessage("assistant", rejected, True),
            ),
            512,
        )
        for index, (chosen, rejected) in enumerate(ANSWERS)
    ]
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    theirs = [
        tuple(ids[:length])
        for ids, length in zip(batch["input_ids"].tolist(), lengths, strict=True)
    ]
    assert set(theirs) == {side.ids for pair in pairs for side in (pair.chosen, pair.rejected)}
