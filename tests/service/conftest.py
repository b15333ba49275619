"""A real gateway on a free port, on SQLite and on PostgreSQL, and tenants inside it."""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import httpx2
import openai
import psycopg
import pytest
import uvicorn
from openai import OpenAI
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from service.app import create_app
from service.kit.artifacts import ArtifactStore
from service.organizations.service import create_key
from service.settings import Settings
from service.store.database import (
    SessionFactory,
    create_engine,
    session_factory,
    transaction,
    upgrade,
)
from service.store.models import File, Organization

MAX_FILE_BYTES = 12 * 1024 * 1024


@dataclass
class Database:
    """A migrated database, reached directly."""

    settings: Settings
    engine: Engine
    factory: SessionFactory

    def organization(self) -> str:
        """A new organisation's id."""
        with transaction(self.factory) as session:
            name = f"org-{secrets.token_hex(6)}"
            create_key(session, self.settings, name, "admin")
            return session.scalars(select(Organization.id).where(Organization.name == name)).one()


@dataclass
class Installation:
    """A gateway that answers at `url`, and its database."""

    url: str
    database: Database
    artifacts: ArtifactStore

    def traces(self) -> tuple[set[str], set[str]]:
        """Everything that is stored: artifact keys, ids of files."""
        with transaction(self.database.factory, read_only=True) as session:
            rows = set(session.scalars(select(File.id)))
        return set(self.artifacts.list()), rows


@dataclass
class Tenant:
    """An organisation with an admin key."""

    installation: Installation
    organization: str
    key: str

    @cached_property
    def client(self) -> OpenAI:
        """The official client, strict about answers; it repeats nothing."""
        return self.client_with()

    @cached_property
    def lenient(self) -> OpenAI:
        """A client for what the strict one rejects though OpenAI documents it: files with purpose
        evals, paused jobs, moderation events."""
        return self.client_with(_strict_response_validation=False)

    def client_with(self, **options: Any) -> OpenAI:
        chosen: dict[str, Any] = {
            "base_url": f"{self.installation.url}/v1",
            "api_key": self.key,
            "max_retries": 0,
            "_strict_response_validation": True,
            # Certificates are no matter on the loopback, and reading them takes time.
            "http_client": openai.DefaultHttpxClient(verify=False),
            **options,
        }
        return OpenAI(**chosen)

    @cached_property
    def http(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.installation.url,
            headers={"authorization": f"Bearer {self.key}"},
            verify=False,
        )

    def key_with(self, role: str) -> str:
        """Another key of this organisation."""
        with self.transaction() as session:
            settings = self.installation.database.settings
            return create_key(session, settings, self.organization, role)["key"]

    def transaction(self) -> Any:
        return transaction(self.installation.database.factory)

    def upload(self, content: bytes | None = None, name: str = "rows.jsonl") -> str:
        """The id of a new fine-tune file."""
        data = chat_rows() if content is None else content
        return self.client.files.create(file=(name, data), purpose="fine-tune").id

    def job(self, **fields: Any) -> str:
        """The id of a new job."""
        asked: dict[str, Any] = {"model": base_model(self), **fields}
        if "training_file" not in asked:
            asked["training_file"] = self.upload()
        return self.client.fine_tuning.jobs.create(**asked).id


def base_model(tenant: Tenant) -> str:
    return tenant.client.models.list().data[0].id


def chat_row(index: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"Say number {index}"},
            {"role": "assistant", "content": f"Number {index}"},
        ]
    }


def chat_rows(count: int = 12) -> bytes:
    return b"".join(json.dumps(chat_row(index)).encode() + b"\n" for index in range(count))


@pytest.fixture(scope="session")
def rows() -> Callable[..., bytes]:
    """Makes the content of a sound training file."""
    return chat_rows


def _fresh_postgresql(url: str) -> str:
    """A new database on the server of `url`; a server that is just starting is waited for."""
    name = f"tunegate_{secrets.token_hex(6)}"
    plain = url.replace("postgresql+psycopg://", "postgresql://")
    for attempt in range(60):
        try:
            with psycopg.connect(plain, autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{name}"')
            break
        except psycopg.OperationalError:
            if attempt == 59:
                raise
            time.sleep(0.5)
    base, _, query = plain.partition("?")
    return f"{base.rpartition('/')[0]}/{name}" + (f"?{query}" if query else "")


def _migrated(folder: Path, url: str | None) -> Database:
    settings = Settings(data_dir=folder, database_url=url, max_file_bytes=MAX_FILE_BYTES)
    upgrade(settings)
    engine = create_engine(settings)
    return Database(settings, engine, session_factory(engine))


@pytest.fixture(scope="session")
def sqlite_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    made = _migrated(tmp_path_factory.mktemp("sqlite"), None)
    yield made
    made.engine.dispose()


@pytest.fixture(scope="session")
def postgresql_database(
    postgres_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    made = _migrated(tmp_path_factory.mktemp("postgresql"), _fresh_postgresql(postgres_url))
    yield made
    made.engine.dispose()


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Database:
    """A migrated database of its own for this session, of both kinds."""
    return cast(Database, request.getfixturevalue(f"{request.param}_database"))


def serve(settings: Settings) -> tuple[str, Callable[[], None]]:
    """Start a gateway in a thread; returns its URL and a function that stops it."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(settings), log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    assert server.started

    def stop() -> None:
        server.should_exit = True
        thread.join()
        listener.close()

    return f"http://127.0.0.1:{listener.getsockname()[1]}", stop


def _running(database: Database) -> Iterator[Installation]:
    url, stop = serve(database.settings)
    yield Installation(url, database, ArtifactStore.from_url(database.settings.artifacts))
    stop()


@pytest.fixture(scope="session")
def installation(database: Database) -> Iterator[Installation]:
    """A gateway on each kind of database."""
    yield from _running(database)


@pytest.fixture(scope="session")
def sqlite_installation(sqlite_database: Database) -> Iterator[Installation]:
    yield from _running(sqlite_database)


def _tenant(installation: Installation) -> Tenant:
    name = f"org-{secrets.token_hex(6)}"
    with transaction(installation.database.factory) as session:
        key = create_key(session, installation.database.settings, name, "admin")["key"]
    return Tenant(installation, name, key)


@pytest.fixture
def tenant(installation: Installation) -> Tenant:
    return _tenant(installation)


@pytest.fixture
def local(sqlite_installation: Installation) -> Tenant:
    """For what never reaches the database: a tenant on SQLite only."""
    return _tenant(sqlite_installation)


@pytest.fixture
def stranger(installation: Installation) -> Tenant:
    """Another organisation on the same gateway."""
    return _tenant(installation)


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    with transaction(database.factory) as opened:
        yield opened


@pytest.fixture
def gateway_with(tmp_path: Path) -> Iterator[Callable[..., Tenant]]:
    """Makes a tenant of a separate gateway with other settings, on SQLite."""
    stops: list[Callable[[], None]] = []

    def make(**settings: Any) -> Tenant:
        chosen = Settings(data_dir=tmp_path / secrets.token_hex(4), **settings)
        upgrade(chosen)
        engine = create_engine(chosen)
        url, stop = serve(chosen)
        stops.extend([stop, engine.dispose])
        found = Database(chosen, engine, session_factory(engine))
        return _tenant(Installation(url, found, ArtifactStore.from_url(chosen.artifacts)))

    yield make
    for stop in stops:
        stop()
