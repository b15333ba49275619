"""`tunegate keys`: API keys, directly in the database; works while the service runs."""

from typing import Annotated

import typer

from service.cli.output import JSON_HELP, USAGE, CommandError, answer, table
from service.cli.store import load_settings, open_session

app = typer.Typer(no_args_is_help=True, help="API keys of organizations.")

AsJson = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


@app.command()
def create(
    organization: Annotated[str, typer.Option(help="name; created when it does not exist")],
    role: Annotated[str, typer.Option(help="owner, admin, member, auditor or ci")] = "member",
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once and cannot be shown again."""
    from service.organizations.service import InvalidKeyRequest, create_key

    settings = load_settings()
    try:
        with open_session(settings) as session:
            made = create_key(session, settings, organization, role)
    except InvalidKeyRequest as error:
        raise CommandError(str(error), USAGE) from None
    answer(as_json, made, made["key"])


@app.command("list")
def list_(
    organization: Annotated[str | None, typer.Option(help="only this one")] = None,
    as_json: AsJson = False,
) -> None:
    """Keys with role, last use and state, without their secret part."""
    from service.organizations.service import list_keys

    with open_session(load_settings()) as session:
        keys = list_keys(session, organization)
    if as_json:
        answer(True, keys, "")
    else:
        table(
            ["id", "prefix", "organization", "role", "created_at", "last_used_at", "revoked_at"],
            keys,
        )


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="id as `tunegate keys list` shows it")],
    as_json: AsJson = False,
) -> None:
    """End a key at once."""
    from service.organizations.service import InvalidKeyRequest, revoke_key

    try:
        with open_session(load_settings()) as session:
            revoke_key(session, key_id)
    except InvalidKeyRequest as error:
        raise CommandError(str(error), USAGE) from None
    answer(as_json, {"id": key_id, "revoked": True}, f"{key_id} revoked")
