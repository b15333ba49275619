"""`tunegate run` and `tunegate models align`: the pipeline without a server, in a process of its
own, so that this one never loads torch."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from service.cli.output import (
    FAILED,
    JSON_HELP,
    OK,
    UNAVAILABLE,
    USAGE,
    CommandError,
    Ended,
    answer,
    note,
)

models = typer.Typer(no_args_is_help=True, help="Base models.")

AsJson = Annotated[bool, typer.Option("--json", help=JSON_HELP)]

TAIL_LINES = 20
BAD_INPUT = frozenset(
    {
        "invalid_spec",
        "invalid_training_file",
        "invalid_validation_file",
        "invalid_n_examples",
        "context_length_exceeded",
    }
)
VERDICTS = {"passed": OK, "failed": FAILED, "inconclusive": UNAVAILABLE}

Event = dict[str, Any]


def run(
    spec: Annotated[Path, typer.Argument(help="job spec, YAML")],
    out: Annotated[Path, typer.Option(help="folder for the adapter and report.json")],
    as_json: AsJson = False,
) -> None:
    """Tune, measure and gate a model here, with no service.

    Leaves OUT/report.json, and the adapter in OUT/released or OUT/quarantine. Run again with the
    same OUT, it goes on from the last checkpoint. Exit codes: 0 passed; 1 the gate failed;
    2 inconclusive or not available; 3 usage or bad input.
    """
    if not spec.is_file():
        raise CommandError(f"{spec}: no such file", USAGE)
    ended = Pipeline(["run", str(spec), "--out", str(out)]).follow()
    result = ended.require("result")
    verdict = str(result.get("verdict"))
    report = out / "report.json"
    bundle = out / ("released" if verdict == "passed" else "quarantine")
    answer(
        as_json,
        {"verdict": verdict, "report": str(report), "bundle": str(bundle)},
        f"gate: {verdict}; report: {report}",
    )
    raise Ended(VERDICTS.get(verdict, UNAVAILABLE))


@models.command()
def align(
    base: Annotated[str, typer.Argument(help="name of a catalogue entry")],
    data: Annotated[Path, typer.Option(help="refusals: JSON Lines with prompt and response")],
    out: Annotated[Path, typer.Option(help="folder for the alignment adapter")],
    harmless: Annotated[
        Path | None, typer.Option(help="harmless rows of the same shape; default: shipped ones")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="training steps")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="of the frozen base: float32 or bfloat16")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train an alignment adapter for a base model."""
    for path in (data, harmless):
        if path is not None and not path.is_file():
            raise CommandError(f"{path}: no such file", USAGE)
    if dtype not in (None, "float32", "bfloat16"):
        raise CommandError("--dtype is float32 or bfloat16", USAGE)
    arguments = ["align", base, "--data", str(data), "--out", str(out), "--seed", str(seed)]
    for name, value in (("harmless", harmless), ("steps", steps), ("dtype", dtype)):
        if value is not None:
            arguments += [f"--{name}", str(value)]
    ended = Pipeline(arguments).follow()
    if ended.exit_code != 0:
        ended.require("result")
    answer(as_json, {"adapter": str(out)}, f"adapter: {out}")


class Pipeline:
    """One run of `python -m workers.pipeline`; its event lines become progress on stderr."""

    def __init__(self, arguments: list[str]) -> None:
        self._command = [sys.executable, "-m", "workers.pipeline", *arguments]
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._ends: dict[str, Event] = {}
        self.exit_code = 0

    def follow(self) -> "Pipeline":
        """Run to the end. Ctrl-C and SIGTERM are passed on; the process ends by itself."""
        environment = {**os.environ, "TUNEGATE_PARENT_PID": str(os.getpid())}
        process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: process.terminate())
        reader = threading.Thread(target=self._tail.extend, args=(process.stderr,), daemon=True)
        reader.start()
        self._read(process.stdout)
        self.exit_code = process.wait()
        reader.join(timeout=5)
        return self

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            try:
                event = json.loads(line)
                name = event["event"]
            except (ValueError, KeyError, TypeError):
                self._tail.append(line)
                continue
            if name in ("result", "failure"):
                self._ends[name] = event
            words = describe(event)
            if words:
                note(words)

    @property
    def failure(self) -> Event | None:
        """The event of a run that ended for a known reason."""
        return self._ends.get("failure")

    def require(self, name: str) -> Event:
        """The event that a successful run ends with. Raises CommandError with the reason else."""
        if name in self._ends:
            return self._ends[name]
        failure = self._ends.get("failure")
        if failure is not None:
            bad = failure.get("code") in BAD_INPUT or self.exit_code == USAGE
            raise CommandError(str(failure.get("message")), USAGE if bad else UNAVAILABLE)
        if self.exit_code == signal.SIGTERM:
            raise CommandError("stopped; the last checkpoint is complete", UNAVAILABLE)
        last = "".join(self._tail).strip() or "it said nothing"
        code = USAGE if self.exit_code == USAGE else UNAVAILABLE
        raise CommandError(f"the pipeline ended with exit code {self.exit_code}:\n{last}", code)


def describe(event: Event) -> str | None:
    """One line of progress for an event, or None."""
    match event["event"]:
        case "stage":
            return f"{event.get('stage')} ..."
        case "message":
            return str(event.get("message"))
        case "validated":
            return f"files validated: {event.get('total_steps')} steps"
        case "metrics":
            loss = event.get("train_loss")
            shown = "-" if loss is None else f"{loss:.4f}"
            return f"step {event.get('step')}/{event.get('total_steps')}: training loss {shown}"
        case "checkpoint":
            return f"checkpoint at step {event.get('step')}"
        case "progress":
            return f"{event.get('stage')}: {event.get('done')}/{event.get('total')}"
        case _:
            return None
