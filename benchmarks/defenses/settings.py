"""What one cell of the bench is, and the key under which its result is kept."""

import hashlib
import json
from itertools import product
from typing import Literal

from pydantic import Field

from benchmarks.defenses.attacks import Attack
from jobspec.frozen import Frozen

# Counts as part of every key: raise it when a cell's meaning changes.
VERSION = 1


class CellSettings(Frozen):
    """One cell: a model rung, an attack at a ratio, a defense arm and a seed."""

    rung: str = Field("toy", description="toy, smollm2, or a name of the model catalogue")
    attack: Attack = Field("mixed", description="how the poisoned rows are made")
    ratio: float = Field(0.1, ge=0, le=1, description="share p of poisoned rows")
    arm: str = Field("undefended", description="name of the defense arm")
    seed: int = Field(0, ge=0, description="of the set, the adapter and the order of the rows")
    task: str = Field("demo", description="benign task of text rungs: demo or FORMAT:TRAIN[,TEST]")
    harmful: str = Field("demo", description="attack rows of text rungs: demo or FORMAT:FILE")
    ood: str | None = Field(None, description="attack rows of out_of_distribution: FORMAT:FILE")
    rows: int | None = Field(None, ge=1, description="rows n; None: 400 (toy), 120 (text)")
    epochs: int | None = Field(None, ge=1, le=50, description="passes; None: 10 (toy), 2 (text)")
    batch_size: int | None = Field(None, ge=1, le=256, description="None: the model's own")
    learning_rate_multiplier: float = Field(1.0, gt=0, description="on the model's own rate")
    alignment_rows: int | None = Field(
        None, ge=1, description="M; None: 100 (toy), 50 batches or n if more (text)"
    )
    scale: float = Field(1.0, ge=0, description="scale of the change after tuning; not searched")
    harmful_prompts: int = Field(60, ge=1, description="harmful test prompts (text)")
    lookalikes: int = Field(20, ge=0, description="safe look-alike prompts (text)")
    task_rows: int = Field(60, ge=1, description="held-out task rows (text)")
    max_new_tokens: int = Field(32, ge=1, le=4096, description="length of an answer (text)")
    generation_batch: int = Field(16, ge=1, description="prompts generated together (text)")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="of the frozen base (text); None: the catalogue's"
    )
    toy_task: Literal["hard", "known"] = Field(
        "hard", description="toy: a task that must be learned, or one the model masters"
    )

    @property
    def key(self) -> str:
        """Names the cell's result; equal settings have equal keys."""
        text = json.dumps([VERSION, self.model_dump()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        return f"{self.rung} {self.attack} p={self.ratio:g} {self.arm} seed {self.seed}"


def matrix(
    base: CellSettings,
    attacks: list[Attack],
    ratios: list[float],
    arms: list[str],
    seeds: list[int],
) -> list[CellSettings]:
    """Every combination, without those that are equal: benign_only and p = 0 are one benign set."""
    cells: dict[str, CellSettings] = {}
    for attack, ratio, name, seed in product(attacks, ratios, arms, seeds):
        if attack == "benign_only" or ratio == 0.0:
            chosen: tuple[Attack, float] = ("benign_only", 0.0)
        else:
            chosen = (attack, ratio)
        cell = CellSettings.model_validate(
            base.model_dump() | {"attack": chosen[0], "ratio": chosen[1], "arm": name, "seed": seed}
        )
        cells.setdefault(cell.key, cell)
    return list(cells.values())
