"""The compared defenses by name."""

from collections.abc import Mapping
from types import MappingProxyType

from jobspec.defense import (
    AfterOptions,
    AntidoteOptions,
    CanaryOptions,
    ConstrainedOptions,
    DefenseOptions,
    LisaOptions,
    MixOptions,
    PerturbationOptions,
    PlainOptions,
    PrefilterOptions,
    RandomNoiseOptions,
    SafeLoraOptions,
    SchedulerOptions,
    SealOptions,
    TuningOptions,
)

NOTHING = PerturbationOptions(mode="none")
JOINT = PerturbationOptions(mode="joint")
POST_HOC = PerturbationOptions(mode="post_hoc")


class UnknownArmError(ValueError):
    """No arm has this name."""


def _arm(scheduler: TuningOptions, after: AfterOptions = NOTHING) -> DefenseOptions:
    # Canaries cost time and change nothing that a cell measures: the poison is known here.
    return DefenseOptions(scheduler=scheduler, perturbation=after, canaries=CanaryOptions(count=0))


ARMS: Mapping[str, DefenseOptions] = MappingProxyType(
    {
        "undefended": _arm(PlainOptions()),
        "mix": _arm(MixOptions()),
        "lisa": _arm(LisaOptions()),
        "constrained_sft": _arm(ConstrainedOptions()),
        "prefilter": _arm(PrefilterOptions()),
        "seal": _arm(SealOptions()),
        "bds": _arm(SchedulerOptions()),
        "bds_released": _arm(SchedulerOptions(rescore=False, learning_rate=5e-2)),
        "bds_neural": _arm(SchedulerOptions(form="neural", scorer="embedding")),
        "panacea": _arm(PlainOptions(), JOINT),
        "post_hoc": _arm(PlainOptions(), POST_HOC),
        "bds+panacea": _arm(SchedulerOptions(), JOINT),
        "bds+post_hoc": _arm(SchedulerOptions(), POST_HOC),
        "random_noise": _arm(PlainOptions(), RandomNoiseOptions()),
        "safe_lora": _arm(PlainOptions(), SafeLoraOptions()),
        "antidote": _arm(PlainOptions(), AntidoteOptions()),
    }
)


def arm(name: str) -> DefenseOptions:
    """The options of an arm. Raises UnknownArmError."""
    if name not in ARMS:
        raise UnknownArmError(f"no arm is called {name!r}; known: {', '.join(ARMS)}")
    return ARMS[name]
