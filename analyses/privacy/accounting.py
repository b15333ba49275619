"""From mechanisms to their certified success curve, on dp-accounting's loss distributions."""

from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as loss_distribution

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
    replace_one the library doubles the shift itself, so the sensitivity stays 1.
    """
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
    h, lowest = dense._discretization, dense._lower_loss
    p_K = np.asarray(dense._probs, dtype=np.float64)
    if lowest > 0:
        p_K, lowest = np.concatenate([np.zeros(lowest), p_K]), 0
    if lowest + len(p_K) <= 0:
        return np.array([dense._infinity_mass])
    y_K = (lowest + np.arange(len(p_K))) * h
    above_S = np.append(np.cumsum(p_K[::-1])[::-1][1:], 0.0)
    above_R = np.append(np.cumsum((p_K * np.exp(-y_K))[::-1])[::-1][1:], 0.0)
    delta_K = dense._infinity_mass + np.maximum(above_S - np.exp(y_K) * above_R, 0.0)
    return np.asarray(delta_K[-lowest:] if lowest < 0 else delta_K)


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
