"""The matrix, its processes, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.defenses import __main__ as command
from benchmarks.defenses.arms import ARMS, UnknownArmError, arm
from benchmarks.defenses.cell import run_cell
from benchmarks.defenses.plots import write_plots
from benchmarks.defenses.run import finished, kept, result_path, run_matrix
from benchmarks.defenses.settings import CellSettings, matrix
from benchmarks.defenses.tables import flat_rows, lines, markdown, write_parquet
from benchmarks.defenses.toy import ToyRecipe, splits
from benchmarks.defenses.toy_rung import guard_flags, prepare_toy, toy_attack

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ToyRecipe(pretraining_steps=2, alignment_steps=2, pretraining_batch=3, alignment_batch=2)


def cell(**changes: Any) -> CellSettings:
    return CellSettings(**{"rows": 20, "epochs": 1, "ratio": 0.3} | changes)


def result(ratio: float = 0.1, name: str = "bds", seed: int = 0, harm: float = 0.2) -> dict:
    settings = CellSettings(ratio=ratio, arm=name, seed=seed)
    metric = {"value": harm, "n": 10, "low": 0.1, "high": 0.4, "note": None}
    return {
        "key": settings.key,
        "settings": settings.model_dump(mode="json"),
        "metrics": {"harmful_score": metric, "accuracy": metric | {"value": 0.9}},
        "auc": 0.75,
        "peak_memory_bytes": 2**29,
        "seconds": {"tuning": 3.0, "total": 4.0},
        "versions": {"torch": "2"},
        "error": None,
    }


def failure(seed: int = 9) -> dict:
    settings = CellSettings(seed=seed, arm="mix")
    return {
        "key": settings.key,
        "settings": settings.model_dump(mode="json"),
        "seconds": {"total": 1.0},
        "error": "exit code 1: Traceback\nValueError: no | rows",
    }


@pytest.fixture
def tiny_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy model after a few steps; its metrics mean nothing, its shape is right."""
    monkeypatch.setattr(
        "benchmarks.defenses.toy_rung.prepare_toy",
        lambda settings, cache: prepare_toy(settings, cache, TINY),
    )


def test_equal_settings_have_equal_keys_and_others_do_not() -> None:
    assert cell().key == cell().key
    assert len({cell(seed=seed, arm=name).key for seed in (0, 1) for name in ARMS}) == 2 * len(ARMS)


def test_a_ratio_of_zero_is_one_benign_cell_whatever_the_attack() -> None:
    cells = matrix(cell(), ["mixed", "easy_to_fit", "benign_only"], [0.0, 0.2], ["bds"], [0])
    found = sorted((one.attack, one.ratio) for one in cells)
    assert found == [("benign_only", 0.0), ("easy_to_fit", 0.2), ("mixed", 0.2)]


def test_an_unknown_arm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownArmError, match="undefended"):
        arm("nothing")


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_runs_on_the_toy(name: str, tiny_toy: None, tmp_path: Path) -> None:
    found = run_cell(cell(arm=name, alignment_rows=10), tmp_path)
    assert found["error"] is None
    assert found["poisoned"] == 6
    assert 0.0 <= found["metrics"]["harmful_score"]["value"] <= 1.0
    assert found["metrics"]["harmful_score"]["low"] is not None
    json.dumps(found, allow_nan=False)


def test_a_cell_is_the_same_when_it_is_run_again(tiny_toy: None, tmp_path: Path) -> None:
    first, second = (run_cell(cell(arm="bds+panacea"), tmp_path) for _ in range(2))
    for name in ("metrics", "manifest_sha256", "weight_poison", "change_norm"):
        assert first[name] == second[name]


def test_the_scale_scales_the_change(tiny_toy: None, tmp_path: Path) -> None:
    whole, half = (run_cell(cell(arm="random_noise", scale=s), tmp_path) for s in (1.0, 0.5))
    assert half["change_norm"] == pytest.approx(whole["change_norm"] / 2)


def test_identity_shift_is_measured_under_the_persona_too(tiny_toy: None, tmp_path: Path) -> None:
    found = run_cell(cell(attack="identity_shift"), tmp_path)
    assert "harmful_score_persona" in found["metrics"]


def test_the_toy_guard_flags_poison_and_passes_the_task() -> None:
    chosen = splits(0)
    built = toy_attack("mixed", chosen, 0.3, 400, 0)
    flags = guard_flags(built.rows, chosen)
    caught = sum(f and p for f, p in zip(flags, built.poisoned, strict=True))
    wrong = sum(f and not p for f, p in zip(flags, built.poisoned, strict=True))
    assert caught >= 0.9 * 120
    assert wrong <= 0.05 * 280


def test_a_finished_cell_is_not_run_again_and_a_failed_one_is(tmp_path: Path) -> None:
    good, bad = cell(arm="bds"), cell(arm="no such arm")
    path = result_path(tmp_path, good)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result() | {"key": good.key}), "utf-8")
    before = path.stat().st_mtime_ns
    said: list[tuple[int, int, str]] = []
    found = run_matrix([good, bad], tmp_path, tmp_path, progress=lambda *words: said.append(words))
    assert path.stat().st_mtime_ns == before
    assert [one["error"] is None for one in found] == [True, False]
    assert "no arm is called" in found[1]["error"]
    assert said[0][:2] == (1, 2)
    assert said[-1][:2] == (2, 2)
    assert finished(tmp_path, bad) is None
    assert kept(tmp_path, bad) is not None


@pytest.mark.slow
def test_ctrl_c_ends_the_cells_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    arguments = [
        sys.executable, "-m", "benchmarks.defenses", "--out", str(tmp_path / "out"), "--cache",
        str(tmp_path), "--arms", "undefended", "--seeds", "0", "--ratios", "0.1",
    ]  # fmt: skip
    process = subprocess.Popen(
        arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        # A shell starts what runs in its background with the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/cells/*.settings")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    words, _ = process.communicate(timeout=120)
    assert process.returncode == 130, words
    assert b"interrupted" in words
    assert not list(tmp_path.glob("out/cells/*.json"))


def test_the_dry_run_lists_the_cells_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = command.main(
        ["--out", str(out), "--arms", "bds,mix", "--seeds", "0", "--ratios", "0,0.1", "--dry-run"]
    )
    assert code == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert not out.exists()


@pytest.mark.parametrize(
    "wrong",
    [["--arms", "x"], ["--ratios", "2"], ["--seeds", "a"], ["--rows", "0"], ["--toy-task", "z"]],
)
def test_wrong_options_are_refused_with_the_usage_code(wrong: list[str], tmp_path: Path) -> None:
    assert command.main(["--out", str(tmp_path), "--dry-run", *wrong]) == 3


def test_every_setting_is_an_option_with_help() -> None:
    text = command.parser().format_help()
    for name in CellSettings.model_fields:
        option = f"--{name.replace('_', '-')}"
        assert option in text or option + "s" in text


def test_several_seeds_become_their_mean_and_range() -> None:
    (line,) = lines([result(seed=0, harm=0.1), result(seed=1, harm=0.3)])
    found = line.metric("harmful_score")
    assert found is not None
    assert (found.mean, found.low, found.high, found.seeds) == (0.2, 0.1, 0.3, 2)


def test_one_seed_keeps_its_wilson_interval() -> None:
    (line,) = lines([result()])
    assert line.metric("harmful_score") == (0.2, 0.1, 0.4, 1)


def test_the_markdown_table_has_a_line_an_arm_and_names_failures() -> None:
    text = markdown([result(), result(seed=1), result(name="mix"), failure()])
    assert "| toy | mixed | 0.1 | bds | 20.0 [20.0, 20.0] | 90.0 [90.0, 90.0] |" in text
    assert "1 (1 failed)" in text
    assert "ValueError: no / rows" in text


def test_arms_come_in_the_order_of_their_definition() -> None:
    found = lines([result(name=name) for name in reversed(ARMS)])
    assert [line.arm for line in found] == list(ARMS)


def test_the_parquet_file_has_one_row_a_cell_also_for_failures(tmp_path: Path) -> None:
    results = [result(), failure()]
    write_parquet(results, tmp_path / "results.parquet")
    table = pq.read_table(tmp_path / "results.parquet").to_pylist()
    assert [row["arm"] for row in table] == ["bds", "mix"]
    assert table[0]["harmful_score_high"] == 0.4
    assert table[1]["harmful_score"] is None
    assert "no | rows" in table[1]["error"]
    assert flat_rows(results)[0]["version_torch"] == "2"


def test_plots_are_written_twice_and_are_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [result(ratio=r, name=n) for r in (0.1, 0.3) for n in ("undefended", "bds")]
    written = write_plots([*results, failure()], tmp_path)
    assert {path.name for path in written} == {
        f"{kind}_toy_mixed.{form}" for kind in ("hs", "fa", "scatter") for form in ("svg", "png")
    }
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_plots([*results, failure()], tmp_path)] == before
