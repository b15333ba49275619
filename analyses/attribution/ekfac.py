"""EK-FAC influence through dattri-llm, an optional package."""

import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from analyses.attribution.gradients import Blocks, completion_losses
from analyses.attribution.rows import EncodedRow, TokenBatch, collate
from analyses.context import AnalysisError

PACKAGE = "dattri_llm"


class RowDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows as dattri-llm streams them."""

    def __init__(self, rows: Sequence[EncodedRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": self._rows[index]}


def require_dattri() -> Any:
    """The package. Raises AnalysisError, which says how to install it."""
    if find_spec(PACKAGE) is None:
        raise AnalysisError(
            "ekfac needs the package dattri-llm, which is not installed; run "
            '`pip install "tunegate[attribution]"`',
            "methods",
        )
    return import_module(PACKAGE)


def attributor(name: str, model: Any, batch_size: int, device: torch.device, folder: str) -> Any:
    """dattri-llm's attributor of this class name, on rows of unequal length, with the sum of the
    rows' own mean losses as its loss."""
    package = require_dattri()
    streaming = import_module(f"{PACKAGE}.gradient.streaming")
    base: Any = getattr(package, name)

    def collated(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collate([item["row"] for item in items], device)
        return {
            "input_ids": batch.ids_BT,
            "attention_mask": batch.mask_BT,
            "labels": batch.labels_BT,
        }

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        rows = TokenBatch(batch["input_ids"], batch["attention_mask"], batch["labels"])
        return completion_losses(model, rows).sum()

    class Streamed(base):  # type: ignore[misc]
        # The library's own streamers cannot be told how to pad.
        def _streamer(self, dataset: Any, chosen: dict[str, Any]) -> Any:
            return streaming.GradientStreamer(
                self.task.model,
                dataset,
                self.args,
                batch_size=batch_size,
                enable_update=False,
                loss_fn=loss,
                collate_fn=collated,
                **chosen,
            )

        def generate_train_rep(
            self,
            train_dataset: Any,
            *,
            checkpoint_step: int = 0,
            hook_config: Any = None,
            **_: Any,
        ) -> Any:
            return self._streamer(
                train_dataset, {"checkpoint_step": checkpoint_step, "config": hook_config}
            )

        def generate_test_rep(
            self,
            test_dataset: Any,
            *,
            checkpoint_step: int = 0,
            hook_manager: Any = None,
            **_: Any,
        ) -> Any:
            return self._streamer(
                test_dataset,
                {"checkpoint_step": checkpoint_step, "hook_manager": hook_manager, "shard": False},
            )

    arguments = package.AttributionArguments(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        max_grad_norm=None,
        use_cpu=device.type == "cpu",
    )
    return Streamed(arguments, task=package.AttributionTask(loss, model))


def ekfac(
    model: Any,
    blocks: Blocks,
    rows: Sequence[EncodedRow],
    targets: Sequence[EncodedRow],
    *,
    damping: float,
    batch_size: int,
) -> Tensor:
    """g_r' (EK-FAC + lambda)^-1 g_i, [targets, rows]; every A and B is a layer of its own.

    The covariances are those of the rows' own labels (the empirical Fisher), not of labels drawn
    from the model. Raises AnalysisError where dattri-llm is missing.
    """
    # Rows of like length share a batch; the answer comes in the order of the stream.
    order = sorted(range(len(rows)), key=lambda index: len(rows[index].ids))
    asked = [block.weight.requires_grad for block in blocks]
    for block in blocks:
        block.weight.requires_grad_(True)
    try:
        with tempfile.TemporaryDirectory(prefix="tunegate-ekfac-") as folder:
            found = attributor(
                "EKFACAttributor", model, batch_size, blocks[0].weight.device, folder
            ).attribute(
                RowDataset([rows[index] for index in order]), RowDataset(targets), damping=damping
            )
    finally:
        for block, before in zip(blocks, asked, strict=True):
            block.weight.requires_grad_(before)
            block.weight.grad = None
    if found.scores.shape != (len(rows), len(targets)):
        raise AnalysisError("ekfac: dattri-llm left out rows; use another method", "methods")
    scores = torch.zeros((len(targets), len(rows)), dtype=torch.float64)
    scores[:, order] = found.scores.double().cpu().T
    return scores
