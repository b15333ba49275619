"""From mechanisms to their certified success curve, on dp-accounting's loss distributions."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as loss_distribution
from scipy.signal import lfilter

from analyses.context import AnalysisError
from analyses.privacy.spec import Adjacency, Phase
from analyses.privacy.tradeoff import Array, CertifiedCurve

FINE_GRID = 1e-4
COARSE_GRID = 1e-3
_RELATIONS = {
    "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
}


@lru_cache(maxsize=8)
def dp_sgd_losses(phases: tuple[Phase, ...], adjacency: Adjacency, grid: float = FINE_GRID) -> Any:
    """The privacy loss distribution of DP-SGD: each phase is T steps of the Gaussian mechanism with
    noise multiplier sigma on a Poisson sample of rate q, and phases compose.

    grid: h, spacing of the losses in nats; connect-the-dots rounding keeps it pessimistic. With
    replace_one the library doubles the shift itself, so the sensitivity stays 1. Raises
    AnalysisError for losses that spread too far for the memory of this machine.
    """
    try:
        return _composed(phases, adjacency, grid)
    except MemoryError as error:
        raise AnalysisError(
            "steps: the privacy losses of so many steps with so little noise do not fit in memory; "
            "take fewer steps or more noise",
            "steps",
        ) from error


def _composed(phases: tuple[Phase, ...], adjacency: Adjacency, grid: float) -> Any:
    total = None
    for phase in phases:
        one = _one_step(phase.noise_multiplier, phase.sampling_rate, adjacency, grid)
        many = one.self_compose(phase.steps) if phase.steps > 1 else one
        total = many if total is None else total.compose(many)
    if total is None:
        raise ValueError("DP-SGD has at least one phase")
    return total


def dp_sgd_curve(
    phases: tuple[Phase, ...], adjacency: Adjacency, grid: float = FINE_GRID
) -> CertifiedCurve:
    """The certified success curve of DP-SGD; see CertifiedCurve and dp_sgd_losses."""
    return certified_curve(dp_sgd_losses(phases, adjacency, grid))


def certified_curve(losses: Any) -> CertifiedCurve:
    """The curve of a dp_accounting.pld.PrivacyLossDistribution, from all losses y_k >= 0 of its
    grid with mass p_k and mass m at infinity:

        delta(y_k) = S_k - e^y_k R_k,  S_k = m + sum_{y > y_k} p,  R_k = sum_{y > y_k} p e^-y

    for both orders of the neighbours, of which the larger delta counts. Pairing the two
    discretisations directly instead is not safe at small baselines.
    """
    one, other = losses._pmf_remove, losses._pmf_add
    first = _deltas(one)
    second = first if other is one else _deltas(other)
    length = max(len(first), len(second))
    delta_K = np.maximum(_padded(first, length), _padded(second, length))
    spacing = one.to_dense_pmf()._discretization
    return CertifiedCurve(np.arange(length) * spacing, delta_K)


def _deltas(pmf: Any) -> Array:
    """delta at the losses 0, h, 2h, ... up to the end of the support."""
    dense = pmf.to_dense_pmf()
    lowest = dense._lower_loss
    p_K = np.asarray(dense._probs, dtype=np.float64)
    p_K = np.concatenate([np.zeros(lowest), p_K]) if lowest > 0 else p_K[-lowest:]
    if len(p_K) == 0:
        return np.array([dense._infinity_mass])
    falling = p_K[::-1]
    above_S = np.append(np.cumsum(falling)[::-1][1:], 0.0)
    # e^y_k R_k = e^-h (e^y_k+1 R_k+1 + p_k+1), at most 1, where e^y_k alone overflows at large y.
    shrink = math.exp(-dense._discretization)
    above_R = lfilter([0.0, shrink], [1.0, -shrink], falling)[::-1]
    # The discretised masses may add up to a little more than 1; no delta does.
    return np.asarray(np.clip(dense._infinity_mass + np.maximum(above_S - above_R, 0.0), None, 1.0))


def _padded(delta_K: Array, length: int) -> Array:
    """Beyond the support delta stays what it is at its end: the mass at infinity."""
    return np.pad(delta_K, (0, length - len(delta_K)), mode="edge")


@lru_cache(maxsize=32)
def _one_step(sigma: float, rate: float, adjacency: Adjacency, grid: float) -> Any:
    return loss_distribution.from_gaussian_mechanism(
        standard_deviation=sigma,
        sampling_prob=rate,
        value_discretization_interval=grid,
        neighboring_relation=_RELATIONS[adjacency],
    )
