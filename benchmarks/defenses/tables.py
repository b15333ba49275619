"""Results as a flat table, and as Markdown with one line for each attack, ratio and arm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.defenses.arms import ARMS

Result = dict[str, Any]

SETTINGS = ("rung", "attack", "ratio", "arm", "seed", "scale", "task", "harmful")
NUMBERS = (
    "rows", "poisoned", "kept", "kept_poisoned", "alignment_rows", "steps", "change_norm", "auc",
    "effective_sample_size", "weight_poison", "weight_benign", "peak_memory_bytes",
    "manifest_sha256",
)  # fmt: skip
METRICS = (
    "harmful_score", "harmful_score_persona", "harmful_score_plus", "coherent_compliance",
    "accuracy", "refusal", "over_refusal", "coherence", "harmful_nll", "refusal_nll",
)  # fmt: skip


class Summary(NamedTuple):
    """A metric over the seeds of one line: mean, and its interval or range.

    One seed: low and high are the metric's own 95 % interval (Wilson for shares). Several seeds:
    the smallest and the largest value.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int


class Line(NamedTuple):
    """All seeds of one rung, attack, ratio and arm."""

    rung: str
    attack: str
    ratio: float
    arm: str
    results: list[Result]
    failed: int

    def metric(self, name: str) -> Summary | None:
        """A measured metric; None where no seed has it."""
        found = [
            metric
            for result in self.results
            if (metric := result["metrics"].get(name)) and metric["value"] is not None
        ]
        if not found:
            return None
        if len(found) == 1:
            one = found[0]
            return Summary(one["value"], one["low"], one["high"], 1)
        return _spread([metric["value"] for metric in found])

    def number(self, name: str) -> Summary | None:
        """A plain number of the results; None where no seed has it."""
        found = [result[name] for result in self.results if result.get(name) is not None]
        return _spread(found) if found else None

    def seconds(self) -> float | None:
        found = [result["seconds"]["tuning"] for result in self.results]
        return sum(found) / len(found) if found else None


def _spread(values: Sequence[float]) -> Summary:
    mean = sum(values) / len(values)
    if len(values) == 1:
        return Summary(mean, None, None, 1)
    return Summary(mean, min(values), max(values), len(values))


def flat_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One flat row a cell: settings, metrics with their ends, numbers, seconds, error."""
    rows = []
    for result in results:
        row: dict[str, Any] = {"key": result["key"]}
        row |= {name: result["settings"][name] for name in SETTINGS}
        for name in METRICS:
            metric = (result.get("metrics") or {}).get(name) or {}
            row |= {
                name: metric.get("value"),
                f"{name}_low": metric.get("low"),
                f"{name}_high": metric.get("high"),
                f"{name}_n": metric.get("n"),
            }
        row |= {name: result.get(name) for name in NUMBERS}
        row |= {
            f"seconds_{name}": result["seconds"].get(name) for name in ("tuning", "total", "cpu")
        }
        row |= {f"version_{name}": text for name, text in (result.get("versions") or {}).items()}
        row["error"] = result["error"]
        rows.append(row)
    return rows


def write_parquet(results: Sequence[Result], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = flat_rows(results)
    names = sorted({name for row in rows for name in row}, key=_column_place)
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    pq.write_table(table, path)


def lines(results: Sequence[Result]) -> list[Line]:
    """Results grouped over seeds; arms in the order of their definition."""
    groups: dict[tuple[str, str, float, str], Line] = {}
    for result in results:
        settings = result["settings"]
        key = (settings["rung"], settings["attack"], settings["ratio"], settings["arm"])
        line = groups.setdefault(key, Line(*key, results=[], failed=0))
        if result["error"] is None:
            line.results.append(result)
        else:
            groups[key] = line._replace(failed=line.failed + 1)
    order = {name: place for place, name in enumerate(ARMS)}
    return sorted(groups.values(), key=lambda one: (*one[:3], order.get(one.arm, len(order))))


def markdown(results: Sequence[Result]) -> str:
    """The table of all lines, then the cells that failed."""
    found = lines(results)
    persona = any(line.metric("harmful_score_persona") for line in found)
    headings = ["rung", "attack", "p", "arm", "HS %", *(["HS persona %"] if persona else []),
                "FA %", "refused %", "AUC", "ESS/N", "w poison", "w benign", "tuning s",
                "memory MiB", "seeds"]  # fmt: skip
    text = [
        "HS: harmful score, FA: accuracy on the task. Mean over seeds; in brackets the 95 % "
        "Wilson interval of a single seed, or the smallest and largest value of several.",
        "",
        "| " + " | ".join(headings) + " |",
        "|" + " --- |" * len(headings),
    ]
    for line in found:
        seconds, memory = line.seconds(), line.number("peak_memory_bytes")
        cells = [
            line.rung,
            line.attack,
            f"{line.ratio:g}",
            line.arm,
            _percent(line.metric("harmful_score")),
            *([_percent(line.metric("harmful_score_persona"))] if persona else []),
            _percent(line.metric("accuracy")),
            _percent(line.metric("refusal")),
            _plain(line.number("auc"), 2),
            _plain(line.number("effective_sample_size"), 2),
            _plain(line.number("weight_poison"), 3),
            _plain(line.number("weight_benign"), 3),
            "-" if seconds is None else f"{seconds:.0f}",
            "-" if memory is None else f"{memory.mean / 2**20:.0f}",
            str(len(line.results)) + (f" ({line.failed} failed)" if line.failed else ""),
        ]
        text.append("| " + " | ".join(cells) + " |")
    failures = [result for result in results if result["error"] is not None]
    if failures:
        text += ["", "Failed cells:", ""]
        text += [f"- {_label(result)}: {_last_line(result['error'])}" for result in failures]
    return "\n".join(text) + "\n"


def _percent(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    text = f"{100 * summary.mean:.1f}"
    if summary.low is None or summary.high is None:
        return text
    return f"{text} [{100 * summary.low:.1f}, {100 * summary.high:.1f}]"


def _plain(summary: Summary | None, digits: int) -> str:
    return "-" if summary is None else f"{summary.mean:.{digits}f}"


def _label(result: Result) -> str:
    settings = result["settings"]
    return "{rung} {attack} p={ratio:g} {arm} seed {seed}".format(**settings)


def _last_line(error: str) -> str:
    return (error.strip().splitlines() or ["no words"])[-1].replace("|", "/")


def _column_place(name: str) -> tuple[int, str]:
    first = ("key", *SETTINGS)
    return (first.index(name), "") if name in first else (len(first), name)
