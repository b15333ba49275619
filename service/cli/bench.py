"""`tunegate bench`: the measurements of the source tree, in a process of their own."""

import signal
import subprocess
import sys
from importlib.util import find_spec

import typer

from service.cli.output import UNAVAILABLE, CommandError, Ended

app = typer.Typer(no_args_is_help=True, help="Benchmarks; they need the source tree.")

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASSED_ON)
def defenses(context: typer.Context) -> None:
    """Attack a model under every defense and compare; see `tunegate bench defenses --help`."""
    if find_spec("benchmarks") is None:
        raise CommandError(
            "the benchmarks are not installed with the package: run this command from a checkout "
            "of the source",
            UNAVAILABLE,
        )
    raise Ended(_follow([sys.executable, "-m", "benchmarks.defenses", *context.args]))


def _follow(command: list[str]) -> int:
    """Run a program on this terminal. Ctrl-C reaches it by itself, SIGTERM is passed on; it ends
    by itself, and what it left is complete."""
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()
