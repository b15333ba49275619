"""What a review leaves in a job's report, beside the gate's own decision."""

from collections.abc import Sequence

from evaluators.gate import GateDecision
from service.gates.override_schemas import OverrideObject
from service.gates.review import Reviewed
from service.store.models import GateOverride, Job


def show_review(job: Job, rows: Sequence[GateOverride], reviewed: Reviewed | None) -> None:
    """Put the overrides, and the decision where it was taken anew, beside the gate's own."""
    report = dict(job.report or {})
    report["overrides"] = [OverrideObject.of(row).model_dump() for row in rows]
    if reviewed is not None:
        report["reviewed_gate"] = reviewed.decision.model_dump(mode="json")
        report["reviewed_metrics"] = {
            name: metric.model_dump(mode="json") for name, metric in reviewed.metrics.items()
        }
    job.report = report


def show_verdict(job: Job, verdict: str) -> None:
    """Put the verdict that people took in place of the one that follows from the rules."""
    report = dict(job.report or {})
    decision = GateDecision.model_validate(report.get("reviewed_gate") or report["gate"])
    overruled = decision.model_copy(update={"verdict": verdict})
    report["reviewed_gate"] = overruled.model_dump(mode="json")
    report.setdefault("reviewed_metrics", {})
    job.report = report


def original_verdict(job: Job) -> str:
    """The gate's own."""
    return str((job.report or {})["gate"]["verdict"])


def reviewed_verdict(job: Job) -> str:
    """As people reviewed it; the gate's own where nobody did."""
    report = job.report or {}
    return str((report.get("reviewed_gate") or report["gate"])["verdict"])
