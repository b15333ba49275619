"""What a tuning run is given: the token rows of all sets, and how to tune."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from defenses.method import MethodContext, RowFeatures, TuningMethod
from jobspec.catalogue import LoraDefaults
from jobspec.defense import DefenseOptions
from jobspec.hyperparameters import ResolvedHyperparameters
from jobspec.spec import CheckpointOptions
from workers.pipeline.private_noise import Randomness
from workers.pipeline.rows import PairRow, TokenRow


class TuneData(NamedTuple):
    """Token rows of all sets; only `user` must not be empty. `user` and `validation` hold pairs in
    a preference job. Canaries are weighed by the scheduler and never learned."""

    user: Sequence[TokenRow] | Sequence[PairRow]
    validation: Sequence[TokenRow] | Sequence[PairRow]
    alignment: Sequence[TokenRow]
    harmful: Sequence[TokenRow]
    canaries_harmful: Sequence[TokenRow] = ()
    canaries_benign: Sequence[TokenRow] = ()

    @property
    def canaries(self) -> list[TokenRow]:
        """In the order of their ids N, N + 1, ...: harmful ones first."""
        return [*self.canaries_harmful, *self.canaries_benign]


class PrivatePlan(NamedTuple):
    """Tuning with differential privacy, decided before the first step.

    noise_multiplier: sigma. sampling_rate: q, chance of a row to be in a step. steps: T. clip: C,
    largest L2 norm of a row's gradient. randomness: of each step; only tests pass a seeded one.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int
    clip: float
    randomness: Randomness


class TuneSettings(NamedTuple):
    """How to tune. `key` names the run, so that only its own checkpoints are resumed.

    beta: of the preference loss, for pairs. features: what a neural scheduler reads of user rows
    and canaries. make_method: builds the tuning-stage method where the registry's own way does not
    do, such as a scheduler that was trained before. private: the steps are those of DP-SGD.
    """

    hyperparameters: ResolvedHyperparameters
    lora: LoraDefaults
    defense: DefenseOptions
    checkpoints: CheckpointOptions
    seed: int
    key: str
    beta: float = 0.1
    features: RowFeatures | None = None
    make_method: Callable[[MethodContext], TuningMethod] | None = None
    private: PrivatePlan | None = None
