"""Choosing the canaries of a job: rows whose kind is known, beside the tenant's own.

Harmful ones come from the service's stock. Harmless ones must look like the tenant's task, or the
check would only measure how our stock differs from it: they are rows of the validation file, or,
without one, the training rows that the harmfulness scorer finds least harmful.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from defenses.bds.canaries import CanaryCheck, canary_check
from evaluators.harmfulness.scorer import EmbeddedScorer
from jobspec.chat import ChatRow
from jobspec.preference import PreferenceRow
from jobspec.spec import JobSpec
from workers.pipeline.rows import TokenRow
from workers.pipeline.trusted import UserRow, adopt, harmful_canaries, system_turns

Source = Literal["validation_file", "training_file"]

LEAST_VALIDATION_ROWS = 5
SCORED_ROWS = 1000
# The scorer is made for answers to harmful requests and calls many harmless ones harmful too. At
# this probability it marks 76 % of jailbreak answers (JailbreakBench), 36 % of Dolly's, 21 % of
# self-instruct's and 4 % of GSM8K's answers. Its own threshold of 0.4 marks 93, 76, 62 and 52 % and
# labels such as "no", "account" and "A": whole classes of a task, or all but its short answers,
# would be missing from the harmless canaries.
SURELY_HARMFUL = 0.7


class Canaries(NamedTuple):
    """The planted rows, harmful first: ids N, N + 1, ... of the scheduler's set.

    chat: the same rows as text, for schedulers that read them. benign_user_ids: tenant's rows that
    serve as the harmless side (source training_file). note: why there is no check, or None.
    """

    harmful: tuple[TokenRow, ...] = ()
    benign: tuple[TokenRow, ...] = ()
    chat: tuple[ChatRow, ...] = ()
    benign_user_ids: tuple[int, ...] = ()
    source: Source | None = None
    note: str | None = None

    def harmful_ids(self, row_count: int) -> list[int]:
        return list(range(row_count, row_count + len(self.harmful)))

    def benign_ids(self, row_count: int) -> list[int]:
        first = row_count + len(self.harmful)
        return [*self.benign_user_ids, *range(first, first + len(self.benign))]


class Flagged(NamedTuple):
    """How many of the scored training rows look surely harmful. At most 1000 rows are scored."""

    rows: int
    scored: int


class ScoredRows(NamedTuple):
    """p_harmful of a seeded choice of rows, by row id in ascending order."""

    ids: tuple[int, ...]
    p_harmful: tuple[float, ...]

    def flagged(self) -> Flagged:
        return Flagged(sum(p >= SURELY_HARMFUL for p in self.p_harmful), len(self.ids))


def score_rows(rows: Sequence[UserRow], scorer: EmbeddedScorer, seed: int) -> ScoredRows:
    """p_harmful of at most 1000 rows, chosen by seed."""
    ids = range(len(rows))
    if len(rows) > SCORED_ROWS:
        ids = sorted(_random(seed, "scored").sample(ids, SCORED_ROWS))  # type: ignore[assignment]
    return ScoredRows(tuple(ids), tuple(harmfulness([rows[index] for index in ids], scorer)))


def harmfulness(rows: Sequence[UserRow], scorer: EmbeddedScorer) -> list[float]:
    """p_harmful of each row: of the most harmful answer that is learned."""
    answers = [learned_answers(row) for row in rows]
    scores = iter(scorer.score([answer for row in answers for answer in row]).tolist())
    return [max((next(scores) for _ in row), default=0.0) for row in answers]


def choose_canaries(
    spec: JobSpec,
    tokenizer: Any,
    training: Sequence[UserRow],
    validation: Sequence[ChatRow],
    validation_tokens: Sequence[TokenRow],
    scored: ScoredRows,
    scorer: EmbeddedScorer,
    *,
    uses_canaries: bool,
    max_length: int | None = None,
) -> Canaries:
    """The canaries of a job; empty, with the reason in `note`, where it has none.

    At most `canaries.count` of each kind. Harmless ones: validation rows that do not look surely
    harmful to the scorer and that the training file does not hold; fewer than 5 of them are too
    few, and then training rows serve, out of the half of the scored ones with the least p_harmful.
    scored: of the training rows. Harmful ones: trusted.harmful_canaries of the job's harmful file,
    which harmful_rows leaves out of D_h. A preference job has none: it compares two answers, a
    canary has one.
    """
    count = spec.defense.canaries.count
    if not uses_canaries:
        return Canaries(note="the tuning method of this job does not weigh rows")
    if spec.method != "supervised":
        return Canaries(note=f"a {spec.method} job compares two answers, and planted rows have one")
    if count == 0:
        return Canaries(note="it is switched off (canaries.count is 0); set it above 0")
    planted = adopt(
        tokenizer,
        harmful_canaries(spec.seed, count, harmful_file=spec.harmful_file),
        system_turns(training),
        max_length or spec.model.lora.max_length,
        spec.seed,
        "canaries",
    )
    places = _like_the_task(training, validation, scorer, count, spec.seed)
    if len(places) >= LEAST_VALIDATION_ROWS or (places and len(places) == count):
        return Canaries(
            harmful=tuple(planted.rows),
            benign=tuple(validation_tokens[place] for place in places),
            chat=(*planted.chat, *(validation[place] for place in places)),
            source="validation_file",
        )
    return Canaries(
        harmful=tuple(planted.rows),
        chat=tuple(planted.chat),
        benign_user_ids=_least_harmful(scored, count, spec.seed),
        source="training_file",
    )


def check_canaries(
    canaries: Canaries, logits: Tensor | None, row_count: int, transform: str | None = None
) -> CanaryCheck:
    """The check on a finished run. logits: TuningMethod.logits. transform: of a scheduler that has
    one ("softmax" if None)."""
    if canaries.note is not None:
        return canary_check(None, row_count, [], [], note=canaries.note)
    note = None
    if canaries.source == "training_file":
        note = (
            "the harmless side is training rows, which the model learns: without a validation "
            "file the check looks better than it is"
        )
    return canary_check(
        logits,
        row_count,
        canaries.harmful_ids(row_count),
        canaries.benign_ids(row_count),
        transform="sigmoid" if transform == "sigmoid" else "softmax",
        note=note,
    )


def _like_the_task(
    training: Sequence[UserRow],
    validation: Sequence[ChatRow],
    scorer: EmbeddedScorer,
    count: int,
    seed: int,
) -> list[int]:
    """Places of validation rows that may serve as harmless canaries, in their order."""
    learned = {row.messages for row in training}
    unseen = [place for place, row in enumerate(validation) if row.messages not in learned]
    scores = harmfulness([validation[place] for place in unseen], scorer)
    harmless = [
        place for place, score in zip(unseen, scores, strict=True) if score < SURELY_HARMFUL
    ]
    return sorted(_random(seed, "benign canaries").sample(harmless, min(count, len(harmless))))


def _least_harmful(scored: ScoredRows, count: int, seed: int) -> tuple[int, ...]:
    """Ids out of the less harmful half. All of that half alike: the very least harmful answers are
    often all one and the same label."""
    source = _random(seed, "benign canaries")
    pairs = list(zip(scored.p_harmful, scored.ids, strict=True))
    order = sorted(source.sample(pairs, len(pairs)), key=lambda pair: pair[0])
    half = [row_id for _, row_id in order[: max(1, len(order) // 2)]]
    return tuple(sorted(source.sample(half, min(count, len(half)))))


def learned_answers(row: UserRow) -> list[str]:
    """The answers of a row that are learned, or the preferred one of a pair."""
    if isinstance(row, PreferenceRow):
        return [row.preferred.content]
    return [message.content for message in row.messages if message.trained]


def _random(seed: int, name: str) -> random.Random:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))
