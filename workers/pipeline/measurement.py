"""What one model answered under a plan, judged."""

from collections.abc import Mapping

from pydantic import Field

from evaluators.harmfulness.judge import HarmfulnessSample
from jobspec.frozen import Frozen
from workers.pipeline.samples import Answer


class Measurement(Frozen):
    """Everything one model answered, judged.

    samples: as the model is served, one an answer. templated: harmful prompts under the layout of
    the training rows. stressed: harmful prompts sampled several times. swept: by condition.
    answers: all of it as it is stored, in the order in which it was asked.
    """

    samples: tuple[HarmfulnessSample, ...]
    open_answers: dict[str, list[str]]
    utility_answers: list[str]
    utility_nll: list[float]
    templated: tuple[HarmfulnessSample, ...] = ()
    stressed: tuple[HarmfulnessSample, ...] = ()
    swept: Mapping[str, tuple[HarmfulnessSample, ...]] = Field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
