"""Names of evaluators and where they live; other packages add theirs by entry point.

An entry point in the group `tunegate.evaluators` maps a new name to `module:object`. Nothing is
imported before `resolve` is asked for it.
"""

import importlib
from importlib.metadata import entry_points
from typing import Any

ENTRY_POINT_GROUP = "tunegate.evaluators"

BUILT_IN: dict[str, str] = {
    "harmfulness.embedded": "evaluators.harmfulness.scorer:EmbeddedScorer",
    "harmfulness.metrics": "evaluators.harmfulness.metrics:harmfulness_metrics",
    "diversity.intra": "evaluators.diversity.intra:diversity_metrics",
    "diversity.homogeneity": "evaluators.diversity.homogeneity:homogeneity",
    "calibration": "evaluators.calibration.report:calibrate",
    "utility.label_accuracy": "evaluators.utility.label_accuracy:label_accuracy_metrics",
    "utility.perplexity": "evaluators.utility.perplexity:perplexity_metrics",
    "utility.answers": "evaluators.utility.scores:utility_score_metrics",
    "harmfulness.judge": "evaluators.judges:load_judge",
    "harmfulness.guard": "evaluators.guards.load:load_guard",
    "harmfulness.moderation": "evaluators.guards.moderation:ModerationClient",
    "harmfulness.stress": "evaluators.harmfulness.metrics:stress_metric",
    "harmfulness.sweep": "evaluators.harmfulness.metrics:sweep_metrics",
}


class UnknownEvaluatorError(KeyError):
    """No evaluator has this name; the message lists those that exist."""

    def __str__(self) -> str:
        return str(self.args[0])


def names() -> list[str]:
    """All names, built in and from installed packages."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def resolve(name: str) -> Any:
    """Import the evaluator of this name. A built-in name cannot be taken over by a package."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return point.load()
    raise UnknownEvaluatorError(f"no evaluator is called {name!r}; known: {', '.join(names())}")
