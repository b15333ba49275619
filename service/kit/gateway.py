"""What every request needs: settings, database, artifact store, catalogue, gate policy."""

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, cast

from fastapi import Depends, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from evaluators.gate import Policy, default_policy, parse_policy
from jobspec.catalogue import Catalogue, load_catalogue
from jobspec.judging import EmbeddedJudge, JudgeOptions
from jobspec.spec import EvaluationOptions
from service.kit.artifacts import ArtifactStore
from service.settings import Settings
from service.store.database import create_engine, session_factory, transaction

logger = logging.getLogger(__name__)

# Readiness is asked every few seconds by every balancer; a remote store charges for each write.
PROBE_SECONDS = 10.0


class ArtifactProbe:
    """Whether the artifact store can be written; asked anew when the answer is too old."""

    def __init__(self, artifacts: ArtifactStore, fresh_seconds: float = PROBE_SECONDS) -> None:
        self._artifacts = artifacts
        self._fresh_seconds = fresh_seconds
        self._asked_at: float | None = None
        self._writable = False

    def writable(self) -> bool:
        """The answer; a failure is logged when it is found."""
        moment = time.monotonic()
        if self._asked_at is None or moment - self._asked_at >= self._fresh_seconds:
            try:
                self._artifacts.check_writable()
                self._writable = True
            except Exception as error:
                # A remote store raises errors of its own kinds.
                logger.error("the artifact store cannot be written", exc_info=error)
                self._writable = False
            self._asked_at = moment
        return self._writable


class Gateway:
    """The resources of one gateway process, made once by `create_app`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine: Engine = create_engine(settings)
        self.artifacts = ArtifactStore.from_url(settings.artifacts)
        self.catalogue: Catalogue = load_catalogue(settings.catalogue)
        self.policy: Policy = (
            _shipped_policy(settings.evaluation)
            if settings.gate_policy is None
            else parse_policy(settings.gate_policy.read_text("utf-8"))
        )
        self.pepper = settings.pepper()
        self.artifact_probe = ArtifactProbe(self.artifacts)
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
        except Exception as error:
            # A remote store raises errors of its own kinds.
            logger.error("artifact store: %s was not removed", key, exc_info=error)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Give the database connections back at the end."""
        try:
            yield
        finally:
            self.engine.dispose()


def _shipped_policy(evaluation: EvaluationOptions) -> Policy:
    """The one for the judge that will judge: a protocol brings its own where `judge` is left at the
    default."""
    judge: JudgeOptions = evaluation.judge
    if evaluation.protocol is not None and judge == EmbeddedJudge():
        from evaluators.protocols import PROTOCOLS

        judge = PROTOCOLS[evaluation.protocol].judge
    return default_policy(judge.name)


def get_gateway(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


GatewayDep = Annotated[Gateway, Depends(get_gateway)]
