"""Whether high diversity may be noise: a broken model's answers look diverse."""

from collections.abc import Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict, Field

from evaluators.diversity.lexical import repetition_share


class CoherenceFloor(BaseModel):
    """How far a tuned model's answers may lie from the base model's before diversity is doubted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nll_rise: float = Field(
        default=2.0,
        gt=0,
        le=100,
        description="Highest rise of the median answer's mean token loss under the base model, "
        "nats. Derived: SmolLM2-135M rises by 0.9 in setting B, by 8.6 at temperature 2 alone.",
    )
    repetition_rise: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Highest rise of the median share of repeated word triples. Derived.",
    )


class CoherenceHint(BaseModel):
    """Numbers beside diversity. `holds` None: they do not suffice to say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repetition: float | None = Field(
        description="Median share of repeated word triples inside an answer."
    )
    base_repetition: float | None = Field(description="The same of the base model.")
    nll: float | None = Field(
        description="Median over answers of the mean token loss under the base model, nats."
    )
    base_nll: float | None = Field(description="The same of the base model's own answers.")
    holds: bool | None = Field(description="False: diversity of these answers means nothing.")
    reason: str


def coherence_hint(
    texts: Sequence[str],
    base_texts: Sequence[str] = (),
    *,
    nll: Sequence[float] | None = None,
    base_nll: Sequence[float] | None = None,
    floor: CoherenceFloor | None = None,
) -> CoherenceHint:
    """Compare a model's answers with its base model's, by repetition and by likelihood.

    `nll` and `base_nll` hold the mean token loss of each answer under the base model: word salad is
    unlikely there, and repetition alone does not find it. Without both, `holds` is False at most
    for repetition and otherwise None. Diversity never passes a model alone.
    """
    floor = floor or CoherenceFloor()
    repetition, base_repetition = _repetition(texts), _repetition(base_texts)
    loss = median(nll) if nll else None
    base_loss = median(base_nll) if base_nll else None
    holds: bool | None = None
    reason = "no likelihood under the base model was given"
    if loss is not None and base_loss is not None:
        holds = loss - base_loss <= floor.nll_rise
        reason = (
            f"the median answer's token loss under the base model is {loss:.2f}, "
            f"the base model's own {base_loss:.2f} nats (at most {floor.nll_rise:g} more)"
        )
    if (
        repetition is not None
        and base_repetition is not None
        and repetition - base_repetition > floor.repetition_rise
    ):
        holds = False
        reason = (
            f"the median answer repeats {repetition:.0%} of its word triples, the base model's "
            f"{base_repetition:.0%}"
        )
    return CoherenceHint(
        repetition=repetition,
        base_repetition=base_repetition,
        nll=loss,
        base_nll=base_loss,
        holds=holds,
        reason=reason,
    )


def _repetition(texts: Sequence[str]) -> float | None:
    shares = [share for text in texts if (share := repetition_share(text)) is not None]
    return median(shares) if shares else None
