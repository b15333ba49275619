"""Whether one policy is at least as strict as another, and how to make it so."""

from collections.abc import Iterable, Sequence
from typing import Any

from evaluators.gate.policy import (
    CANARY_METRIC,
    EFFECTIVE_AUC,
    Bound,
    Policy,
    PolicyError,
    Rule,
    tighten,
)

# From loose to strict, for fields whose values are words.
_ORDERS: dict[str, tuple[str, ...]] = {
    "severity": ("warning", "error"),
    "on_missing": ("skip", "inconclusive", "fail"),
}
_LIMITS = ("max", "min")
_WORDS = ("description", "version")
# verdict.decide demands this of a policy that says nothing of the metric; an undefined value is no
# breach of it.
_SILENT_DEMAND = Rule(
    metric=CANARY_METRIC, bound="value", min=EFFECTIVE_AUC, on_missing="skip"
)  # fmt: skip


def weaker_than(policy: Policy, floor: Policy) -> list[str]:
    """Everything in which `policy` demands less than `floor`, one sentence each; empty: nothing.

    Every rule of the floor must be covered by one rule of the policy on the same metric, bound and
    group, with a limit, severity and `on_missing` that are at least as strict. Rules on another
    bound count as other rules, since an interval need not hold its point value. A number named
    `minimum_...` may not be smaller, one named `maximum_...` not larger; any other field that
    differs is named too, as nothing is known of its direction. What a policy demands without saying
    so (the effectiveness of the canaries) counts as said.
    """
    return [
        *(_sentence(rule, _said(policy)) for rule in _uncovered(policy, floor)),
        *(
            f"{name}: {getattr(policy, name)} is weaker than {getattr(floor, name)}"
            for name in _weaker_fields(policy, floor)
        ),
    ]


def raised_to(policy: Policy, floor: Policy) -> Policy:
    """The policy made at least as strict as `floor`: the rules that it lacks are added, weaker
    numbers replaced. Raises PolicyError where both together are more than a policy can hold."""
    numbers = {name: getattr(floor, name) for name in _weaker_fields(policy, floor)}
    missing = _uncovered(policy, floor)
    if not numbers and not missing:
        return policy
    try:
        raised = Policy.model_validate({**policy.model_dump(), **numbers})
        return tighten(raised, missing)
    except ValueError as error:
        raise PolicyError(
            "the policy and the rules of the floor that it lacks are more than a policy can hold; "
            "write it anew so that it covers the floor"
        ) from error


def _said(policy: Policy) -> tuple[Rule, ...]:
    if any(rule.metric == CANARY_METRIC for rule in policy.rules):
        return policy.rules
    return (*policy.rules, _SILENT_DEMAND)


def _uncovered(policy: Policy, floor: Policy) -> list[Rule]:
    said = _said(policy)
    return [rule for rule in _said(floor) if not any(not _weaker(one, rule) for one in said)]


def _weaker(rule: Rule, floor: Rule) -> list[str]:
    """Fields in which `rule` does not cover `floor`."""
    found = _weaker_bound(rule, floor)
    for name in type(floor).model_fields:
        if name in Bound.model_fields or name in _WORDS:
            continue
        ours, theirs = getattr(rule, name), getattr(floor, name)
        if name == "unless":
            weaker = ours is not None and (theirs is None or bool(_weaker_bound(ours, theirs)))
        elif name == "on_missing" and floor.severity == "warning":
            weaker = False
        elif name in _ORDERS:
            weaker = _ORDERS[name].index(ours) < _ORDERS[name].index(theirs)
        else:
            weaker = ours != theirs
        found += [name] * weaker
    return found


def _weaker_bound(bound: Bound, floor: Bound) -> list[str]:
    names = [name for name in Bound.model_fields if name not in _LIMITS]
    found = [name for name in names if getattr(bound, name) != getattr(floor, name)]
    if bound.comparison != floor.comparison:
        return [*found, "max" if floor.max is not None else "min"]
    looser = bound.limit > floor.limit if floor.max is not None else bound.limit < floor.limit
    return [*found, "limit"] if looser else found


def _sentence(floor: Rule, said: Sequence[Rule]) -> str:
    """What is missing, against the rule that comes closest."""
    where = f"{floor.metric}{'' if floor.group is None else f' in {floor.group}'} {floor.bound}"
    demand = f"{where} {floor.comparison} {floor.limit:g} (severity {floor.severity})"
    same = [
        rule
        for rule in said
        if (rule.metric, rule.bound, rule.group, rule.comparison)
        == (floor.metric, floor.bound, floor.group, floor.comparison)
    ]
    if not same:
        return f"missing rule: {demand}"
    closest = min(same, key=lambda rule: len(_weaker(rule, floor)))
    return f"weaker rule: {demand}: {', '.join(_differences(closest, floor))}"


def _differences(rule: Rule, floor: Rule) -> Iterable[str]:
    for name in _weaker(rule, floor):
        ours, theirs = _shown(getattr(rule, name)), _shown(getattr(floor, name))
        yield f"{name} {ours} is weaker than {theirs}"


def _shown(value: Any) -> str:
    if isinstance(value, Bound):
        return f"({value.metric} {value.bound} {value.comparison} {value.limit:g})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _weaker_fields(policy: Policy, floor: Policy) -> list[str]:
    """Fields beside the rules in which the policy demands less."""
    found = []
    for name in Policy.model_fields:
        if name == "rules" or name in _WORDS:
            continue
        ours, theirs = getattr(policy, name), getattr(floor, name)
        if name.startswith("minimum_"):
            weaker = ours < theirs
        elif name.startswith("maximum_"):
            weaker = ours > theirs
        else:
            weaker = ours != theirs
        if weaker:
            found.append(name)
    return found
