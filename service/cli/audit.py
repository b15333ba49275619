"""`tunegate audit`: the hash chain of the audit log, checked directly in the database."""

from typing import Annotated

import typer

from service.cli.output import FAILED, JSON_HELP, USAGE, CommandError, Ended, answer
from service.cli.store import load_settings, open_session

app = typer.Typer(no_args_is_help=True, help="The audit log of organizations.")


@app.callback()
def group() -> None:
    """Keeps `verify` a command of its own while it is the only one."""


@app.command()
def verify(
    organization: Annotated[str, typer.Option(help="name of the organization")],
    head: Annotated[
        str | None, typer.Option(help="hash noted earlier; the chain must still contain it")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Walk the chain: exit 0 intact, 1 changed or cut. Note the printed head for the next time."""
    from service.audit.service import verify_chain
    from service.organizations.repository import organization_by_name

    with open_session(load_settings()) as session:
        owner = organization_by_name(session, organization)
        if owner is None:
            raise CommandError(f"no organization is called {organization}", USAGE)
        check = verify_chain(session, owner.id, head)
    words = (
        f"{check.entries} entries, intact, head {check.head}"
        if check.intact
        else f"broken at entry {check.broken_at}: {check.problem}"
    )
    answer(as_json, {**check._asdict(), "intact": check.intact}, words)
    if not check.intact:
        raise Ended(FAILED)
