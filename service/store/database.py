"""Engine, sessions and schema of the gateway's database (SQLite or PostgreSQL)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy import create_engine as create_sqlalchemy_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from service.settings import Settings

# The newest migration, so that readiness needs no Alembic; a test holds the two equal.
HEAD_REVISION = "0003"
MIGRATIONS = Path(__file__).parent / "migrations"

# Values of rows never appear in exceptions, which end up in logs.
_POOL: dict[str, Any] = {"pool_size": 20, "max_overflow": 30, "hide_parameters": True}
# Workers and dispatchers hold few connections each, but there may be many of them on one server.
_SMALL_POOL: dict[str, Any] = _POOL | {"pool_size": 5, "max_overflow": 5}

SessionFactory = sessionmaker[Session]


class SchemaOutdated(RuntimeError):
    """The database's schema is not the one of this version; run `tunegate db upgrade`."""


def create_engine(settings: Settings, *, small_pool: bool = False) -> Engine:
    """The engine of `settings.database`; `small_pool` (PostgreSQL): for other than the gateway.

    SQLite: WAL, a busy timeout of 10 s, and writers that take the lock when they begin, since a
    deferred transaction that turns into a writer fails at once whatever the timeout.
    """
    url = make_url(settings.database)
    if url.get_backend_name() != "sqlite":
        pool = _SMALL_POOL if small_pool else _POOL
        return create_sqlalchemy_engine(url, pool_pre_ping=True, **pool)
    if url.database and url.database != ":memory:":
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_sqlalchemy_engine(url, **_POOL)

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        # The driver's own BEGIN would be a deferred one.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "busy_timeout=10000",
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def session_factory(engine: Engine) -> SessionFactory:
    """Sessions whose objects stay readable after the commit."""
    return sessionmaker(engine, expire_on_commit=False)


@contextmanager
def transaction(factory: SessionFactory, *, read_only: bool = False) -> Iterator[Session]:
    """One transaction: committed at the end, rolled back on any error.

    A read-only one takes no write lock on SQLite and ends in a rollback; changing an object in it
    raises RuntimeError.
    """
    with factory() as session:
        if read_only:
            session.connection(execution_options={"read_only": True})
            yield session
            if session.new or session.dirty or session.deleted:
                raise RuntimeError("a read-only transaction changed objects")
            # Detached first, as a rollback would empty the objects that the caller still reads.
            session.expunge_all()
            session.rollback()
        else:
            with session.begin():
                yield session


def upgrade(settings: Settings) -> None:
    """Bring the schema to the newest version. Safe to run again, and by several processes."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    engine = create_engine(settings)
    try:
        config.attributes["engine"] = engine
        command.upgrade(config, "head")
    finally:
        engine.dispose()


def check_schema(session: Session) -> None:
    """Raises SchemaOutdated unless the database is at the newest migration."""
    try:
        found = session.execute(text("SELECT version_num FROM alembic_version")).scalar()
    except SQLAlchemyError as error:
        raise SchemaOutdated("the database has no tables yet; run `tunegate db upgrade`") from error
    if found != HEAD_REVISION:
        raise SchemaOutdated(
            f"the database is at migration {found}, this version needs {HEAD_REVISION}; "
            "run `tunegate db upgrade`"
        )
