"""The database: migrations, transactions, pages."""

import subprocess
import sys
import threading
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, inspect, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import QueuePool

from service.fine_tuning.lifecycle import VALIDATING_FILES
from service.fine_tuning.repository import JobRepository, append_event
from service.kit.errors import ApiError
from service.kit.ids import new_id
from service.kit.pagination import paginate
from service.settings import Settings
from service.store.database import (
    HEAD_REVISION,
    MIGRATIONS,
    SchemaOutdated,
    check_schema,
    create_engine,
    session_factory,
    transaction,
    upgrade,
)
from service.store.models import Base, Event, Job, Organization


def new_job(organization_id: str, **fields: Any) -> Job:
    return Job(
        **{
            "id": new_id("ftjob"),
            "organization_id": organization_id,
            "status": VALIDATING_FILES,
            "stage": "queued",
            "model": "m",
            "training_file_id": "file-x",
            "seed": 1,
            "method": {"type": "supervised"},
            "hyperparameters": {},
            "defense": {},
            "policy": {"version": 1},
            "attempt": 1,
            "created_at": 1,
            **fields,
        }
    )


def test_the_migrated_schema_is_the_models_schema(database: Any) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_the_constant_names_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD_REVISION


def test_migrations_can_be_taken_back_and_run_again(tmp_path: Any) -> None:
    chosen = Settings(data_dir=tmp_path)
    upgrade(chosen)
    engine = create_engine(chosen)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["engine"] = engine
    command.downgrade(config, "base")
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    upgrade(chosen)
    with transaction(session_factory(engine), read_only=True) as session:
        check_schema(session)
    engine.dispose()


def test_upgrades_at_the_same_time_all_succeed(tmp_path: Any) -> None:
    code = "from service.settings import Settings; from service.store.database import upgrade; "
    code += "upgrade(Settings.load())"
    started = [
        subprocess.Popen([sys.executable, "-c", code], env={"TUNEGATE_DATA_DIR": str(tmp_path)})
        for _ in range(3)
    ]
    assert [process.wait() for process in started] == [0, 0, 0]


def test_a_database_without_tables_is_outdated(tmp_path: Any) -> None:
    engine = create_engine(Settings(data_dir=tmp_path))
    with (
        transaction(session_factory(engine), read_only=True) as session,
        pytest.raises(SchemaOutdated, match="db upgrade"),
    ):
        check_schema(session)
    engine.dispose()


def test_sqlite_runs_with_write_ahead_log_timeout_and_foreign_keys(tmp_path: Any) -> None:
    engine = create_engine(Settings(data_dir=tmp_path))
    with engine.connect() as connection:
        found = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        ]
    assert found == ["wal", 1, 10000, 1]
    engine.dispose()


def test_an_error_rolls_the_whole_transaction_back(database: Any) -> None:
    organization = database.organization()

    def write_and_fail() -> None:
        with transaction(database.factory) as session:
            JobRepository(session, organization).add(new_job(organization))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_and_fail()
    with transaction(database.factory, read_only=True) as session:
        assert session.scalars(JobRepository(session, organization).readable()).all() == []


def test_a_read_only_transaction_refuses_changed_objects(database: Any) -> None:
    database.organization()
    with (
        pytest.raises(RuntimeError, match="read-only"),
        transaction(database.factory, read_only=True) as session,
    ):
        session.scalars(select(Organization).limit(1)).one().name = "changed"


def test_writers_at_the_same_time_all_get_through(database: Any) -> None:
    organization = database.organization()
    with transaction(database.factory) as session:
        job = new_job(organization)
        JobRepository(session, organization).add(job)
    errors: list[Exception] = []

    def write() -> None:
        try:
            for _ in range(10):
                with transaction(database.factory) as session:
                    # A read first: SQLite's deferred transactions fail here.
                    session.scalar(select(func.count()).select_from(Event))
                    append_event(session, job.id, "info", "x")
        except Exception as error:
            errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert errors == []
    with transaction(database.factory, read_only=True) as session:
        found = session.scalars(
            JobRepository(session, None).events(job.id).order_by(Event.sequence)
        ).all()
    assert len(found) == 80


def test_exceptions_of_the_database_show_no_values(database: Any) -> None:
    def write_twice() -> None:
        with transaction(database.factory) as session:
            for organization_id in ("org-x", "org-y"):
                session.add(Organization(id=organization_id, name="secret-name", created_at=1))
                session.flush()

    with pytest.raises(IntegrityError) as caught:
        write_twice()
    assert "secret-name" not in str(caught.value).partition("[SQL")[2]


@pytest.fixture(scope="module")
def many_jobs(database: Any) -> tuple[str, list[str]]:
    """An organisation with 23 jobs created in the same second, oldest first."""
    organization = database.organization()
    with transaction(database.factory) as session:
        jobs = [new_job(organization) for _ in range(23)]
        for job in jobs:
            JobRepository(session, organization).add(job)
    return organization, [job.id for job in jobs]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(limit=st.integers(1, 30), newest_first=st.booleans())
def test_walking_the_pages_gives_every_item_once_in_order(
    database: Any, many_jobs: Any, limit: int, newest_first: bool
) -> None:
    organization, ids = many_jobs
    walked: list[str] = []
    after = None
    while True:
        with transaction(database.factory, read_only=True) as session:
            statement = JobRepository(session, organization).readable()
            page = paginate(
                session, statement, Job, after=after, limit=limit, newest_first=newest_first
            )
        assert len(page.data) <= limit
        walked += [job.id for job in page.data]
        if not page.has_more:
            break
        after = walked[-1]
    assert walked == (ids[::-1] if newest_first else ids)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(max_size=30).filter(lambda text: "\0" not in text and text.isprintable()))
def test_no_text_but_a_known_id_is_a_cursor(database: Any, many_jobs: Any, after: str) -> None:
    with transaction(database.factory, read_only=True) as session:
        statement = JobRepository(session, many_jobs[0]).readable()
        with pytest.raises(ApiError) as caught:
            paginate(session, statement, Job, after=after, limit=5)
    assert caught.value.code == "invalid_cursor"


def test_a_job_of_another_organisation_is_not_readable(database: Any) -> None:
    mine, theirs = database.organization(), database.organization()
    with transaction(database.factory) as session:
        job = new_job(mine)
        JobRepository(session, mine).add(job)
        assert JobRepository(session, mine).get(job.id) is job
        assert JobRepository(session, theirs).get(job.id) is None
        assert JobRepository(session, None).get(job.id) is job


def test_workers_and_dispatchers_hold_few_connections() -> None:
    settings = Settings(database_url="postgresql://nowhere/x")
    pools = [create_engine(settings, small_pool=small).pool for small in (False, True)]
    assert [pool.size() for pool in pools if isinstance(pool, QueuePool)] == [20, 5]
