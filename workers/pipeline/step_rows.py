"""Which rows of every set a step reads."""

from collections.abc import Sequence
from typing import NamedTuple

from defenses.method import MethodError, Reads, TuningMethod
from jobspec.defense import PerturbationOptions
from workers.pipeline.rows import PairRow, TokenRow
from workers.pipeline.stream import RowStream
from workers.pipeline.tuning_inputs import TuneData, TuneSettings

LEAST_COMPARED = 4


class StepRows(NamedTuple):
    """Rows of one step: ids of the user's rows, and the rows of the other sets."""

    user_ids: list[int]
    alignment: list[TokenRow]
    canary_ids: list[int]


class StepStreams:
    """The streams of a run; a pure function of seed and step. Raises MethodError for a set or a
    batch on which the method means nothing."""

    def __init__(
        self,
        data: TuneData,
        settings: TuneSettings,
        kind: type[TuningMethod],
        canaries: Sequence[TokenRow],
    ) -> None:
        self._data = data
        size, seed = settings.hyperparameters.batch_size, settings.seed
        name = settings.defense.scheduler.name
        if kind.uses_alignment and not data.alignment:
            raise MethodError(
                f"{name} leans on an alignment set, and there is none; give it rows, or choose a "
                "defense without one"
            )
        if kind.compares_batches and size < LEAST_COMPARED:
            raise MethodError(
                f"this form of {name} compares the rows of a batch, and {size} are too few; set "
                f"batch_size to {LEAST_COMPARED} or more, or use the scalar form"
            )
        # Batches of like length are not fair samples: poison of one length would fill a batch.
        lengths = None if kind.compares_batches else _lengths(data.user)
        self.user = RowStream("user", len(data.user), size, seed, lengths=lengths)
        self._alignment = (
            RowStream(
                "alignment",
                len(data.alignment),
                size,
                seed,
                lengths=_lengths(data.alignment),
                leader=None
                if lengths is None
                else lambda _, step: self.user.longest(*divmod(step, self.user.batches)),
            )
            if kind.uses_alignment
            else None
        )
        repair = settings.defense.perturbation
        joint = isinstance(repair, PerturbationOptions) and repair.mode == "joint"
        self._harmful = (
            RowStream("harmful", len(data.harmful), size, seed, lengths=_lengths(data.harmful))
            if joint
            else None
        )
        self._canary = RowStream("canary", len(canaries), len(canaries), seed) if canaries else None

    def rows(self, reads: Reads, step: int, user_step: int) -> StepRows:
        """Rows of step `step` (from 0), before which user rows were read `user_step` times."""
        epoch, place = divmod(user_step, self.user.batches)
        user = [] if reads == "alignment" else self.user.batch(epoch, place)
        alignment_step = step if reads == "both" else step - user_step
        trusted = (
            [self._data.alignment[i] for i in self._alignment.batch(0, alignment_step)]
            if self._alignment is not None and reads != "user"
            else []
        )
        # Each canary once an epoch, spread evenly over its steps, as a row of the user's would be.
        canaries = (
            []
            if self._canary is None or not user
            else self._canary.batch(epoch, 0)[place :: self.user.batches]
        )
        return StepRows(user, trusted, canaries)

    def harmful(self, step: int) -> list[TokenRow] | None:
        """Harmful rows of a step under Panacea's objective; None without it."""
        if self._harmful is None:
            return None
        return [self._data.harmful[i] for i in self._harmful.batch(0, step)]


def _lengths(rows: Sequence[TokenRow] | Sequence[PairRow]) -> list[int]:
    return [
        max(len(row.chosen.ids), len(row.rejected.ids))
        if isinstance(row, PairRow)
        else len(row.ids)
        for row in rows
    ]
