"""The calibration report in words and tables."""

from evaluators.calibration.correlation import Estimate
from evaluators.calibration.report import CalibrationReport, SubsetCalibration

COLUMNS = ("items", "N", "variance", "Pearson", "Spearman", "Kendall", "random subsets")


def subset_cells(subset: SubsetCalibration) -> tuple[str, ...]:
    """One subset as a row of COLUMNS; random subsets: their Spearman."""
    parameter = "" if subset.parameter is None else f" {subset.parameter:g}"
    chance = subset.chance
    return (
        f"{subset.name}{parameter}",
        str(subset.n),
        "-" if subset.variance_ratio is None else f"{subset.variance_ratio:.0%}",
        _shown(subset.pearson),
        _shown(subset.spearman),
        _shown(subset.kendall),
        "-"
        if chance is None
        else f"{chance.spearman:.2f} ({chance.spearman_low:.2f}..{chance.spearman_high:.2f})",
    )


def as_markdown(report: CalibrationReport) -> str:
    """The whole report as Markdown, without any text of the table."""
    fewest, most = report.raters
    means = ", ".join(
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in report.disagreement.items()
        if value is not None
    )
    kappa = "not defined" if report.fleiss_kappa is None else f"{report.fleiss_kappa:.3f}"
    lines = [
        "# Agreement of a scorer with people",
        "",
        f"{report.items:,} {report.kind} items of {report.queries:,} queries, {fewest} to {most} "
        "raters an item.",
        f"Disagreement, mean over items: {means}. Fleiss' kappa {kappa}.",
        "",
        "Intervals: 95 %, bootstrap over queries (over items where a subset has fewer than 10), "
        f"{report.rounds:,} resamples, seed {report.seed}.",
        "Variance: of the human scores, in percent of all items'. A smaller range lowers any "
        "correlation, so compare with the last column: Spearman in random subsets of equal "
        "variance.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(subset_cells(subset))} |" for subset in report.subsets),
        "",
    ]
    warned = [subset for subset in report.subsets if subset.warnings]
    if warned:
        lines += ["Warnings:", ""]
        lines += [
            f"- {subset_cells(subset)[0]}: {'; '.join(subset.warnings)}." for subset in warned
        ]
        lines.append("")
    return "\n".join(lines)


def _shown(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.2f}..{estimate.high:.2f})"
