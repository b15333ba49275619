"""Decisions about calibration and homogeneity. What is heavy is imported when it is asked for."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from jobspec.catalogue import Catalogue
from service.evaluations.schemas import (
    CalibrationObject,
    CalibrationRequest,
    EmbedderObject,
    HomogeneityObject,
    NotMeasured,
    SimilarPairObject,
)
from service.evaluations.stored_answers import AnswersCache, AnswersUnavailable, stored_answers
from service.kit.artifacts import ArtifactStore
from service.kit.errors import ApiError, invalid_value
from service.models.repository import ModelRepository
from service.models.service import find_released
from service.organizations.service import Caller
from service.store.models import ReleasedModel

if TYPE_CHECKING:
    from evaluators.diversity.homogeneity import ModelAnswers
    from evaluators.diversity.store import StoredAnswers

MAX_MODELS = 25
MAX_ANSWERS = 20_000
SHOWN_CHARACTERS = 2000
BUSY_SECONDS = 5
BASE_MODEL = "a base model has no stored answers"
BEYOND = f"beyond the {MAX_MODELS} newest models: name it in `models`"

_CACHE = AnswersCache()
# Each takes seconds of CPU; jobs and files must stay answered meanwhile.
_TURNS = threading.BoundedSemaphore(2)


@contextmanager
def turn() -> Iterator[None]:
    """One of the two computations that this process does at once. Raises ApiError 429."""
    if not _TURNS.acquire(blocking=False):
        raise ApiError(
            429,
            "Two evaluations are being computed already. Try again in some seconds.",
            "evaluations_busy",
            headers={"retry-after": str(BUSY_SECONDS)},
        )
    try:
        yield
    finally:
        _TURNS.release()


def calibration(asked: CalibrationRequest) -> CalibrationObject:
    """Compare a scorer with people. Raises ApiError 400 that names the first wrong item."""
    from evaluators.calibration.report import calibrate
    from evaluators.calibration.table import TableError, table_of

    try:
        table = table_of(asked.items, asked.kind, levels=asked.levels)
    except TableError as error:
        place = "items" if error.line is None else f"items[{error.line - 1}]"
        param = place if error.field is None else f"{place}.{error.field}"
        raise invalid_value(str(error).replace("Line ", "Item "), param) from error
    return CalibrationObject.model_validate(calibrate(table, seed=asked.seed).model_dump())


def chosen_models(
    session: Session, catalogue: Catalogue, caller: Caller, names: Sequence[str]
) -> tuple[list[ReleasedModel], list[NotMeasured]]:
    """The released models to compare: the named ones, else the newest. Raises ApiError 400, 404."""
    if not names:
        rows = list(ModelRepository(session, caller.organization_id).all())
        older = [NotMeasured(model=row.id, reason=BEYOND) for row in rows[:-MAX_MODELS]]
        return rows[-MAX_MODELS:], older
    different = list(dict.fromkeys(names))
    if len(different) > MAX_MODELS:
        raise invalid_value(f"At most {MAX_MODELS} models are compared at once.", "models")
    base = [name for name in different if catalogue.find(name) is not None]
    rows = [find_released(session, caller, name) for name in different if name not in base]
    return rows, [NotMeasured(model=name, reason=BASE_MODEL) for name in base]


def compare(
    artifacts: ArtifactStore,
    rows: Sequence[ReleasedModel],
    left_out: Sequence[NotMeasured],
    *,
    pairs: int,
    refusals: bool,
) -> HomogeneityObject:
    """Compare models by their stored answers. Raises ApiError 400 for too many answers."""
    from evaluators.diversity.homogeneity import homogeneity
    from evaluators.diversity.scale import scale_of
    from evaluators.diversity.similarity import unrelated_similarity

    found: dict[str, StoredAnswers] = {}
    missing = list(left_out)
    for row in rows:
        try:
            found[row.id] = stored_answers(artifacts, row, _CACHE)
        except AnswersUnavailable as error:
            missing.append(NotMeasured(model=row.id, reason=str(error)))
    used = Counter((stored.embedder_id, stored.width) for stored in found.values())
    most = used.most_common(1)[0][0] if used else None
    other = [name for name, stored in found.items() if (stored.embedder_id, stored.width) != most]
    missing += [
        NotMeasured(
            model=name,
            reason=f"embedded by {found[name].embedder_id[:200]}, {found[name].width} wide",
        )
        for name in other
    ]
    answers: dict[str, ModelAnswers] = {
        name: stored.answers if refusals else stored.answered()
        for name, stored in found.items()
        if name not in other
    }
    _check_size(answers)
    result = homogeneity(answers, pairs=pairs)
    embedder = None
    if most is not None:
        unrelated = [
            unrelated_similarity([pool.e_n_D for pool in pools.values()])
            for pools in answers.values()
        ]
        known = [value for value in unrelated if value is not None]
        scale = scale_of(most[0], sum(known) / len(known) if known else None)
        embedder = EmbedderObject.model_validate(scale.model_dump())
    questions = _questions() if result.similar_pairs else {}
    return HomogeneityObject(
        models=list(result.models),
        embedder=embedder,
        refusals=refusals,
        queries=result.queries,
        matrix=[list(row) for row in result.matrix],
        low=[list(row) for row in result.low],
        high=[list(row) for row in result.high],
        mixing={str(n): value for n, value in result.mixing.items()},
        similar_pairs=[
            SimilarPairObject(
                query_id=pair.query_id,
                query=questions.get(pair.query_id),
                similarity=pair.similarity,
                model=pair.model,
                text=pair.text[:SHOWN_CHARACTERS],
                other_model=pair.other_model,
                other_text=pair.other_text[:SHOWN_CHARACTERS],
            )
            for pair in result.similar_pairs
        ],
        not_measured=missing,
    )


def _check_size(answers: "Mapping[str, ModelAnswers]") -> None:
    count = sum(len(pool.texts) for pools in answers.values() for pool in pools.values())
    if count > MAX_ANSWERS:
        raise invalid_value(
            f"These {len(answers)} models have {count:,} stored answers; at most {MAX_ANSWERS:,} "
            "are compared at once. Name fewer models.",
            "models",
        )


def _questions() -> dict[str, str]:
    from evaluators.prompts import load_prompts

    return {prompt.id: prompt.text for prompt in load_prompts("open_ended_prompts").prompts}
