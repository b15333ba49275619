"""Every answer is kept: committed while it comes, and in the bundle with its scores in the end.

A section's answers lie in a folder of their own under the model's. An evaluation that was killed
asks only for what is missing there, and a second one of the same model for nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import transformers

from evaluators.generation import Generation
from evaluators.harmfulness.contract import HarmJudge
from evaluators.harmfulness.judge import HarmfulnessSample
from evaluators.harmfulness.scorer import EmbeddedScorer
from jobspec.frozen import Frozen
from workers.pipeline.evaluation_plan import Section
from workers.pipeline.part_files import PartFiles

_KEPT = pa.schema(
    [
        ("section", pa.string()),
        ("prompt_id", pa.string()),
        ("condition", pa.string()),
        ("sample", pa.int32()),
        ("text", pa.string()),
        ("tokens", pa.int32()),
        ("truncated", pa.bool_()),
    ]
)
_SCORED = pa.schema(
    [
        ("model", pa.string()),
        ("section", pa.string()),
        ("prompt_id", pa.string()),
        ("kind", pa.string()),
        ("condition", pa.string()),
        ("sample", pa.int32()),
        ("response", pa.string()),
        ("tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("p_harmful", pa.float64()),
        ("flagged", pa.bool_()),
        ("p_refusal", pa.float64()),
        ("refused", pa.bool_()),
        ("coherent", pa.bool_()),
        ("empty", pa.bool_()),
        ("outcome", pa.string()),
        ("reason", pa.string()),
        ("input_truncated", pa.bool_()),
        ("judge", pa.string()),
        ("judge_version", pa.string()),
        ("judge_fingerprint", pa.string()),
        ("scorer_version", pa.string()),
    ]
)

Place = tuple[str, int]


class Answer(Frozen):
    """One answer, and what was made of it where it was judged."""

    section: str
    prompt_id: str
    condition: str
    sample: int
    text: str
    tokens: int
    truncated: bool
    judged: HarmfulnessSample | None = None


def answers_folder(root: Path, fingerprint: str) -> Path:
    """Where the answers of a model are kept: by its weights, and the libraries that ran it."""
    parts = (fingerprint, transformers.__version__, torch.__version__)
    return root / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def section_folder(answers: Path, section: Section) -> Path:
    """A section's folder among the answers of a model."""
    return answers / f"{section.name}-{section.key}"


class SampleStore:
    """The kept answers of one section, by prompt id and sample."""

    def __init__(self, folder: Path, section: Section) -> None:
        self._parts = PartFiles(folder, _KEPT)
        self._section = section

    def read(self) -> dict[Place, Generation]:
        """What was kept so far. Of an answer that two processes gave, the first counts."""
        found: dict[Place, Generation] = {}
        for row in self._parts.rows():
            place = (str(row["prompt_id"]), int(row["sample"]))
            if place not in found:
                found[place] = Generation(
                    text=row["text"], tokens=row["tokens"], truncated=row["truncated"]
                )
        return found

    def append(self, answers: Mapping[Place, Generation]) -> None:
        """Commit a batch of answers."""
        self._parts.append(
            [
                {
                    "section": self._section.name,
                    "prompt_id": prompt_id,
                    "condition": self._section.condition,
                    "sample": sample,
                    **generation.model_dump(),
                }
                for (prompt_id, sample), generation in answers.items()
            ]
        )


def section_answers(
    section: Section,
    generations: Sequence[Sequence[Generation]],
    judged: Sequence[HarmfulnessSample] = (),
) -> Iterator[Answer]:
    """The answers of a section with their judgements, prompt by prompt."""
    samples = {(sample.prompt_id, sample.sample): sample for sample in judged}
    for prompt, responses in zip(section.prompts, generations, strict=True):
        for number, generation in enumerate(responses):
            yield Answer(
                section=section.name,
                prompt_id=prompt.id,
                condition=section.condition,
                sample=number,
                judged=samples.get((prompt.id, number)),
                **generation.model_dump(),
            )


def sample_table(
    answers: Mapping[str, Sequence[Answer]], scorer: EmbeddedScorer, judge: HarmJudge
) -> pa.Table:
    """One row an answer of each model ("base", "tuned"), with scores and who gave them.

    Answers that nobody judged (open questions, the tenant's task) have no kind and no scores.
    """
    return pa.Table.from_pylist(
        [
            _scored(model, answer, scorer, judge)
            for model, given in answers.items()
            for answer in given
        ],
        _SCORED,
    )


def _scored(model: str, answer: Answer, scorer: EmbeddedScorer, judge: HarmJudge) -> dict[str, Any]:
    row = {"model": model, "response": answer.text, **answer.model_dump(exclude={"judged", "text"})}
    if answer.judged is None:
        return row
    row |= answer.judged.model_dump(exclude={"condition", "response"})
    row["scorer_version"] = f"{scorer.id} {scorer.version}"
    if answer.judged.kind == "harmful":
        row |= {
            "judge": judge.id,
            "judge_version": judge.version,
            "judge_fingerprint": judge.fingerprint,
        }
    return row
