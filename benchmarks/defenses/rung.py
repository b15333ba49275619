"""What every model rung hands to a cell: a model, its sets, and how it is measured."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from defenses.method import RowFeatures
from evaluators.metric import Metric
from jobspec.catalogue import LoraDefaults
from jobspec.defense import DefenseOptions
from jobspec.hyperparameters import ResolvedHyperparameters
from workers.pipeline.training import TuneData
from workers.pipeline.tune import Tuned


class RungError(ValueError):
    """A cell asks for what its rung does not have; the message says what to change."""


class Prepared(NamedTuple):
    """Everything a cell needs before it tunes.

    poisoned: of each user row. flagged: what the rung's guard says of each user row (prefilter).
    features: what a neural scheduler reads; called for such arms only. repair: the change of the
    finished adapter at scale 1, by tensor. measure: harmful_score, refusal, accuracy and what else
    the rung can tell. dropped: rows lost to the contamination check, by set.
    """

    model: Any
    data: TuneData
    poisoned: list[bool]
    manifest_sha256: str
    hyperparameters: ResolvedHyperparameters
    lora: LoraDefaults
    defense: DefenseOptions
    flagged: Callable[[], list[bool]]
    features: Callable[[], RowFeatures]
    repair: Callable[[Tuned], Mapping[str, Tensor]]
    measure: Callable[[], dict[str, Metric]]
    dropped: dict[str, int]
