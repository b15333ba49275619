"""The canary check: did the scheduler's ranking hold on rows whose kind is known?

Rows known to be harmful and rows known to be harmless take part in the scheduler's loss L_v, so
they get logits, but weigh nothing in the model's loss L_theta. Where the harmful ones do not end
below the harmless ones, the ranking of the tenant's own rows cannot be trusted either. Derived.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from defenses.bds.ranking import separation_auc
from defenses.bds.scheduler import Transform, sigmoid_weights
from evaluators.gate.policy import EFFECTIVE_AUC
from evaluators.metric import Metric, undefined

__all__ = ["EFFECTIVE_AUC", "CanaryCheck", "auc_interval", "canary_check", "canary_weights"]

_BISECTIONS = 60


class CanaryCheck(NamedTuple):
    """auc: the metric defense.canary_auc. The mean weights are those a user row with the canaries'
    logits would have; None where a side is empty."""

    auc: Metric
    mean_weight_harmful: float | None = None
    mean_weight_benign: float | None = None

    @property
    def effective(self) -> bool | None:
        """Whether the ranking held; None when that is unknown."""
        return None if self.auc.value is None else self.auc.value >= EFFECTIVE_AUC


def canary_check(
    logits: Tensor | None,
    row_count: int,
    harmful_ids: Sequence[int],
    benign_ids: Sequence[int],
    *,
    transform: Transform = "softmax",
    note: str | None = None,
) -> CanaryCheck:
    """AUC of "a low logit means harmful" over the canaries, with its 95 % interval.

    logits: [row_count + canaries], user rows first, as TuningMethod.logits gives them; None for a
    method without logits. The ids index it; benign ones may be user rows. note: how the canaries
    were chosen, or why there are none. The metric is undefined, never 0, for a method without
    logits, for an empty side and for logits that are not finite. Raises ValueError for an id that
    is not in logits.
    """
    n = len(harmful_ids) + len(benign_ids)
    if logits is None:
        return CanaryCheck(undefined(0, note or "the tuning method gives its rows no logits"))
    logits = logits.detach().to(device="cpu", dtype=torch.float64)
    ids = torch.tensor([*harmful_ids, *benign_ids], dtype=torch.int64)
    if n and not (int(ids.min()) >= 0 and int(ids.max()) < logits.numel()):
        raise ValueError(
            f"canary ids reach {int(ids.max())}, but there are {logits.numel()} logits; give the "
            "method the number of canaries before it starts"
        )
    if not harmful_ids or not benign_ids:
        missing = "harmful" if not harmful_ids else "harmless"
        return CanaryCheck(undefined(n, note or f"there were no known-{missing} rows to plant"))
    if not bool(torch.isfinite(logits).all()):
        return CanaryCheck(undefined(n, "the scheduler's logits are not finite"))
    harmful = torch.arange(n) < len(harmful_ids)
    auc = separation_auc(logits[ids], harmful)
    low, high = auc_interval(auc, len(harmful_ids), len(benign_ids))
    weights = canary_weights(logits, row_count, ids, transform)
    return CanaryCheck(
        Metric(value=auc, n=n, low=low, high=high, note=note),
        float(weights[harmful].mean()),
        float(weights[~harmful].mean()),
    )


def canary_weights(
    logits: Tensor, row_count: int, ids: Tensor, transform: Transform = "softmax"
) -> Tensor:
    """The weight that a user row with each of these logits would have, float64 [len(ids)].

    softmax: N exp(v_c) / sum_{k < N} exp(v_k) over the N user rows, which the model learns, so the
    numbers compare with theirs; sigmoid: 2 sigmoid(v_c).
    """
    logits = logits.detach().to(torch.float64)
    if transform == "sigmoid":
        return sigmoid_weights(logits[ids])
    return torch.exp(math.log(row_count) + logits[ids] - torch.logsumexp(logits[:row_count], 0))


def auc_interval(
    auc: float, harmful: int, benign: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Two-sided score interval of an area under the ROC curve from `harmful` x `benign` pairs.

    The ends are the t that solve |auc - t| = z sqrt(V(t)), with

        V(t) = t (1 - t) [ 1 + k (1 - t)/(2 - t) + k t/(1 + t) ] / (m n),   k = (m + n)/2 - 1,

    m and n the two counts, z the normal quantile of (1 + confidence)/2. V is the variance of Hanley
    and McNeil (Radiology 143, 1982) with both m - 1 and n - 1 replaced by their mean; solving for t
    makes it Newcombe's method 5 (Statistics in Medicine 25, 2006). Unlike the intervals that put
    the estimate into V, and DeLong's, it keeps a width at auc = 1, where few rows are easily
    separated by chance. Raises ValueError unless 0 <= auc <= 1 and both counts are at least 1.
    """
    if not 0.0 <= auc <= 1.0 or harmful < 1 or benign < 1:
        raise ValueError(
            f"an interval needs an area within 0..1 and a row of each kind, got {auc} from "
            f"{harmful} and {benign}"
        )
    z = NormalDist().inv_cdf((1 + confidence) / 2)

    def inside(t: float) -> bool:
        return abs(auc - t) <= z * math.sqrt(_variance(t, harmful, benign))

    return _end(auc, 0.0, inside), _end(auc, 1.0, inside)


def _variance(t: float, m: int, n: int) -> float:
    k = (m + n) / 2.0 - 1.0
    return t * (1.0 - t) * (1.0 + k * (1.0 - t) / (2.0 - t) + k * t / (1.0 + t)) / (m * n)


def _end(near: float, far: float, inside: Callable[[float], bool]) -> float:
    """Bisection between the estimate, which is inside, and the end of the scale."""
    for _ in range(_BISECTIONS):
        middle = (near + far) / 2.0
        if inside(middle):
            near = middle
        else:
            far = middle
    return near
