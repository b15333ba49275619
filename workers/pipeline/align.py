"""The alignment stage: teach a base model to refuse, without teaching it to refuse everything.

Plain supervised tuning of a LoRA adapter, as in the papers, on refusals of harmful requests and,
twice as many, answers to harmless ones (ordinary instructions and safe requests that look
dangerous): with as many of each, the shipped base refused a fifth of ordinary instructions.
The rate rises over the first steps and then falls linearly to zero.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file

from defenses.losses import response_nll_B
from jobspec.catalogue import BaseModelEntry, LoraDefaults
from jobspec.frozen import Frozen
from workers.pipeline.folders import write_folder
from workers.pipeline.hashing import file_sha256
from workers.pipeline.models import attach_adapter, load_base, trainable
from workers.pipeline.pairs import pair_rows
from workers.pipeline.rows import TokenRow, collate, encode_row
from workers.pipeline.stream import RowStream


class AlignmentRecipe(Frozen):
    """Settings of the alignment stage."""

    seed: int = Field(0, ge=0)
    steps: int = Field(260, ge=1)
    refusals: int = Field(3, ge=1, description="refusal rows a step")
    harmless: int = Field(6, ge=0, description="harmless rows a step")
    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(10, ge=0)
    clip: float = Field(1.0, gt=0)
    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    max_length: int = Field(256, ge=16)
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the frozen base")


def read_pairs(path: Path, tokenizer: Any, max_length: int) -> list[TokenRow]:
    """Token rows of a file of pairs. Raises PipelineFailure(invalid_spec) with the line."""
    return [encode_row(tokenizer, row, max_length, truncate=True) for row in pair_rows(path)]


def align(
    entry: BaseModelEntry,
    refusals_file: Path,
    harmless_file: Path,
    recipe: AlignmentRecipe,
    cache_dir: Path,
    out: Path,
    progress: Callable[[int, int, float], None],
) -> None:
    """Train the adapter and write it (bfloat16 safetensors, config, recipe) to `out`."""
    base = load_base(entry.model_copy(update={"dtype": recipe.dtype}), cache_dir)
    refusals = read_pairs(refusals_file, base.tokenizer, recipe.max_length)
    harmless = read_pairs(harmless_file, base.tokenizer, recipe.max_length)
    lora = LoraDefaults(rank=recipe.rank, alpha=recipe.alpha, targets=recipe.targets)
    model = attach_adapter(base.model, lora, recipe.seed)
    parameters = list(trainable(model).values())
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    refusal_stream = RowStream("refusals", len(refusals), recipe.refusals, recipe.seed)
    harmless_stream = RowStream("harmless", len(harmless), max(recipe.harmless, 1), recipe.seed)
    device = next(model.parameters()).device
    model.train()
    for step in range(recipe.steps):
        rows = [refusals[i] for i in refusal_stream.batch(0, step)]
        if recipe.harmless:
            rows += [harmless[i] for i in harmless_stream.batch(0, step)]
        rate = min(1.0, (step + 1) / max(recipe.warmup_steps, 1)) * (1 - step / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate
        loss = response_nll_B(model, *collate(rows, device)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
        optimizer.step()
        progress(step + 1, recipe.steps, float(loss.detach()))
    write_folder(
        out, lambda folder: _save(model, entry, recipe, refusals_file, harmless_file, folder)
    )


def _save(
    model: Any,
    entry: BaseModelEntry,
    recipe: AlignmentRecipe,
    refusals_file: Path,
    harmless_file: Path,
    folder: Path,
) -> None:
    model.save_pretrained(folder, safe_serialization=True)
    # The base's folder lies in a cache of this machine; the recipe names the base instead.
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    config["base_model_name_or_path"] = entry.name
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    weights = folder / "adapter_model.safetensors"
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}, weights
    )
    (folder / "README.md").unlink(missing_ok=True)
    card = {
        "base_model": entry.name,
        "base_source": entry.source.model_dump(mode="json"),
        "recipe": recipe.model_dump(mode="json"),
        "data": {path.name: file_sha256(path) for path in (refusals_file, harmless_file)},
        "weights_sha256": file_sha256(weights),
        "torch": torch.__version__,
    }
    (folder / "recipe.json").write_text(json.dumps(card, indent=2) + "\n", "utf-8")
