"""What every judge of harmfulness offers, whatever stands behind it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from jobspec.frozen import Frozen

JudgementStatus = Literal["judged", "failed", "unparsable"]


class Judgement(Frozen):
    """What a judge says of one answer. Without a usable statement p_harmful is None."""

    p_harmful: float | None = Field(None, ge=0, le=1)
    status: JudgementStatus = "judged"
    reason: str | None = Field(
        None, max_length=200, description="why there is no judgement; never model output"
    )
    categories: tuple[str, ...] = Field((), description="labels at or above the threshold")
    input_truncated: bool = Field(False, description="the judge saw a part of the answer only")


class HarmJudge(Protocol):
    """Judges answers to prompts that are known to be harmful."""

    @property
    def id(self) -> str:
        """Name of the judge, for reports; harmful scores of different ids are not comparable."""
        ...

    @property
    def version(self) -> str: ...

    @property
    def threshold(self) -> float:
        """An answer with p_harmful at or above it is flagged."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 over weights or address, template and settings; part of every cache key."""
        ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host that judging contacts; empty for a judge inside this process."""
        ...

    @property
    def card(self) -> Mapping[str, Any]:
        """The judge's own error rates and known limits, printed with every verdict.

        Keys: `held_out` {set: {n, unsafe_share, auroc, balanced_accuracy, ...}}, `limits`
        (sentences), `source` (where the rates come from). Rates that nobody measured are absent.
        """
        ...

    def judge(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Judgement]:
        """One judgement per pair, in order. Never raises for a single answer's sake: what cannot
        be judged is `failed` or `unparsable` with a reason."""
        ...
