"""The `tunegate` command. Everything heavy is imported by the command that needs it."""

import json
import sys
from typing import Annotated

import typer

from service.cli import (
    analyze,
    audit,
    bench,
    calibrate,
    evaluators,
    gate,
    jobs,
    keys,
    perturbation,
    pipeline,
    retune,
    scheduler,
    up,
)
from service.cli.output import (
    EXIT_CODES,
    JSON_HELP,
    USAGE,
    CommandError,
    Ended,
    answer,
)
from service.cli.store import load_settings, upgrade_database
from service.demo.command import demo

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tuning that is defended, measured and gated.",
    epilog=EXIT_CODES,
)
evaluators.app.command()(calibrate.calibrate)
database = typer.Typer(no_args_is_help=True, help="The database.")

AsJson = Annotated[bool, typer.Option("--json", help=JSON_HELP)]

app.command()(up.up)
app.command()(up.serve)
app.command()(up.worker)
app.command()(pipeline.run)
app.command()(analyze.analyze)
app.command()(retune.retune)
app.command()(demo)
app.add_typer(pipeline.models, name="models")
app.add_typer(perturbation.app, name="perturbation")
app.add_typer(scheduler.app, name="scheduler")
app.add_typer(bench.app, name="bench")
app.add_typer(gate.app, name="gate")
app.add_typer(evaluators.app, name="evaluators")
app.add_typer(audit.app, name="audit")
app.add_typer(jobs.app, name="jobs")
app.add_typer(keys.app, name="keys")
app.add_typer(database, name="db")


@database.command()
def upgrade(as_json: AsJson = False) -> None:
    """Bring the database to the newest migration; makes it when there is none."""
    from service.store.database import HEAD_REVISION

    upgrade_database(load_settings())
    answer(as_json, {"revision": HEAD_REVISION}, f"database at migration {HEAD_REVISION}")


@app.command()
def version(as_json: AsJson = False) -> None:
    """The version of this installation."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        number = installed("tunegate")
    except PackageNotFoundError:
        number = "unknown (not installed as a package)"
    answer(as_json, {"version": number}, number)


def main() -> None:
    """Entry point: errors become one line on stderr (JSON with --json) and an exit code."""
    try:
        app(prog_name="tunegate")
    except Ended as ending:
        sys.exit(ending.exit_code)
    except CommandError as error:
        if "--json" in sys.argv[1:]:
            print(json.dumps({"error": {"message": str(error)}}), file=sys.stderr)
        else:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as ending:
        # The parser ends with 2 after a usage error; here 2 means something else.
        sys.exit(USAGE if ending.code == 2 else ending.code)


if __name__ == "__main__":
    main()
