"""`tunegate bench defenses` runs the bench in a process of its own."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def tunegate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "service.cli.main", "bench", "defenses", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_options_reach_the_bench(tmp_path: Path) -> None:
    ended = tunegate("--out", str(tmp_path), "--arms", "bds", "--seeds", "4", "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert "bds seed 4" in ended.stdout


def test_help_is_the_benchs_own() -> None:
    assert "--ratios" in tunegate("--help").stdout


def test_a_wrong_option_ends_with_the_usage_code(tmp_path: Path) -> None:
    ended = tunegate("--out", str(tmp_path), "--arms", "none of them")
    assert ended.returncode == 3
    assert "no arm is called" in ended.stderr


def test_the_commands_process_never_loads_torch() -> None:
    code = (
        "import sys, service.cli.main, benchmarks.defenses.__main__; print('torch' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True)
    assert said.strip() == "False"
