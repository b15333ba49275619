"""Calibration, and what a whole run leaves; golden values of the brief, 6.5."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from analyses.context import AnalysisContext, AnalysisError, Stopped
from analyses.privacy.accounting import dp_sgd_curve
from analyses.privacy.calibrate import _bracket
from analyses.privacy.calibrate import run as calibrate
from analyses.privacy.risk import run as risk
from analyses.privacy.spec import (
    CalibrateRequest,
    CalibrateResult,
    Phase,
    RiskRequest,
    RiskResult,
)
from analyses.privacy.tradeoff import GaussianCurve
from analyses.registry import find
from analyses.run import read_request, run_analysis

GOLDEN = [
    (0.01, 0.05, 0.01, 1000, 0.7777),
    (0.1, 0.2, 0.01, 1000, 0.9696),
    (0.001, 0.01, 0.01, 1000, 0.7534),
    (0.5, 0.6, 0.01, 1000, 1.4154),
    (0.01, 0.05, 0.05, 200, 1.2629),
]


@pytest.fixture
def context(tmp_path: Path) -> AnalysisContext:
    return AnalysisContext(work=tmp_path / "work", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(("baseline", "success", "rate", "steps", "sigma"), GOLDEN)
def test_the_least_noise_for_a_target(
    context: AnalysisContext, baseline: float, success: float, rate: float, steps: int, sigma: float
) -> None:
    request = CalibrateRequest(
        sampling_rate=rate, steps=steps, baseline=baseline, max_success=success
    )
    result = calibrate(request, context).result
    assert isinstance(result, CalibrateResult)
    assert result.noise_multiplier == pytest.approx(sigma, abs=1e-3)
    phase = Phase(noise_multiplier=result.noise_multiplier, sampling_rate=rate, steps=steps)
    again = float(dp_sgd_curve((phase,), "add_or_remove_one").success(baseline))
    assert again == pytest.approx(result.max_success, abs=1e-12)
    assert success - 2e-3 < again <= success
    if sigma == 0.7777:
        assert result.epsilon == pytest.approx(3.398, abs=5e-3)


@pytest.mark.parametrize(("advantage", "sigma"), [(0.16, 0.5730), (0.10, 0.7132)])
def test_the_least_noise_for_an_advantage(
    context: AnalysisContext, advantage: float, sigma: float
) -> None:
    """Section 4: at advantage 0.16 Renyi accounting would need 0.7357."""
    request = CalibrateRequest(sampling_rate=0.0038010957846441, steps=792, advantage=advantage)
    result = calibrate(request, context).result
    assert isinstance(result, CalibrateResult)
    assert result.noise_multiplier == pytest.approx(sigma, abs=1e-3)
    assert result.worst_case.advantage <= advantage


@pytest.mark.parametrize(
    ("raw", "where", "words"),
    [
        ({"baseline": 0.1, "max_success": 0.05}, None, "no noise can make"),
        ({"baseline": 0.1}, None, "together"),
        ({"sampling_rate": 1.5, "baseline": 0.1, "max_success": 0.2}, "sampling_rate", "less than"),
        ({"steps": 0, "baseline": 0.1, "max_success": 0.2}, "steps", "greater than"),
        ({"attack": "gossip", "baseline": 0.1, "max_success": 0.2}, "attack", "Input should"),
        ({"baseline": 0.1, "max_success": 0.2, "sigma": 1}, "sigma", "Extra inputs"),
    ],
)
def test_a_target_that_means_nothing_is_refused(
    raw: dict[str, Any], where: str | None, words: str
) -> None:
    with pytest.raises(AnalysisError, match=words) as error:
        read_request(find("privacy.calibrate"), {"sampling_rate": 0.01, "steps": 100, **raw})
    assert error.value.param == where


def test_a_target_that_needs_no_noise_is_refused(context: AnalysisContext) -> None:
    request = CalibrateRequest(sampling_rate=0.0001, steps=1, baseline=0.1, max_success=0.9999)
    with pytest.raises(AnalysisError, match="no noise"):
        calibrate(request, context)


def test_a_search_can_be_stopped(tmp_path: Path) -> None:
    context = AnalysisContext(work=tmp_path, cache_dir=tmp_path, stop=lambda: True)
    request = CalibrateRequest(sampling_rate=0.01, steps=10, baseline=0.1, max_success=0.2)
    with pytest.raises(Stopped):
        calibrate(request, context)


def test_a_whole_run_leaves_result_table_and_page(tmp_path: Path) -> None:
    kind = find("privacy.risk")
    raw = {
        "noise_multiplier": 1.0,
        "sampling_rate": 0.01,
        "steps": 1000,
        "baselines": [0.1, 0.01],
        "attack": "reconstruction",
    }
    context = AnalysisContext(work=tmp_path / "work", cache_dir=tmp_path / "cache")
    run_analysis(kind, read_request(kind, raw), context, tmp_path / "out")
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert [risk["baseline"] for risk in result["risks"]] == [0.01, 0.1]
    assert result["risks"][0]["max_success"] == pytest.approx(0.0291392, abs=1e-5)
    assert result["risks"][0]["advantage"] == pytest.approx(0.0191392, abs=1e-5)
    assert result["worst_case"]["advantage"] == pytest.approx(0.161018, abs=1e-5)
    assert result["worst_case"]["baseline"] == pytest.approx((1 - 0.161018) / 2, abs=1e-5)
    assert result["epsilon"] == pytest.approx(1.82824, abs=1e-4)
    first = result["risks"][0]
    assert first["max_success"] < first["from_renyi"] < first["from_one_epsilon_delta"]
    assert pq.read_table(tmp_path / "out/curve.parquet").num_rows > 150
    page = (tmp_path / "out/index.html").read_text()
    assert "<svg" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("raw", "tightness", "success"),
    [
        ({"mu": 1.0}, "exact", 0.0923622),
        ({"rho": 0.5}, "bound", 0.12460),
        ({"epsilon": 1.0, "delta": 1e-5}, "very_loose", 0.0271928),
        (
            {"phases": [{"noise_multiplier": 1.0, "sampling_rate": 1.0, "steps": 1}]},
            "exact",
            0.09236,
        ),
    ],
)
def test_every_description_of_privacy_gets_an_answer(
    tmp_path: Path, raw: dict[str, Any], tightness: str, success: float
) -> None:
    kind = find("privacy.risk")
    context = AnalysisContext(work=tmp_path / "work", cache_dir=tmp_path / "cache")
    request = read_request(kind, {**raw, "baselines": [0.01]})
    result = run_analysis(kind, request, context, tmp_path / "out")
    assert result["tightness"] == tightness
    assert result["risks"][0]["max_success"] == pytest.approx(success, abs=2e-4)
    assert bool(result["warnings"]) == (tightness == "very_loose")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "exactly one"),
        ({"mu": 1.0, "rho": 1.0}, "exactly one"),
        ({"noise_multiplier": 1.0}, "together"),
        ({"epsilon": 1.0}, "belong together"),
        ({"mu": 1.0, "baselines": [0.0]}, "within"),
        ({"mu": 1.0, "baselines": []}, "at least 1"),
        ({"mu": 1.0, "attribute_prior": 0.5}, "only the attack attribute_inference"),
        ({"noise_multiplier": 1.0, "sampling_rate": 2.0, "steps": 5}, "less than or equal to 1"),
        ({"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 0}, "greater than or equal to 1"),
    ],
)
def test_an_unclear_description_is_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(AnalysisError, match=words):
        read_request(find("privacy.risk"), raw)


@pytest.mark.parametrize("rho", [0.01, 1.0, 20.0, 1000.0])
def test_the_worst_case_of_rho_is_above_that_of_its_gaussian_and_every_baseline(
    rho: float, context: AnalysisContext
) -> None:
    """mu-GDP with mu = sqrt(2 rho) is rho-zCDP, so no bound for rho may be below its curve."""
    baselines = (1e-6, 1e-3, 0.3, 0.46474, 0.5)
    found = risk(RiskRequest(rho=rho, baselines=baselines), context).result
    assert isinstance(found, RiskResult)
    assert found.worst_case.advantage >= GaussianCurve((2 * rho) ** 0.5).advantage
    assert found.worst_case.advantage >= max(row.advantage for row in found.risks)
    assert 0 <= found.worst_case.baseline < 0.5


def test_privacy_of_unknown_neighbours_is_not_taken_for_that_of_a_replaced_row_in_silence(
    context: AnalysisContext,
) -> None:
    replaced = risk(RiskRequest(mu=1.0, attack="reidentification"), context)
    assert any("replacing a row" in text for text in replaced.warnings)
    assert risk(RiskRequest(mu=1.0), context).warnings == ()


@pytest.mark.parametrize(("needed", "bracket"), [(800.0, (640.0, 1000.0)), (0.06, (0.05, 0.075))])
def test_the_search_goes_to_the_ends_of_its_range(
    needed: float, bracket: tuple[float, float]
) -> None:
    request = CalibrateRequest(sampling_rate=1.0, steps=1, baseline=0.1, max_success=0.2)
    assert _bracket(lambda sigma: needed - sigma, request) == pytest.approx(bracket)
