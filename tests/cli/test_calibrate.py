"""`tunegate evaluators calibrate` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from service.cli.calibrate import calibrate
from service.cli.output import CommandError

app = typer.Typer()
app.callback()(lambda: None)
app.command("calibrate")(calibrate)


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["calibrate", *arguments])
    error = done.exception
    code = error.exit_code if isinstance(error, CommandError) else done.exit_code
    return code, done.stdout, str(error) if isinstance(error, CommandError) else done.stderr


def table(folder: Path, **change: Any) -> str:
    path = folder / "items.jsonl"
    rows = [
        {
            "query": f"q{i % 12}",
            "labels": [1 + i % 5, 3, 1 + (i // 5) % 5],
            "score": i % 7,
            **change,
        }
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def test_a_table_becomes_a_report_its_items_and_a_summary(tmp_path: Path) -> None:
    code, shown, notes = run("--input", table(tmp_path), "--out", str(tmp_path / "out"))
    assert code == 0
    report = json.loads((tmp_path / "out/calibration.json").read_text("utf-8"))
    assert (report["version"], report["items"], report["subsets"][0]["n"]) == (1, 60, 60)
    items = (tmp_path / "out/items.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["line"] for line in items] == list(range(1, 61))
    assert (tmp_path / "out/summary.md").read_text("utf-8").startswith("# Agreement")
    assert "all items" in shown
    assert "warning: entropy 0.02" in notes


def test_json_is_one_document_on_stdout(tmp_path: Path) -> None:
    code, shown, _ = run("--input", table(tmp_path), "--out", str(tmp_path / "out"), "--json")
    assert code == 0
    answer = json.loads(shown)
    assert answer["out"] == str(tmp_path / "out")
    assert answer["subsets"][0]["family"] == "full"


def test_two_runs_with_one_seed_are_equal(tmp_path: Path) -> None:
    source = table(tmp_path)
    for name in ("a", "b"):
        assert run("--input", source, "--out", str(tmp_path / name), "--seed", "3")[0] == 0
    first, second = ((tmp_path / name / "calibration.json").read_bytes() for name in ("a", "b"))
    assert first == second


def test_preferences_are_read_as_such(tmp_path: Path) -> None:
    source = table(tmp_path, labels=["strongly_1", "similar", "slightly_2"])
    code, _, problem = run("--input", source, "--out", str(tmp_path / "x"))
    assert code == 3
    assert "Unknown label strongly_1" in problem
    out = str(tmp_path / "out")
    code, shown, _ = run("--input", source, "--out", out, "--kind", "pairwise")
    assert code == 0
    assert "P_disagree 0.6" in shown


def test_a_wrong_item_is_a_usage_error_with_file_line_and_field(tmp_path: Path) -> None:
    code, _, problem = run("--input", table(tmp_path, score="high"), "--out", str(tmp_path / "o"))
    assert code == 3
    assert "items.jsonl: Line 1: " in problem
    assert "(field score)" in problem
    assert not (tmp_path / "o").exists()


def test_an_absent_file_is_a_usage_error(tmp_path: Path) -> None:
    code, _, problem = run("--input", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert code == 3
    assert "No such file" in problem


def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    code, _, problem = run("--input", table(tmp_path), "--out", str(tmp_path / "taken"))
    assert code == 2
    assert "cannot write" in problem


@pytest.mark.parametrize("arguments", [("--kind", "triple"), ("--levels", "1"), ("--seed", "-1")])
def test_options_out_of_bounds_are_usage_errors(tmp_path: Path, arguments: tuple[str, str]) -> None:
    out = str(tmp_path / "out")
    # The command's entry point turns the parser's 2 into 3.
    assert run("--input", table(tmp_path), "--out", out, *arguments)[0] == 2


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from service.cli.calibrate import *\n"
        f"calibrate(Path({table(tmp_path)!r}), Path({str(tmp_path / 'out')!r}))\n"
        "print(sorted({'torch', 'transformers', 'scipy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
