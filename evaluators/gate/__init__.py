"""The release gate: a policy of bounds on metrics, and the decision it takes.

Nothing here imports torch or numpy, so the gateway may use it.
"""

from evaluators.gate.policy import (
    CANARY_METRIC,
    EFFECTIVE_AUC,
    KNOWN_METRICS,
    Policy,
    PolicyError,
    Rule,
    default_policy,
    parse_policy,
    policy_sha256,
    tighten,
)
from evaluators.gate.shortfall import Shortfall, suite_shortfalls
from evaluators.gate.verdict import GateDecision, RuleResult, decide

__all__ = [
    "CANARY_METRIC",
    "EFFECTIVE_AUC",
    "KNOWN_METRICS",
    "GateDecision",
    "Policy",
    "PolicyError",
    "Rule",
    "RuleResult",
    "Shortfall",
    "decide",
    "default_policy",
    "parse_policy",
    "policy_sha256",
    "suite_shortfalls",
    "tighten",
]
