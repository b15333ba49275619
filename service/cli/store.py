"""Settings and a database session for commands that work on the installation directly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from service.cli.output import UNAVAILABLE, USAGE, CommandError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from service.settings import Settings


def load_settings() -> "Settings":
    """The settings of the environment. Raises CommandError naming the variable that is wrong."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from service.settings import Settings

    try:
        return Settings.load()
    except ValidationError as error:
        problems = "; ".join(
            f"TUNEGATE_{'.'.join(str(part) for part in item['loc']).upper()}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)
        )
        raise CommandError(f"settings: {problems}", USAGE) from None
    except SettingsError as error:
        raise CommandError(f"settings: {error}", USAGE) from None


@contextmanager
def open_session(settings: "Settings") -> Iterator["Session"]:
    """One transaction on a database that is at the newest migration."""
    from sqlalchemy.exc import SQLAlchemyError

    from service.store.database import (
        SchemaOutdated,
        check_schema,
        create_engine,
        session_factory,
        transaction,
    )

    engine = create_engine(settings)
    try:
        with transaction(session_factory(engine)) as session:
            check_schema(session)
            yield session
    except SchemaOutdated as error:
        raise CommandError(str(error), UNAVAILABLE) from None
    except SQLAlchemyError as error:
        raise CommandError(
            f"the database cannot be used ({type(error).__name__})", UNAVAILABLE
        ) from None
    finally:
        engine.dispose()


def upgrade_database(settings: "Settings") -> None:
    """Bring the schema to the newest migration."""
    from sqlalchemy.exc import SQLAlchemyError

    from service.store.database import upgrade

    try:
        upgrade(settings)
    except (SQLAlchemyError, OSError) as error:
        raise CommandError(
            f"the database cannot be upgraded ({type(error).__name__})", UNAVAILABLE
        ) from None
