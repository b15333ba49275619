"""Intervals, tests, corrections and sample sizes for rates and means."""

from evaluators.statistics.binomial import (
    any_of_k,
    binomial_cdf,
    clopper_pearson_interval,
    clopper_pearson_upper,
    wilson_interval,
    wilson_lower,
    wilson_upper,
)
from evaluators.statistics.bootstrap import (
    BOOTSTRAP_ROUNDS,
    bootstrap_mean_interval,
    cluster_bootstrap_interval,
    constant_interval,
    design_effect,
)
from evaluators.statistics.correction import (
    CorrectedRate,
    JudgeCalibration,
    UnusableCalibration,
    holm,
    rogan_gladen,
)
from evaluators.statistics.metrics import mean_metric, proportion_metric
from evaluators.statistics.paired import (
    PairedChange,
    mcnemar_exact,
    paired_change,
    paired_score_interval,
)
from evaluators.statistics.planning import (
    SamplePlan,
    largest_passing_count,
    paired_sample_size,
    pass_plan,
    prompts_for_limit,
)
from evaluators.statistics.sequential import SequentialPlan, StopDecision, stop_decision

__all__ = [
    "BOOTSTRAP_ROUNDS",
    "CorrectedRate",
    "JudgeCalibration",
    "PairedChange",
    "SamplePlan",
    "SequentialPlan",
    "StopDecision",
    "UnusableCalibration",
    "any_of_k",
    "binomial_cdf",
    "bootstrap_mean_interval",
    "clopper_pearson_interval",
    "clopper_pearson_upper",
    "cluster_bootstrap_interval",
    "constant_interval",
    "design_effect",
    "holm",
    "largest_passing_count",
    "mcnemar_exact",
    "mean_metric",
    "paired_change",
    "paired_sample_size",
    "paired_score_interval",
    "pass_plan",
    "prompts_for_limit",
    "proportion_metric",
    "rogan_gladen",
    "stop_decision",
    "wilson_interval",
    "wilson_lower",
    "wilson_upper",
]
