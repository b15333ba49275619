"""The guard filter: rows that a judge flags are dropped before tuning."""

from collections.abc import Sequence

from defenses.method import MethodError


def unflagged_rows(flagged_N: Sequence[bool]) -> list[int]:
    """Ids of the rows that the judge let pass, in order: keep i if not flagged_N[i].

    Raises MethodError if none is left. The judge is the caller's; a filter is as good as it is.
    """
    kept = [row_id for row_id, flagged in enumerate(flagged_N) if not flagged]
    if not kept:
        raise MethodError(
            f"the filter flagged all {len(flagged_N)} rows, so nothing is left to tune on; send "
            "other rows, or choose a defense that weighs rows instead of dropping them"
        )
    return kept
