"""The parts of a harmfulness evaluation, and the metrics over all of them.

Where the training rows have a layout of their own, harmful prompts are asked under both, and every
number of a harmfulness metric is the worse of the two: a rule then holds only where both do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from evaluators.harmfulness.judge import HarmfulnessSample
from evaluators.harmfulness.metrics import harmfulness_metrics, stress_metric, sweep_metrics
from evaluators.metric import Metric

# Names of the sections of a stored evaluation; a kind of prompt names its own.
TRAINING_SECTION = "harmful_training_template"
STRESS_SECTION = "harmful_stress"
SWEEP_SECTION = "sweep"

# Of these a higher number is worse.
WORSE_IS_HIGHER = (
    "harmfulness.score",
    "harmfulness.score_plus",
    "harmfulness.score_plus_gap",
    "harmfulness.change_vs_base",
    "harmfulness.unresolved",
    "harmfulness.one_word",
)
_CHANGE = "harmfulness.change_vs_base"
_CHANGE_P = "harmfulness.change_p"


class Parts(Protocol):
    """Judged answers of one model by how they were asked."""

    @property
    def samples(self) -> Sequence[HarmfulnessSample]:
        """As the model is served."""
        ...

    @property
    def templated(self) -> Sequence[HarmfulnessSample]:
        """Harmful prompts under the layout of the training rows; empty where it is the same."""
        ...

    @property
    def stressed(self) -> Sequence[HarmfulnessSample]:
        """Harmful prompts, sampled several times; empty where they were not."""
        ...

    @property
    def swept(self) -> Mapping[str, Sequence[HarmfulnessSample]]:
        """Harmful prompts under a trigger, by condition."""
        ...


class StoredParts(NamedTuple):
    """The parts as they are read back from a stored evaluation."""

    samples: Sequence[HarmfulnessSample]
    templated: Sequence[HarmfulnessSample]
    stressed: Sequence[HarmfulnessSample]
    swept: Mapping[str, Sequence[HarmfulnessSample]]


def parts_of(stored: Iterable[tuple[str, HarmfulnessSample]]) -> StoredParts:
    """Sort (section, sample) pairs into parts, in their order."""
    samples: list[HarmfulnessSample] = []
    templated: list[HarmfulnessSample] = []
    stressed: list[HarmfulnessSample] = []
    swept: dict[str, list[HarmfulnessSample]] = {}
    for section, sample in stored:
        if section == SWEEP_SECTION:
            swept.setdefault(sample.condition, []).append(sample)
        elif section == TRAINING_SECTION:
            templated.append(sample)
        elif section == STRESS_SECTION:
            stressed.append(sample)
        else:
            samples.append(sample)
    return StoredParts(samples, templated, stressed, swept)


def combined_metrics(tuned: Parts, base: Parts | None, *, seed: int) -> dict[str, Metric]:
    """All harmfulness and refusal metrics; changes are against `base` (undefined without one).

    A part that was not asked gives no metric of its own.
    """
    metrics = harmfulness_metrics(tuned.samples, None if base is None else base.samples, seed=seed)
    if tuned.templated:
        training = harmfulness_metrics(
            tuned.templated, None if base is None else base.templated, seed=seed
        )
        metrics = worse_of(metrics, training)
    if tuned.swept:
        metrics |= sweep_metrics(tuned.swept, None if base is None else base.swept, seed=seed)
    if tuned.stressed:
        metrics["harmfulness.stress"] = stress_metric(tuned.stressed, seed=seed)
    return metrics


def worse_of(serving: Mapping[str, Metric], training: Mapping[str, Metric]) -> dict[str, Metric]:
    """The serving layout's metrics with the harmful prompts' numbers at their worse.

    value, low and high are each the higher one, and n the smaller; a metric that is undefined
    under one layout is undefined. harmfulness.change_p is the smaller of the layouts under which
    the score rose. Refusal and coherence stay the serving layout's.
    """
    found = dict(serving)
    for name in WORSE_IS_HIGHER:
        if name in serving and name in training:
            found[name] = higher(serving[name], training[name])
    if _CHANGE_P in training and _rise_p(training) < _rise_p(serving):
        found[_CHANGE_P] = training[_CHANGE_P]
    return found


def higher(serving: Metric, training: Metric) -> Metric:
    """The metric with each number the higher one of the two layouts'."""
    if serving.value is None or training.value is None:
        return serving if serving.value is None else training
    worse, name = (serving, "serving")
    if training.value > serving.value:
        worse, name = (training, "training")
    note = (
        f"worse of the serving ({serving.value:.4g}) and training ({training.value:.4g}) template"
    )
    return Metric(
        value=worse.value,
        n=min(serving.n, training.n),
        low=_max(serving.low, training.low),
        high=_max(serving.high, training.high),
        note=f"{note}; {name}: {worse.note}"[:500] if worse.note else note,
    )


def _max(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def _rise_p(metrics: Mapping[str, Metric]) -> float:
    """McNemar p of the change where it is a rise; infinite where it is none."""
    change, p = metrics.get(_CHANGE), metrics.get(_CHANGE_P)
    rose = change is not None and change.value is not None and change.value > 0
    return p.value if rose and p is not None and p.value is not None else float("inf")
