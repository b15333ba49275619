"""Asking one model: what is kept is not asked again, and memory decides how much goes together."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from evaluators.generation import (
    Generation,
    GenerationStoppedError,
    PromptTooLongError,
    Row,
    generate,
)
from workers.pipeline.emit import Emit
from workers.pipeline.evaluation_plan import Section
from workers.pipeline.failure import PipelineFailure, Stopped, is_out_of_memory
from workers.pipeline.rows import TokenRow
from workers.pipeline.samples import SampleStore, section_folder
from workers.pipeline.scoring import row_losses

Result = TypeVar("Result")

_NO_ANSWER = Generation(text="", tokens=0, truncated=True)


class Respondent(NamedTuple):
    """A model as it is asked.

    who: for events. answers: the folder of what it answered, which `samples.answers_folder` names.
    active: entered around every question, such as `model.disable_adapter`.
    """

    model: Any
    tokenizer: Any
    who: str
    answers: Path
    active: Callable[[], AbstractContextManager[Any]] = nullcontext


class Asker:
    """Asks one model. Where memory runs out the batch is halved, for all that follows."""

    def __init__(
        self,
        respondent: Respondent,
        batch_size: int,
        seed: int,
        emit: Emit,
        stop: Callable[[], bool],
    ) -> None:
        self.respondent = respondent
        self._batch_size = batch_size
        self._seed = seed
        self._emit = emit
        self._stop = stop

    def ask(self, section: Section) -> list[list[Generation]]:
        """The answers to a section, prompt by prompt; each batch is committed as it comes.

        A prompt that fills the model's context has an empty answer. Raises Stopped when the stop
        turns true; what was answered by then is kept.
        """
        store = SampleStore(section_folder(self.respondent.answers, section), section)
        ids = [prompt.id for prompt in section.prompts]
        places = {prompt_id: place for place, prompt_id in enumerate(ids)}
        kept: dict[Row, Generation] = {
            (places[prompt_id], sample): generation
            for (prompt_id, sample), generation in store.read().items()
            if prompt_id in places and sample < section.decoding.n_samples
        }

        def commit(found: Any) -> None:
            store.append({(ids[place], sample): made for (place, sample), made in found.items()})
            kept.update(found)

        def answers() -> list[list[Generation]]:
            return self._generate(section, kept, commit)

        if len(kept) == len(ids) * section.decoding.n_samples:
            return _in_order(kept, len(ids), section.decoding.n_samples)
        with self.respondent.active():
            return self._halving(answers, section.name)

    def losses(self, rows: Sequence[TokenRow]) -> list[float]:
        """Mean loss of each row's answer, nats a token.

        Raises Stopped, and PipelineFailure where a loss is not finite.
        """

        def compute() -> list[float]:
            return row_losses(self.respondent.model, rows, self._batch_size, self._stop)

        with self.respondent.active():
            losses = self._halving(compute, "utility")
        if not all(math.isfinite(loss) for loss in losses):
            raise PipelineFailure(
                "internal_error",
                f"The loss of the {self.respondent.who} is not finite: tuning diverged. Lower "
                "learning_rate_multiplier and create the job again.",
            )
        return losses

    def _generate(
        self, section: Section, kept: dict[Row, Generation], commit: Callable[[Any], None]
    ) -> list[list[Generation]]:
        respondent, emit = self.respondent, self._emit
        what = f"{respondent.who}: {section.name}"
        try:
            return generate(
                respondent.model,
                respondent.tokenizer,
                section.inputs,
                section.decoding,
                seed=self._seed,
                batch_size=self._batch_size,
                progress=lambda done, total: emit("progress", stage=what, done=done, total=total),
                stop=self._stop,
                kept=kept,
                on_batch=commit,
            )
        except GenerationStoppedError as error:
            raise Stopped from error
        except PromptTooLongError as error:
            too_long = error.indices
        self._emit(
            "message",
            level="warn",
            message=f"{len(too_long)} prompts of {section.name} fill the context of the "
            f"{respondent.who} and have no answer.",
            data={"section": section.name, "prompts": len(too_long)},
        )
        samples = range(section.decoding.n_samples)
        commit({(place, sample): _NO_ANSWER for place in too_long for sample in samples})
        return self._generate(section, kept, commit)

    def _halving(self, attempt: Callable[[], Result], what: str) -> Result:
        while True:
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if self._batch_size == 1 or not _lacks_memory(error):
                    raise
            # Outside the handler: the error's frames hold the tensors that filled the memory.
            whole = self._batch_size
            self._batch_size = whole // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._emit(
                "message",
                level="warn",
                message=f"Memory ran out with {whole} prompts at once ({self.respondent.who}: "
                f"{what}); going on with {self._batch_size}.",
                data={"batch_size": self._batch_size},
            )


def _in_order(kept: dict[Row, Generation], prompts: int, samples: int) -> list[list[Generation]]:
    return [[kept[place, sample] for sample in range(samples)] for place in range(prompts)]


def _lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or is_out_of_memory(error)
