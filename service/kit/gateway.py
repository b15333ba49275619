"""What every request needs: settings, database, artifact store, catalogue, gate policy."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, cast

from fastapi import Depends, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from evaluators.gate import Policy, default_policy, parse_policy
from jobspec.catalogue import Catalogue, load_catalogue
from service.kit.artifacts import ArtifactStore
from service.settings import Settings
from service.store.database import create_engine, session_factory, transaction

logger = logging.getLogger(__name__)


class Gateway:
    """The resources of one gateway process, made once by `create_app`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine: Engine = create_engine(settings)
        self.artifacts = ArtifactStore.from_url(settings.artifacts)
        self.catalogue: Catalogue = load_catalogue(settings.catalogue)
        self.policy: Policy = (
            default_policy()
            if settings.gate_policy is None
            else parse_policy(settings.gate_policy.read_text("utf-8"))
        )
        self.pepper = settings.pepper()
        self._sessions = session_factory(self.engine)

    def writing(self) -> AbstractContextManager[Session]:
        """The one transaction of a request that changes something.

        A context manager and not a FastAPI dependency: a dependency would hold SQLite's write
        lock while its request waits for a thread, and the requests that hold all threads would
        wait for that lock.
        """
        return transaction(self._sessions)

    def reading(self) -> AbstractContextManager[Session]:
        """The one transaction of a request that only looks."""
        return transaction(self._sessions, read_only=True)

    def discard(self, key: str) -> None:
        """Remove stored bytes that no row names any more. A failure costs space and is logged."""
        try:
            self.artifacts.delete(key)
        except OSError as error:
            logger.error("artifact store: %s was not removed", key, exc_info=error)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Give the database connections back at the end."""
        try:
            yield
        finally:
            self.engine.dispose()


def get_gateway(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


GatewayDep = Annotated[Gateway, Depends(get_gateway)]
