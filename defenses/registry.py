"""Tuning-stage defenses by their options, imported only when asked for, open to other packages;
and what backs every defense that is offered."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from defenses.baselines.seal import selection_options
from jobspec.defense import CustomOptions, SchedulerOptions, SealOptions, TuningOptions

if TYPE_CHECKING:
    from defenses.method import MethodContext, TuningMethod

ENTRY_POINT_GROUP = "tunegate.defenses"

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "bds": "defenses.bds.methods:ScalarBds",
        "bds_neural": "defenses.bds.methods:NeuralBds",
        "none": "defenses.baselines.plain:Plain",
        "mix": "defenses.baselines.mix:MixMethod",
        "lisa": "defenses.baselines.lisa:LisaMethod",
        "constrained_sft": "defenses.baselines.constrained:ConstrainedMethod",
        "seal": "defenses.bds.methods:ScalarBds",
        "prefilter": "defenses.baselines.plain:Plain",
    }
)

FLAGS = ("uses_alignment", "uses_reference", "uses_canaries", "compares_batches")
CALLS = (
    "reads",
    "objective",
    "learn",
    "relearn",
    "weights",
    "logits",
    "state",
    "load_state",
)


class UnknownDefenseError(LookupError):
    """No installed package offers a defense of this name."""

    def __init__(self, name: str, known: list[str]) -> None:
        self.name = name
        super().__init__(
            f"no installed package offers a defense called {name!r}; known are "
            f"{', '.join(known) or 'none'}. A package adds one through the entry point group "
            f"{ENTRY_POINT_GROUP!r}"
        )


class InvalidDefenseError(TypeError):
    """What a package offers as a defense is not a class of the form defenses.method describes."""

    def __init__(self, name: str, missing: list[str]) -> None:
        self.name = name
        super().__init__(
            f"the defense {name!r} is no tuning method: {', '.join(missing)} missing. Derive it "
            "from defenses.method.PlainMethod and give it a constructor (context, options)"
        )


def installed_defenses() -> list[str]:
    """Names of the defenses that other packages offer, sorted; nothing is imported."""
    return sorted(_installed())


def method_class(options: TuningOptions) -> type[Any]:
    """The class of a tuning-stage defense; its flags say which sets and passes it needs.

    Built-in names never reach another package. `seal` is the class of its first stage; its second
    stage and `prefilter` are plain tuning on fewer rows. Raises UnknownDefenseError and
    InvalidDefenseError.
    """
    if isinstance(options, CustomOptions):
        return _custom(options.method)
    name: str = options.name
    if isinstance(options, SchedulerOptions) and options.form == "neural":
        name = "bds_neural"
    module, _, attribute = BUILT_IN[name].partition(":")
    found: type[Any] = getattr(import_module(module), attribute)
    return found


def build_method(options: TuningOptions, context: "MethodContext") -> "TuningMethod":
    """The defense, ready for its first step.

    A built-in class is called with (context, options), one of another package with (context, the
    mapping in options.options). Raises what method_class and the constructors raise.
    """
    kind = method_class(options)
    given: Any = options
    if isinstance(options, CustomOptions):
        given = options.options
    elif isinstance(options, SealOptions):
        given = selection_options(options)
    method: TuningMethod = kind(context, given)
    return method


def _custom(name: str) -> type[Any]:
    installed = _installed()
    if name not in installed:
        raise UnknownDefenseError(name, sorted(installed))
    found = installed[name].load()
    if not isinstance(found, type):
        raise InvalidDefenseError(name, ["class"])
    missing = [flag for flag in FLAGS if not isinstance(getattr(found, flag, None), bool)]
    missing += [] if hasattr(found, "rescores") else ["rescores"]
    missing += [call for call in CALLS if not callable(getattr(found, call, None))]
    if missing:
        raise InvalidDefenseError(name, missing)
    return found


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


class Fidelity(NamedTuple):
    """How far an implementation follows its source, and the test that shows it.

    badge: faithful (the published equations; what differs around them is in the note), simplified
    (a part of the method is left out or replaced), derived (worked out for this project). source:
    paper and repository. test: path from the root of the project.
    """

    badge: Literal["faithful", "simplified", "derived"]
    source: str
    test: str
    note: str


FIDELITY: Mapping[str, Fidelity] = MappingProxyType(
    {
        "bds": Fidelity(
            "faithful",
            "arXiv 2510.27172, Egg-Hu/Bayesian-Data-Scheduler",
            "tests/defenses/test_scheduler.py",
            "the released update; another rate of v for shorter runs, and logits estimated anew "
            "after every epoch (rescore: false is the release)",
        ),
        "bds_neural": Fidelity(
            "simplified",
            "arXiv 2510.27172, Egg-Hu/Bayesian-Data-Scheduler",
            "tests/defenses/test_bds_neural.py",
            "phi is updated as the paper says (the release never does); the default scorer is a "
            "head over cached embeddings, causal_lm is the paper's",
        ),
        "none": Fidelity(
            "faithful",
            "supervised fine-tuning",
            "tests/defenses/test_baselines_mix.py",
            "mean over rows of the mean over a row's tokens",
        ),
        "mix": Fidelity(
            "simplified",
            "arXiv 2309.07875, vinid/safety-tuned-llamas",
            "tests/defenses/test_baselines_mix.py",
            "a batch of each set every step; the paper shuffles safety rows into the set",
        ),
        "lisa": Fidelity(
            "faithful",
            "arXiv 2405.18641, git-disl/Lisa",
            "tests/defenses/test_baselines_lisa.py",
            "alignment steps come on top of the user's; K counts optimiser steps",
        ),
        "constrained_sft": Fidelity(
            "faithful",
            "arXiv 2406.05946, Unispac/shallow-vs-deep-alignment",
            "tests/defenses/test_baselines_constrained.py",
            "mean over each row before the mean over rows; explicit masks",
        ),
        "seal": Fidelity(
            "simplified",
            "arXiv 2410.07471, hanshen95/SEAL",
            "tests/defenses/test_baselines_seal.py",
            "the released update of v at a higher rate; u falls to 1/epochs, and both stages tune "
            "the same kind of adapter",
        ),
        "prefilter": Fidelity(
            "derived",
            "guard filter with this project's harmfulness scorer",
            "tests/defenses/test_baselines_prefilter.py",
            "the literature filters with large guard models",
        ),
        "joint": Fidelity(
            "faithful",
            "arXiv 2501.18100, w-yibo/Panacea",
            "tests/defenses/test_panacea.py",
            "the release's naming defects repaired; scale searched",
        ),
        "post_hoc": Fidelity(
            "derived",
            "ablation of arXiv 2501.18100",
            "tests/defenses/test_panacea.py",
            "eps of the finished adapter; nothing prepares the model for it",
        ),
        "random_noise": Fidelity(
            "faithful",
            "control of arXiv 2501.18100",
            "tests/defenses/test_baselines_random_noise.py",
            "norm rho exactly, the paper's s * sqrt(d) up to chance",
        ),
        "safe_lora": Fidelity(
            "faithful",
            "arXiv 2405.16833, IBM/SafeLoRA",
            "tests/defenses/test_baselines_safe_lora.py",
            "modules paired by name; undefined cosines leave the module",
        ),
        "antidote": Fidelity(
            "simplified",
            "arXiv 2408.09600, git-disl/Antidote",
            "tests/defenses/test_baselines_antidote.py",
            "prunes LoRA factors, the paper's equation is for full weight matrices",
        ),
    }
)
