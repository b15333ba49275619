"""`tunegate evaluators`: the embedded harm scorer's error rates, and its fit on labelled rows."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from evaluators.harmfulness.card import ScorerDamagedError, read_card
from service.cli.output import JSON_HELP, UNAVAILABLE, USAGE, CommandError, answer, note, table

app = typer.Typer(no_args_is_help=True, help="Judges, and how far they can be trusted.")

AsJson = Annotated[bool, typer.Option("--json", help=JSON_HELP)]

RATES = ("n", "unsafe_share", "auroc", "balanced_accuracy", "flagged_share")
REFUSAL_RATES = ("n", "auroc", "accuracy", "precision", "recall")


@app.command()
def scorecard(
    folder: Annotated[
        Path | None, typer.Option(help="a scorer that was fitted here; default: the shipped one")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Held-out error rates of the embedded scorer, its known limits, and the data behind it."""
    _show(_card(folder), as_json)


@app.command("fit-harm")
def fit_harm(
    data: Annotated[Path, typer.Option(help="folder of labelled answers, JSON Lines")],
    out: Annotated[Path, typer.Option(help="folder to write the scorer to")] = Path("harm-scorer"),
    as_json: AsJson = False,
) -> None:
    """Fit the embedded scorer on labelled answers and print its scorecard.

    DATA holds jailbreakbench_artifacts.jsonl, xstest_completions.jsonl and
    pyrit_scorer_evals.jsonl, itself or in labelled_safety/; further sets serve as checks where
    present. Needs scikit-learn (extra: dev). The shipped scorer is not replaced.
    """
    if not data.is_dir():
        raise CommandError(f"{data}: no such folder", USAGE)
    note("embedding the answers: some minutes on one core ...")
    _fit(["--data", str(data), "--out", str(out)])
    card = _card(out)
    shipped = _card(None)
    same = all(card[name] == shipped[name] for name in ("data_sha256", "recipe", "embedder"))
    note("fitted on the shipped scorer's data" if same else "data differ from the shipped scorer's")
    _show(card, as_json)
    note(f"scorer: {out}")


def _fit(arguments: list[str]) -> None:
    """The fit in a process of its own, so that this one loads no torch; its errors are one line."""
    command = [sys.executable, "-W", "ignore", "-m", "evaluators.harmfulness.fit", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace",
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        _, errors = process.communicate()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if process.returncode != 0:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        code = process.returncode if process.returncode in (UNAVAILABLE, USAGE) else UNAVAILABLE
        raise CommandError(f"the fit did not finish: {last}", code)


def _card(folder: Path | None) -> dict[str, Any]:
    try:
        return read_card(folder)
    except ScorerDamagedError as error:
        raise CommandError(str(error), UNAVAILABLE if folder is None else USAGE) from error


def _show(card: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        answer(True, dict(card), "")
        return
    print(f"{card['id']}, version {card['version']}: flags an answer from {card['threshold']:.2f}")
    print()
    columns = ("held out", *(name.replace("_", " ") for name in RATES), "how")
    table(columns, [_row(name, rates) for name, rates in card["held_out"].items()])
    print()
    refusal = card["refusal_held_out"]
    shown = ", ".join(f"{name} {_number(refusal[name])}" for name in REFUSAL_RATES)
    print(f"refusal model, one answering model left out at a time: {shown}")
    print()
    print("Known limits")
    for limit in card["limits"]:
        print(f"- {limit}")
    print()
    print("Data (sha256)")
    for name, digest in {**card["data_sha256"], **card["checks_sha256"]}.items():
        use = "fitted" if name in card["data_sha256"] else "check only"
        print(f"{digest}  {name}, {use}")
    print(f"{card['coefficients_sha256']}  coefficients")
    print(f"{card['vocabulary_sha256']}  vocabulary")
    print()
    print("Attribution")
    for line in card["attribution"]:
        print(f"- {line}")


def _row(name: str, rates: Mapping[str, Any]) -> dict[str, str]:
    shown = {key.replace("_", " "): _number(rates[key]) for key in RATES}
    shown["auroc"] += f" [{_number(rates['auroc_low'])}, {_number(rates['auroc_high'])}]"
    return {"held out": name, **shown, "how": rates["way"]}


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
