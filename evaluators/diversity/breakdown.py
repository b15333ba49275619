"""Diversity by kind of question."""

from collections.abc import Mapping, Sequence

from evaluators.diversity.aggregate import classes_metric, mean_over_queries
from evaluators.diversity.intra import NO_SHARED, DiversityResult
from evaluators.diversity.paired import difference_metric, paired_difference
from evaluators.diversity.taxonomy import members
from evaluators.metric import Metric


def taxonomy_metrics(
    result: DiversityResult, labels: Mapping[str, Sequence[str]], *, seed: int = 0
) -> dict[str, dict[str, Metric]]:
    """{metric: {kind of question: Metric}} over the taxonomy's top levels and leaves.

    labels: {query id: leaves}; a query counts in each of its kinds. Raises UnknownLeafError.
    """
    kinds = members({row.query_id: labels.get(row.query_id, ()) for row in result.queries})
    rows = {row.query_id: row for row in result.queries}
    base = {row.query_id: row for row in result.base_queries}
    found: dict[str, dict[str, Metric]] = {
        "diversity.intra_similarity": {},
        "diversity.distinct_classes": {},
        "diversity.self_bleu": {},
    }
    for kind, ids in kinds.items():
        chosen = [rows[query_id] for query_id in ids]
        found["diversity.intra_similarity"][kind] = mean_over_queries(
            [r.similarity for r in chosen], seed
        )
        found["diversity.distinct_classes"][kind] = classes_metric(chosen, seed)
        found["diversity.self_bleu"][kind] = mean_over_queries([r.self_bleu for r in chosen], seed)
        if base:
            change = paired_difference(
                [r.similarity for r in chosen],
                [base[i].similarity if i in base else None for i in ids],
                seed,
            )
            changes = found.setdefault("diversity.change_vs_base", {})
            changes[kind] = difference_metric(change, NO_SHARED)
    return found
