"""From per-query numbers to the metrics that the gate reads."""

from collections.abc import Sequence

from evaluators.diversity.query import QueryDiversity
from evaluators.diversity.scale import EmbedderScale
from evaluators.metric import Metric
from evaluators.statistics import mean_metric

NO_PAIRS = "no query with two responses"
ONE_QUERY = "one query has no interval"


def mean_over_queries(
    values: Sequence[float | None],
    seed: int,
    note: str | None = None,
    support: tuple[float, float] | None = None,
) -> Metric:
    """Mean of the defined values with its bootstrap interval; undefined where there is none, and
    without an interval where there is one."""
    defined = [value for value in values if value is not None]
    if len(defined) == 1:
        return Metric(value=defined[0], n=1, note=note or ONE_QUERY)
    return mean_metric(defined, seed, note if defined else NO_PAIRS, support)


def classes_metric(rows: Sequence[QueryDiversity], seed: int) -> Metric:
    """Mean number of distinct classes, which lies between 1 and the number of answers."""
    counts = [row.distinct_classes for row in rows]
    most = max((row.n for row in rows), default=0)
    return mean_over_queries(
        counts, seed, f"of at most {most} answers a query", (1.0, float(max(most, 1)))
    )


def scale_note(scale: EmbedderScale) -> str:
    """How to read a similarity of this embedder."""
    baseline = "" if scale.unrelated is None else f", unrelated texts {scale.unrelated:.2f}"
    kind = "" if scale.calibrated else " (not calibrated)"
    return f"scale of {scale.embedder_id[:200]}: alarm {scale.alarm:.2f}{baseline}{kind}"
