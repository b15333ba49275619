"""How much of the perturbation to release: the least that passes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class TriedScale(Generic[Outcome]):
    """One evaluated scale: what was measured there, and whether that was good enough."""

    scale: float
    outcome: Outcome
    meets: bool


@dataclass(frozen=True)
class ScaleSearch(Generic[Outcome]):
    """chosen: the smallest scale that meets, None if none does. tried: in ascending order."""

    chosen: float | None
    tried: tuple[TriedScale[Outcome], ...]


def search_scale(
    scales: Iterable[float],
    evaluate: Callable[[float], Outcome],
    meets: Callable[[Outcome], bool],
) -> ScaleSearch[Outcome]:
    """Smallest s in scales with meets(evaluate(s)), for the model w + s * eps.

    Scales are tried in ascending order, each once, and the search stops at the first that meets:
    more perturbation than needed only costs the task. The harm is not monotone in s, so nothing is
    skipped. Raises ValueError for an empty list. Source: derived.
    """
    ascending = sorted(set(scales))
    if not ascending:
        raise ValueError("scale search needs at least one scale")
    tried: list[TriedScale[Outcome]] = []
    for scale in ascending:
        outcome = evaluate(scale)
        tried.append(TriedScale(scale, outcome, meets(outcome)))
        if tried[-1].meets:
            return ScaleSearch(scale, tuple(tried))
    return ScaleSearch(None, tuple(tried))
