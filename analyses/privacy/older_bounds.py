"""Bounds that the field used before, to show beside the exact curve."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from analyses.privacy.spec import Phase
from analyses.privacy.tradeoff import Array

BISECTIONS = 60
# The best order of a weak mechanism lies near 1, of a strong one far away: spaced by logarithm.
ORDERS: Array = 1.0 + np.logspace(-2.5, math.log10(127.0), 400)


def renyi_success(baseline: float, order_O: Array, rdp_O: Array) -> float:
    """min over orders t of (kappa e^rdp(t))^((t-1)/t), at most 1. Source: the brief, 2.5."""
    exponent_O = (order_O - 1) / order_O * (math.log(baseline) + rdp_O)
    return float(min(np.exp(exponent_O.min()), 1.0))


def renyi_advantage(order_O: Array, rdp_O: Array, points: int = 4000) -> float:
    """max over baselines of renyi_success - baseline, on a grid of both scales."""
    grid = np.unique(
        np.concatenate([np.logspace(-8, -1e-6, points), np.linspace(0, 1, points)[1:]])
    )
    log_B_O = np.log(grid)[:, None] + rdp_O[None, :]
    success_B = np.exp(((order_O - 1) / order_O * log_B_O).min(axis=1)).clip(max=1.0)
    return float((success_B - grid).max())


def zcdp_success(baseline: float, rho: float) -> float:
    """exp(-(sqrt(ln 1/kappa) - sqrt(rho))^2) if rho < ln(1/kappa), else 1: the Renyi bound of
    rho-zCDP at its best order. Source: the brief, 2.5."""
    room = -math.log(baseline)
    if rho >= room:
        return 1.0
    return math.exp(-((math.sqrt(room) - math.sqrt(rho)) ** 2))


def zcdp_advantage(rho: float, points: int = 20_000) -> float:
    """max over baselines of zcdp_success - baseline, on a grid of both scales."""
    grid = np.unique(
        np.concatenate([np.logspace(-12, -1e-9, points), np.linspace(0, 1, points)[1:]])
    )
    return max(zcdp_success(float(x), rho) - float(x) for x in grid)


def two_sided_renyi_success(baseline: float, order_O: Array, rdp_O: Array) -> float:
    """Largest success s = 1 - beta that both Renyi constraints allow, least over the orders:

        s^t x^(1-t) + (1-s)^t (1-x)^(1-t) <= e^((t-1) rdp(t)), and the same with x and s exchanged

    at x = kappa, by bisection between x and 1, where both left sides rise. Tighter than
    renyi_success, looser than the exact curve. Source: Zhu et al. 2022, as the brief gives it.
    """
    x = baseline
    limit_O = (order_O - 1) * rdp_O
    low_O, high_O = np.full(len(order_O), x), np.ones(len(order_O))
    for _ in range(BISECTIONS):
        s_O = (low_O + high_O) / 2
        allowed_O = np.maximum(_log_power(s_O, x, order_O), _log_power(x, s_O, order_O)) <= limit_O
        low_O = np.where(allowed_O, s_O, low_O)
        high_O = np.where(allowed_O, high_O, s_O)
    # The upper end is not allowed, so it bounds from the safe side.
    return float(high_O.min())


def dp_sgd_rdp(phases: Sequence[Phase], order_O: Array = ORDERS) -> Array:
    """rdp(t) of DP-SGD with add-or-remove neighbours, by dp-accounting's accountant."""
    accountant: Any = RdpAccountant(list(order_O))
    for phase in phases:
        event = GaussianDpEvent(phase.noise_multiplier)
        accountant.compose(PoissonSampledDpEvent(phase.sampling_rate, event), phase.steps)
    return np.asarray(accountant._rdp, dtype=np.float64)


def _log_power(a: Any, b: Any, order_O: Array) -> Array:
    """ln( a^t b^(1-t) + (1-a)^t (1-b)^(1-t) )."""
    with np.errstate(divide="ignore", invalid="ignore"):
        first = order_O * np.log(a) + (1 - order_O) * np.log(b)
        second = order_O * np.log1p(-a) + (1 - order_O) * np.log1p(-b)
    return np.asarray(np.logaddexp(first, np.nan_to_num(second, nan=-np.inf)))
