"""A training file without the rows that promoted a behaviour most."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from analyses.context import AnalysisError


class Removal(NamedTuple):
    """The new file, the lines that it lacks (of the old file, from 1), and what to do next."""

    path: Path
    lines: tuple[int, ...]
    kept: int
    next_step: str


def lines_to_remove(result: Mapping[str, Any], k: int) -> tuple[int, ...]:
    """The k first lines of a result of attribution.final_model, with all copies of each.

    result: content of result.json. Rows with a score of 0 or less promote nothing and are never
    taken. Raises AnalysisError: k < 1, more than the result lists, or a copy that it does not list.
    """
    rows = sorted(result["rows"], key=lambda row: row["rank"])
    if not 1 <= k <= len(rows):
        raise AnalysisError(
            f"k is {k}, the result lists {len(rows)} rows; ask for more with report_rows", "k"
        )
    chosen = [row for row in rows[:k] if row["score"] > 0]
    same = {row["row_id"] for row in chosen}
    listed = [row for row in rows if row["row_id"] in same]
    if len(listed) < sum({row["row_id"]: row["copies"] for row in chosen}.values()):
        raise AnalysisError(
            "the result does not list all copies of the rows to remove; ask for all rows, and for "
            "more with report_rows",
            "k",
        )
    return tuple(sorted(row["line"] for row in listed))


def remove_top_rows(training_file: Path, result: Mapping[str, Any], k: int, out: Path) -> Removal:
    """Write `out`: training_file without the k rows that promote the targets most.

    All other lines are copied byte for byte. Raises AnalysisError: see lines_to_remove; also where
    no row promotes the targets, none would be left, or the file has fewer lines than the result
    says.
    """
    lines = lines_to_remove(result, k)
    content = training_file.read_bytes().split(b"\n")
    if not lines:
        raise AnalysisError("no row promotes these targets; there is nothing to remove", "k")
    if lines[-1] > len(content):
        raise AnalysisError(
            f"the result names line {lines[-1]}, {training_file.name} has {len(content)}: is it "
            "the file of that job?",
            "training_file",
        )
    gone = set(lines)
    kept = [line for number, line in enumerate(content, start=1) if number not in gone]
    count = sum(bool(line.strip()) for line in kept)
    if count == 0:
        raise AnalysisError("no row would be left", "k")
    out.write_bytes(b"\n".join(kept))
    return Removal(
        out,
        lines,
        count,
        f"Tune again with the same settings on {out.name} ({count} rows), then run "
        "attribution.final_model with the same targets and compare target_losses: a higher loss "
        "means that the rows did push the model there.",
    )


def what_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Two results of the same targets, before and after removal, side by side.

    loss_change > 0: the behaviour became less likely. Raises AnalysisError for other targets.
    """
    if before["request"]["targets"] != after["request"]["targets"]:
        raise AnalysisError("the two results answer for different targets", "targets")
    pairs: Sequence[tuple[float, float]] = list(
        zip(before["target_losses"], after["target_losses"], strict=True)
    )
    targets = [{"before": one, "after": other, "loss_change": other - one} for one, other in pairs]
    changes = [target["loss_change"] for target in targets]
    return {
        "rows_before": before["n_rows"],
        "rows_after": after["n_rows"],
        "targets": targets,
        "mean_loss_change": sum(changes) / len(changes),
    }


def read_result(path: Path) -> dict[str, Any]:
    """result.json of a run. Raises AnalysisError where it is of another kind."""
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if content.get("kind") != "attribution.final_model":
        raise AnalysisError(f"{path}: is no result of attribution.final_model", "result")
    return content
