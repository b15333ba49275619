import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from defenses.baselines.random_noise import gaussian_perturbation
from defenses.panacea.perturbation import global_norm


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"b": torch.zeros(40, 30, dtype=dtype), "a": torch.zeros(30, 25, dtype=dtype)}


@given(st.floats(1e-3, 100), st.integers(0, 2**31))
def test_the_norm_over_all_tensors_is_rho(rho: float, seed: int) -> None:
    assert global_norm(gaussian_perturbation(parameters(), rho, seed)) == pytest.approx(rho, 1e-5)


def test_the_same_seed_gives_the_same_noise_and_another_seed_another() -> None:
    first, again = (gaussian_perturbation(parameters(), 1.0, 7) for _ in range(2))
    other = gaussian_perturbation(parameters(), 1.0, 8)
    assert torch.equal(first["a"], again["a"])
    assert not torch.equal(first["a"], other["a"])


def test_the_order_of_the_mapping_does_not_matter() -> None:
    forward = gaussian_perturbation(parameters(), 1.0, 7)
    backward = gaussian_perturbation(dict(reversed(parameters().items())), 1.0, 7)
    assert all(torch.equal(forward[name], backward[name]) for name in forward)


def test_the_noise_is_spread_like_the_papers_control() -> None:
    """i.i.d. Gaussian of sd s has norm s * sqrt(d): so sd is rho / sqrt(d) in every tensor."""
    delta = gaussian_perturbation(parameters(), 2.0, 1)
    sd = 2.0 / math.sqrt(40 * 30 + 30 * 25)
    for tensor in delta.values():
        assert float(tensor.std()) == pytest.approx(sd, rel=0.1)
        assert float(tensor.mean()) == pytest.approx(0.0, abs=4 * sd / math.sqrt(tensor.numel()))


def test_the_noise_has_the_dtype_of_its_parameter() -> None:
    delta = gaussian_perturbation(parameters(torch.bfloat16), 1.0, 7)
    assert {tensor.dtype for tensor in delta.values()} == {torch.bfloat16}


def test_a_norm_of_zero_is_no_noise() -> None:
    assert global_norm(gaussian_perturbation(parameters(), 0.0, 7)) == 0.0


@pytest.mark.parametrize("rho", [-1.0, math.inf, math.nan])
def test_an_impossible_norm_is_refused(rho: float) -> None:
    with pytest.raises(ValueError, match="finite norm"):
        gaussian_perturbation(parameters(), rho, 7)
