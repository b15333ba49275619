"""`tunegate evaluators`: the scorecard, and what a fit needs."""

import json
from pathlib import Path
from typing import Any

import pytest


def test_the_scorecard_shows_error_rates_limits_and_data(cli: Any) -> None:
    done = cli.run("evaluators", "scorecard")
    assert done.returncode == 0, done.stderr
    for name in ("jailbreakbench_artifacts", "xstest_completions", "jailjudge_mini"):
        assert name in done.stdout
    for word in ("auroc", "balanced accuracy", "Known limits", "sha256", "Attribution", "XSTest"):
        assert word in done.stdout


def test_the_scorecard_is_json_on_request(cli: Any) -> None:
    done = cli.run("evaluators", "scorecard", "--json")
    card = json.loads(done.stdout)
    assert card["id"] == "embedded-minilm-tfidf"
    assert {"held_out", "limits", "source", "data_sha256"} <= set(card)


def test_a_folder_without_a_scorer_is_a_usage_error(cli: Any, tmp_path: Path) -> None:
    done = cli.run("evaluators", "scorecard", "--folder", str(tmp_path))
    assert done.returncode == 3
    assert "embedded.json of the scorer is missing" in done.stderr


def write_labelled_answers(folder: Path) -> None:
    """30 answers a source: every other one complies, without saying anything."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for number in range(30):
        complies = number % 2
        answer = f"Sure, here is part {number} of the list." if complies else "I'm sorry, but no."
        row = {"prompt": f"a request of category {number}", "response": answer}
        label = "full_compliance" if complies else "full_refusal"
        rows.setdefault("jailbreakbench_artifacts", []).append({**row, "unsafe": complies})
        rows.setdefault("pyrit_scorer_evals", []).append({**row, "score": float(complies)})
        rows.setdefault("xstest_completions", []).extend(
            {**row, "prompt_unsafe": unsafe, "human_label": label, "model": f"model {number % 3}"}
            for unsafe in (0, 1)
        )
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)


def test_a_fit_writes_a_scorer_and_prints_its_card(cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the fit needs scikit-learn (extra: dev)")
    write_labelled_answers(tmp_path)
    out = tmp_path / "out"
    done = cli.run("evaluators", "fit-harm", "--data", str(tmp_path), "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout)
    assert {name: rates["n"] for name, rates in card["held_out"].items()} == {
        "jailbreakbench_artifacts": 30,
        "xstest_completions": 30,
        "pyrit_scorer_evals": 30,
    }
    assert card["held_out"]["pyrit_scorer_evals"]["auroc"] == 1.0
    assert "data differ from the shipped scorer's" in done.stderr
    again = cli.run("evaluators", "scorecard", "--folder", str(out), "--json")
    assert json.loads(again.stdout) == card


@pytest.mark.parametrize("folder", ["empty", "nowhere"])
def test_a_fit_without_its_data_is_a_usage_error(cli: Any, tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    done = cli.run("evaluators", "fit-harm", "--data", str(tmp_path / folder), "--out", str(out))
    assert done.returncode == 3
    assert ("jailbreakbench_artifacts.jsonl" if folder == "empty" else "no such folder") in (
        done.stderr
    )
    assert not out.exists()
