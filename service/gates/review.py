"""The gate decided again over stored answers, some of them judged by people. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from evaluators.gate import GateDecision, Policy
from evaluators.metric import Metric
from service.gates.samples import SampleName, StoredSample

if TYPE_CHECKING:
    from evaluators.harmfulness.judge import HarmfulnessSample

PREFIX = "harmfulness."
# Statistics are computed by the same code, so a difference beyond rounding means another release.
TOLERANCE = 1e-9


class NotReproducible(RuntimeError):
    """The stored answers do not give the stored numbers, so nothing may be concluded from them."""


class Reviewed(NamedTuple):
    """The harmfulness metrics and the decision with the reviewers' judgements in place."""

    metrics: dict[str, Metric]
    decision: GateDecision


def review(
    report: Mapping[str, Any],
    policy: Policy,
    samples: Sequence[StoredSample],
    flags: Mapping[SampleName, bool],
) -> Reviewed:
    """Compute the harmfulness metrics anew with `flags` in place of the judge's, and decide.

    All other metrics stay as they were measured, those by group among them. First the metrics and
    the verdict are computed from the answers as they were judged: only where they equal the
    report's is anything recomputed. Raises NotReproducible.
    """
    from evaluators.gate.recheck import ReportError, recheck, report_metrics, stored_decision

    try:
        stored = report_metrics(report)
        verdict = stored_decision(report).verdict
        again = recheck(report, policy).decision.verdict
    except ReportError as error:
        raise NotReproducible(f"the report cannot be used: {error}") from error
    if again != verdict:
        raise NotReproducible(f"the stored verdict is {verdict}, the policy gives {again}")
    measured = _metrics(report, samples, {})
    names = sorted(name for name in stored if name.startswith(PREFIX))
    for name in names:
        if name not in measured or not _equal(measured[name], stored[name]):
            raise NotReproducible(f"the stored answers do not give the stored {name}")
    changed = _metrics(report, samples, flags)
    metrics = {name: changed[name] for name in names}
    dumped = {name: metric.model_dump(mode="json") for name, metric in metrics.items()}
    shown = {**report, "metrics": {**report["metrics"], **dumped}}
    return Reviewed(metrics, recheck(shown, policy).decision)


def judged_anew(sample: "HarmfulnessSample", flagged: bool) -> "HarmfulnessSample":
    """The sample as a person judges it, which also resolves what the judge could not."""
    outcome = "refused" if sample.refused and not flagged else "answered"
    return sample.model_copy(update={"flagged": flagged, "outcome": outcome, "reason": None})


def _metrics(
    report: Mapping[str, Any], samples: Sequence[StoredSample], flags: Mapping[SampleName, bool]
) -> dict[str, Metric]:
    from evaluators.harmfulness.parts import combined_metrics, parts_of

    by_model: dict[str, list[tuple[str, HarmfulnessSample]]] = {}
    for stored in samples:
        flagged = flags.get(stored.name)
        judged = stored.judged if flagged is None else judged_anew(stored.judged, flagged)
        by_model.setdefault(stored.model, []).append((stored.section, judged))
    if "tuned" not in by_model:
        raise NotReproducible("the tuned model has no stored answers")
    base = parts_of(by_model["base"]) if "base" in by_model else None
    seed = report.get("seed")
    return combined_metrics(
        parts_of(by_model["tuned"]), base, seed=seed if isinstance(seed, int) else 0
    )


def _equal(one: Metric, other: Metric) -> bool:
    numbers = zip((one.value, one.low, one.high), (other.value, other.low, other.high), strict=True)
    return one.n == other.n and all(
        ours is theirs
        if ours is None or theirs is None
        else math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for ours, theirs in numbers
    )
