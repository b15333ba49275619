"""Rates and paired changes of a flag that is unknown for some answers."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from evaluators.harmfulness.judge import HarmfulnessSample, PromptKind
from evaluators.metric import Metric, undefined
from evaluators.statistics import (
    bootstrap_mean_interval,
    mcnemar_exact,
    paired_score_interval,
    wilson_interval,
)

UNRESOLVED = ("empty", "judge_failed", "unparsable")

# True, False, or None where the answer does not tell.
State = Callable[[HarmfulnessSample], bool | None]
States = dict[str, list[bool | None]]
Interval = tuple[float, float]


def is_unresolved(sample: HarmfulnessSample) -> bool:
    """Whether nobody can say if the answer is harmful."""
    return sample.outcome in UNRESOLVED


def states_by_prompt(
    samples: Sequence[HarmfulnessSample], kind: PromptKind | None, state: State
) -> States:
    """State of every answer, by prompt; None for `kind`: all kinds."""
    states: States = {}
    for sample in samples:
        if kind is None or sample.kind == kind:
            # Ids are unique within a kind's file only, so the kind is part of the key.
            states.setdefault(f"{sample.kind}/{sample.prompt_id}", []).append(state(sample))
    return states


def unresolved_note(
    samples: Sequence[HarmfulnessSample], kind: PromptKind | None, state: State
) -> str | None:
    """How many answers the state does not tell, by outcome; None where it tells all."""
    of_kind = [sample for sample in samples if kind is None or sample.kind == kind]
    unknown = Counter(sample.outcome for sample in of_kind if state(sample) is None)
    if not unknown:
        return None
    parts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(unknown.items()))
    return (
        f"{unknown.total()} of {len(of_kind)} answers unresolved ({parts}): value over the rest, "
        "interval for the worse case"
    )


def rate(
    samples: Sequence[HarmfulnessSample],
    kind: PromptKind | None,
    state: State,
    seed: int,
    *,
    confidence: float = 0.95,
) -> Metric:
    """Share of prompts in the state; a prompt with several answers counts with their share.

    value is over resolved answers, n the prompts that have one; where none has, the value is
    undefined and n the prompts that were asked. The interval is the outer one of that with every
    unresolved answer counted as False and that with every one counted as True, over all prompts.
    One answer a prompt: Wilson; several: bootstrap over prompts. Derived.
    """
    states = states_by_prompt(samples, kind, state)
    if not states:
        return undefined(0, f"no {kind or 'judged'} prompts")
    note = unresolved_note(samples, kind, state)
    known = [_shares(values).known for values in states.values()]
    shares = [share for share in known if share is not None]
    if not shares:
        return undefined(len(states), note or "nothing is resolved")
    how = (all(len(values) == 1 for values in states.values()), seed, confidence)
    value = float(np.mean(shares))
    lowest = tuple(_shares(values).low for values in states.values())
    highest = tuple(_shares(values).high for values in states.values())
    low, high = outer([_rate_interval(extreme, *how) for extreme in {lowest, highest}])
    return Metric(value=value, n=len(shares), low=min(low, value), high=max(high, value), note=note)


class Change(NamedTuple):
    """A paired change with its McNemar test; `p` is undefined with several answers a prompt."""

    metric: Metric
    p: Metric


def change(
    samples: Sequence[HarmfulnessSample],
    base_samples: Sequence[HarmfulnessSample] | None,
    kind: PromptKind,
    state: State,
    seed: int,
    *,
    confidence: float = 0.95,
) -> Change:
    """Share of the state minus the base model's, over the prompts that both answered.

    value and p are over pairs in which both sides are resolved. The interval is the outer one of
    that with every unresolved answer of the tuned model counted as False and of the base as True,
    and that the other way round, over all pairs; `low` and `high` of p are the smallest and the
    largest p among the three. One answer a prompt: interval as
    `evaluators.statistics.paired_change`; several: bootstrap over prompts. Derived.
    """
    if base_samples is None:
        missing = undefined(0, "the base model was not measured")
        return Change(missing, missing)
    tuned = states_by_prompt(samples, kind, state)
    base = states_by_prompt(base_samples, kind, state)
    shared = [prompt for prompt in tuned if prompt in base]
    if not shared:
        missing = undefined(0, f"no {kind} prompt was answered by both models")
        return Change(missing, missing)
    pairs = [(_shares(base[prompt]), _shares(tuned[prompt])) for prompt in shared]
    known = [
        (before.known, after.known)
        for before, after in pairs
        if before.known is not None and after.known is not None
    ]
    notes = [
        f"{who}: {note}"
        for who, side in (("tuned", samples), ("base", base_samples))
        if (note := unresolved_note(side, kind, state))
    ]
    if not known:
        missing = undefined(len(shared), "; ".join(notes)[:500])
        return Change(missing, missing)
    least = tuple((before.high, after.low) for before, after in pairs)
    most = tuple((before.low, after.high) for before, after in pairs)
    value = float(np.mean([after - before for before, after in known]))
    single = all(len(tuned[prompt]) == len(base[prompt]) == 1 for prompt in shared)
    low, high = outer([_change_interval(rows, single, seed, confidence) for rows in {least, most}])
    if single:
        b, c = _discordant(known)
        p = mcnemar_exact(b, c)
        others = [mcnemar_exact(*_discordant(rows)) for rows in {least, most}]
        test = Metric(value=p, n=len(known), low=min(p, *others), high=max(p, *others))
        notes.insert(0, f"exact McNemar p = {p:.3g} (base only {b}, tuned only {c})")
    else:
        test = undefined(len(known), "several answers a prompt: no McNemar test")
    return Change(
        Metric(
            value=value,
            n=len(known),
            low=min(low, value),
            high=max(high, value),
            note="; ".join(notes)[:500] or None,
        ),
        test,
    )


def outer(intervals: Sequence[Interval]) -> Interval:
    """From the lowest to the highest end. A bootstrap interval need not move with its values: where
    all are equal it is wider than where one differs, so both extremes give both ends."""
    return min(low for low, _ in intervals), max(high for _, high in intervals)


class _Shares(NamedTuple):
    """Share of True among a prompt's answers: with None as False, as True, and left out."""

    low: float
    high: float
    known: float | None


def _shares(values: Sequence[bool | None]) -> _Shares:
    true, false = values.count(True), values.count(False)
    return _Shares(
        low=true / len(values),
        high=(len(values) - false) / len(values),
        known=true / (true + false) if true + false else None,
    )


def _rate_interval(shares: Sequence[float], single: bool, seed: int, confidence: float) -> Interval:
    if single:
        return wilson_interval(round(sum(shares)), len(shares), confidence)
    return bootstrap_mean_interval(shares, seed, confidence=confidence, support=(0, 1))


def _change_interval(
    pairs: Sequence[tuple[float, float]], single: bool, seed: int, confidence: float
) -> Interval:
    differences = [after - before for before, after in pairs]
    if not single:
        return bootstrap_mean_interval(differences, seed, confidence=confidence, support=(-1, 1))
    low, high = bootstrap_mean_interval(differences, seed, confidence=confidence)
    b, c = _discordant(pairs)
    if b == 0 or c == 0:
        score_low, score_high = paired_score_interval(b, c, len(pairs), confidence)
        low, high = min(low, score_low), max(high, score_high)
    return low, high


def _discordant(pairs: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """b flagged by the base alone and c by the tuned model alone; one answer a prompt."""
    b = sum(before > after for before, after in pairs)
    c = sum(after > before for before, after in pairs)
    return b, c
