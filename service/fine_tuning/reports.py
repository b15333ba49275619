"""A job's report in every form: which one was asked for, where it is kept, how it is written.

The full report is in the bundle, released or in quarantine; the job's row holds a summary and what
reviewers added. The stored decision is never replaced: a review stands beside it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from service.kit.artifacts import ArtifactMissing, ArtifactStore
from service.kit.errors import ApiError
from service.store.models import Job

REPORT_FILE = "report.json"
REVIEW = ("overrides", "reviewed_gate", "reviewed_metrics")


class Form(NamedTuple):
    """One way to write a report; `writer` names it in evaluators.gate.formats (None: as JSON)."""

    suffix: str
    media_types: tuple[str, ...]
    writer: str | None


# In the order of preference where a client does not care.
FORMS = (
    Form("json", ("application/json",), None),
    Form("md", ("text/markdown",), "markdown"),
    Form("html", ("text/html",), "html"),
    Form("xml", ("application/xml", "text/xml"), "junit"),
    Form("sarif", ("application/sarif+json",), "sarif"),
    Form("txt", ("text/plain",), "text"),
)


class Rendered(NamedTuple):
    """A report as it is answered."""

    content: str
    media_type: str


def form_of_suffix(suffix: str) -> Form:
    """Raises ApiError 406."""
    found = next((form for form in FORMS if form.suffix == suffix), None)
    if found is None:
        raise _not_acceptable(f"the suffix .{suffix}")
    return found


def form_of_accept(accept: str | None) -> Form:
    """The form that an Accept header likes best, JSON where it says nothing. Raises ApiError 406.

    RFC 9110, 12.5.1: of the ranges that fit a type the most precise one gives its weight.
    """
    ranges = [_range(item) for item in (accept or "*/*").split(",") if item.strip()]
    best = max(FORMS, key=lambda form: _weight(form, ranges))
    if _weight(best, ranges) <= 0:
        raise _not_acceptable(f"Accept: {accept}")
    return best


def full_report(artifacts: ArtifactStore, job: Job) -> dict[str, Any]:
    """The whole report, with the review in it; the summary where the bundle was deleted.

    Raises ApiError 404 before the gate has decided, 500 for a report that is damaged.
    """
    from evaluators.gate.recheck import MAX_BYTES, ReportError, read_report

    if job.report is None or "gate" not in job.report or job.artifact is None:
        state = f"{job.status} ({job.stage})" if job.stage else job.status
        raise ApiError(
            404,
            f"Job {job.id} is {state} and has no report: there is one once the gate has decided.",
            "report_not_found",
            "id",
        )
    try:
        with artifacts.open(f"{job.artifact}/{REPORT_FILE}") as stream:
            stored = read_report(stream.read(MAX_BYTES + 1))
    except ArtifactMissing:
        stored = {"version": 1, "job_id": job.id, **job.report}
    except ReportError as error:
        raise _damaged(str(error)) from error
    return {**stored, **{name: job.report[name] for name in REVIEW if name in job.report}}


def render(report: Mapping[str, Any], form: Form, *, reviewed: bool = False) -> Rendered:
    """The report in one form. `reviewed`: with the reviewers' decision in place of the stored one.

    Raises ApiError 400 `not_reviewed` where nobody reviewed it.
    """
    if reviewed and "reviewed_gate" not in report:
        raise ApiError(
            400, "Nobody has reviewed this job. Leave 'reviewed' out.", "not_reviewed", "reviewed"
        )
    if form.writer is None:
        import orjson

        return Rendered(orjson.dumps(report).decode(), form.media_types[0])
    from evaluators.gate.formats import FORMATS
    from evaluators.gate.recheck import ReportError, recheck
    from evaluators.gate.verdict import GateDecision

    try:
        checked = recheck(report, None)
        if reviewed:
            decision = GateDecision.model_validate(report["reviewed_gate"])
            shown = {**report, "metrics": {**report["metrics"], **report["reviewed_metrics"]}}
            checked = checked._replace(decision=decision, verdict=decision.verdict, report=shown)
        return Rendered(FORMATS[form.writer](checked), form.media_types[0])
    except (ReportError, ValueError) as error:
        raise _damaged(str(error)) from error


def _range(item: str) -> tuple[str, float]:
    """A media range and its weight; a weight that is none counts as 0."""
    name, *parameters = (part.strip().lower() for part in item.split(";"))
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                weight = float(value)
            except ValueError:
                return name, 0.0
            return name, weight if 0 <= weight <= 1 else 0.0
    return name, 1.0


def _weight(form: Form, ranges: list[tuple[str, float]]) -> float:
    weights = []
    for media_type in form.media_types:
        kind = media_type.partition("/")[0]
        for pattern in (media_type, f"{kind}/*", "*/*"):
            found = [weight for name, weight in ranges if name == pattern]
            if found:
                weights.append(max(found))
                break
    return max(weights, default=0.0)


def _not_acceptable(asked: str) -> ApiError:
    offered = ", ".join(f".{form.suffix} ({form.media_types[0]})" for form in FORMS)
    return ApiError(
        406, f"A report is not written as {asked}. Ask for one of: {offered}.", "not_acceptable"
    )


def _damaged(why: str) -> ApiError:
    return ApiError(500, f"The stored report cannot be used: {why}.", "report_damaged")
