"""Certified curve and calibration beside riskcal's, in one run.

    python -m benchmarks.privacy [--output benchmarks/results]

Setting of the brief: sigma 0.5, q 0.002, T 10,000, grid 1e-4 for the curve; a target of 0.05 at
baseline 0.01 with q 0.01, T 1,000 for the calibration. CPU seconds, one thread; loading is not
counted. The validity of both answers is checked with the certified curve at the sigma returned.
"""

import argparse
from pathlib import Path

from analyses.context import AnalysisContext
from analyses.privacy.accounting import FINE_GRID, certified_curve, dp_sgd_curve, dp_sgd_losses
from analyses.privacy.calibrate import run as calibrate
from analyses.privacy.spec import CalibrateRequest, CalibrateResult, Phase
from analyses.privacy.tradeoff import concave_points
from benchmarks.measure import (
    RESULTS,
    Result,
    median_cpu_seconds,
    one_thread,
    print_raw,
    publish,
    result,
)

ALLOWED_SECONDS = 0.2
CURVE = Phase(noise_multiplier=0.5, sampling_rate=0.002, steps=10_000)
TARGET_PHASE = Phase(noise_multiplier=1.0, sampling_rate=0.01, steps=1000)
TARGET = CalibrateRequest(sampling_rate=0.01, steps=1000, baseline=0.01, max_success=0.05)


def run(output_dir: Path, rounds: int = 3) -> list[Result]:
    """Measures, prints and writes output_dir/privacy.json; returns what it wrote."""
    from riskcal.analysis import get_beta_from_pld
    from riskcal.calibration.dpsgd import find_noise_multiplier_for_err_rates

    losses = dp_sgd_losses((CURVE,), "add_or_remove_one")
    baselines = concave_points()
    context = AnalysisContext(work=output_dir, cache_dir=output_dir)
    answers: dict[str, float] = {}

    def ours() -> None:
        found = calibrate(TARGET, context).result
        assert isinstance(found, CalibrateResult)
        answers["ours"] = found.noise_multiplier

    def theirs() -> None:
        answers["riskcal"] = find_noise_multiplier_for_err_rates(
            alpha=0.01, beta=0.95, sample_rate=0.01, num_steps=1000, grid_step=FINE_GRID
        )

    with one_thread():
        seconds = median_cpu_seconds(
            {
                "our curve": lambda: certified_curve(losses).success(baselines),
                "riskcal's curve": lambda: get_beta_from_pld(losses, alpha=baselines),
            },
            rounds,
        )
        seconds |= median_cpu_seconds({"ours": ours, "riskcal": theirs}, 1, warm=False)
    results = [
        result(
            "certified curve of 192 baselines / the 0.2 s it may take",
            seconds["our curve"] / ALLOWED_SECONDS,
            1.0,
            "one reverse cumulative sum and a bisection a point",
        ),
        result(
            "calibration / riskcal's, answers valid on the same grid",
            seconds["ours"] / seconds["riskcal"],
            1 / 3,
            "about 12 coarse and 4 fine loss distributions / two a round of bisection",
        ),
    ]
    publish(output_dir, "privacy", results)
    print_raw(seconds, "CPU s")
    success = {
        who: float(
            dp_sgd_curve(
                (TARGET_PHASE.model_copy(update={"noise_multiplier": sigma}),), "add_or_remove_one"
            ).success(0.01)
        )
        for who, sigma in answers.items()
    }
    for who, sigma in answers.items():
        print(f"    {who}: sigma {sigma:.4f}, certified success {success[who]:.5f} (target 0.05)")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    run(arguments.output, arguments.rounds)


if __name__ == "__main__":
    main()
