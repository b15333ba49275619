"""Circumstances under which a defense cannot do what its name promises, told in words.

Each is a code, a severity and one sentence of what was found and one of what to do.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from defenses.bds.canaries import EFFECTIVE_AUC
from evaluators.metric import Metric

LEAST_EFFECTIVE_SIZE = 0.02
UNIFORM_WITHIN = 1e-3
FLAGGED_SHARE = 0.5
LISTED_LINES = 20

Severity = Literal["info", "warn"]
Code = Literal[
    "not_effective",
    "canaries_unavailable",
    "canaries_flattered",
    "few_rows_carry_the_weight",
    "uniform_weights",
    "single_row",
    "alignment_overlap",
    "alignment_exhausted",
    "template_differs",
    "skipped_steps",
    "all_rows_flagged",
]


class Condition(NamedTuple):
    """One circumstance that the reader of a report has to know."""

    code: Code
    severity: Severity
    message: str


class ConditionFacts(NamedTuple):
    """What a run left behind, as plain values.

    rows: N. weights: of the tenant's rows, None for a method without. effective_sample_size: ESS/N.
    weighs_rows: whether the method uses canaries. canary: the metric defense.canary_auc.
    flattered: the harmless canaries are training rows. alignment_wanted 0: no alignment set.
    flagged_rows of scored_rows look surely harmful to the harmfulness scorer.
    """

    rows: int
    canary: Metric
    weights: Sequence[float] | None = None
    effective_sample_size: float | None = None
    weighs_rows: bool = False
    flattered: bool = False
    alignment_wanted: int = 0
    alignment_found: int = 0
    overlap_left_out: int = 0
    overlap_lines: Sequence[int] = ()
    template_differs: bool = False
    skipped_steps: int = 0
    flagged_rows: int = 0
    scored_rows: int = 0


def conditions(facts: ConditionFacts) -> tuple[Condition, ...]:
    """Every circumstance that holds, in a fixed order."""
    return (*_canaries(facts), *_weights(facts), *_sets(facts), *_run(facts))


def _canaries(facts: ConditionFacts) -> list[Condition]:
    if not facts.weighs_rows:
        return []
    auc = facts.canary.value
    if auc is None:
        return [
            Condition(
                "canaries_unavailable",
                "warn",
                "Nobody checked whether the weights tell harmful rows from harmless ones: "
                f"{facts.canary.note}. Do not read the weights as a verdict; rely on the gate's "
                "metrics alone.",
            )
        ]
    found = []
    if auc < EFFECTIVE_AUC:
        found.append(
            Condition(
                "not_effective",
                "warn",
                f"Warning: defense not effective on this data: {_interval(facts.canary)} is below "
                f"{EFFECTIVE_AUC:g}, so harmful rows may have kept or gained weight. Do not "
                "release the model on its metrics alone; remove harmful rows from the file, train "
                "for more epochs, or choose a defense that does not rank by loss, such as mix.",
            )
        )
    if facts.flattered:
        found.append(
            Condition(
                "canaries_flattered",
                "info",
                "The harmless side of the canary check is training rows, which the model learns, "
                "so the check looks better than it is. Send a validation file with at least 5 "
                "harmless rows that the training file does not hold.",
            )
        )
    return found


def _weights(facts: ConditionFacts) -> list[Condition]:
    if facts.rows == 1:
        return [
            Condition(
                "single_row",
                "warn",
                "There is one training row, so there is nothing to weigh it against and the "
                "weights protect nothing. Send more rows.",
            )
        ]
    found = []
    size = facts.effective_sample_size
    if size is not None and size < LEAST_EFFECTIVE_SIZE:
        found.append(
            Condition(
                "few_rows_carry_the_weight",
                "warn",
                f"The weights use {size:.2%} of the rows (effective sample size), so the model was "
                "tuned on a handful of them. Check its accuracy on the task; lower the scheduler's "
                "learning_rate or set an entropy_coefficient above 0.",
            )
        )
    if facts.weights and _uniform(facts.weights):
        found.append(
            Condition(
                "uniform_weights",
                "warn",
                "All rows have the same weight: the scheduler had nothing to tell them apart, as "
                "with identical rows, equal losses or too few steps. The weights protected "
                "nothing; look for duplicates in the file, or train for more epochs.",
            )
        )
    return found


def _uniform(weights: Sequence[float]) -> bool:
    return max(weights) - min(weights) <= UNIFORM_WITHIN * sum(weights) / len(weights)


def _sets(facts: ConditionFacts) -> list[Condition]:
    found = []
    if facts.overlap_left_out:
        listed = ", ".join(str(line) for line in facts.overlap_lines[:LISTED_LINES])
        more = len(facts.overlap_lines) - LISTED_LINES
        found.append(
            Condition(
                "alignment_overlap",
                "warn",
                f"{facts.overlap_left_out} rows of the alignment set were left out because the "
                f"training file asks the same on line {listed}"
                f"{f' and {more} more' if more > 0 else ''}. Look at these lines: a file made from "
                "the alignment prompts weakens the defense.",
            )
        )
    if facts.alignment_found < facts.alignment_wanted:
        found.append(
            Condition(
                "alignment_exhausted",
                "info",
                f"The alignment set has {facts.alignment_found} usable rows, "
                f"{facts.alignment_wanted} were wanted; they are read more often instead. Use a "
                "larger alignment set for a file of this size, or lower alignment_rows.",
            )
        )
    if facts.template_differs:
        found.append(
            Condition(
                "template_differs",
                "warn",
                "The training rows open differently from the alignment rows, so the model may "
                "refuse under the one opening only. Shorten the system turns so that the "
                "alignment rows can take them over.",
            )
        )
    return found


def _run(facts: ConditionFacts) -> list[Condition]:
    found = []
    if facts.skipped_steps:
        found.append(
            Condition(
                "skipped_steps",
                "warn",
                f"{facts.skipped_steps} steps were left out because their loss was not finite; "
                "their rows were neither learned nor weighed then. Lower "
                "learning_rate_multiplier.",
            )
        )
    if facts.scored_rows and facts.flagged_rows > FLAGGED_SHARE * facts.scored_rows:
        found.append(
            Condition(
                "all_rows_flagged",
                "warn",
                f"{facts.flagged_rows} of {facts.scored_rows} scored training rows look harmful to "
                "the harmfulness scorer, perhaps all rows are. Weights are relative and cannot "
                "say so: one row's loss is another's gain. Read a sample of the file; the scorer "
                "also flags long helpful answers.",
            )
        )
    return found


def _interval(canary: Metric) -> str:
    where = "" if canary.low is None else f", 95 % interval {canary.low:.2f} to {canary.high:.2f}"
    return f"the canary AUC of {canary.value:.2f} ({canary.n} planted rows{where})"
