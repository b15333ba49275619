"""What every run of the pipeline begins with: announced stages, and the policy to judge by."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from evaluators.gate.policy import Policy, default_policy
from jobspec.spec import EvaluationOptions
from workers.pipeline.emit import Emit
from workers.pipeline.evaluation_plan import judge_options
from workers.pipeline.failure import PipelineFailure


class Stages:
    """Announces stages and keeps how long each took."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._emit("stage", stage=name)
        with self.timed(name):
            yield

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Keep how long a part took, without announcing it as a stage."""
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 3)


def policy_of(content: Mapping[str, Any] | None, evaluation: EvaluationOptions) -> Policy:
    """The policy of a spec; where it names none, the shipped one for the judge of its evaluation.

    Raises PipelineFailure(invalid_spec) naming the field.
    """
    if content is None:
        return default_policy(judge_options(evaluation).name)
    try:
        return Policy.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PipelineFailure(
            "invalid_spec", f"The gate policy is not valid: {where}: {first['msg']}."
        ) from error
