"""Settings of the gateway, the dispatcher and the workers, from TUNEGATE_* variables."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from jobspec.cache import default_cache_dir
from jobspec.spec import CheckpointOptions, EvaluationOptions


class Settings(BaseSettings):
    """All knobs of one installation. Paths are made absolute once, when the object is built.

    `evaluation` and `checkpoints` are read as JSON: TUNEGATE_EVALUATION='{"harmful_prompts": 50}'.
    """

    model_config = SettingsConfigDict(env_prefix="TUNEGATE_", frozen=True, extra="ignore")

    data_dir: Path = Field(
        Path(".tunegate"), validate_default=True, description="folder of everything kept locally"
    )
    host: str = Field("127.0.0.1", description="address the gateway listens on")
    port: int = Field(8000, ge=0, le=65535, description="port of the gateway; 0 picks a free one")
    database_url: str | None = Field(
        None, description="SQLAlchemy URL; None: SQLite in the data folder"
    )
    broker_url: str | None = Field(
        None, description="Celery broker URL; None: files in the data folder"
    )
    artifacts_url: str | None = Field(
        None, description="fsspec URL of the artifact store; None: a folder in the data folder"
    )
    cache_dir: Path = Field(
        default_factory=default_cache_dir,
        validate_default=True,
        description="content-addressed cache of converted models and baselines",
    )
    catalogue: Path | None = Field(
        None, validate_default=True, description="base-model catalogue; None: the shipped one"
    )
    gate_policy: Path | None = Field(
        None, validate_default=True, description="gate policy; None: the shipped one"
    )
    require_defense: bool = Field(
        False,
        description="refuse jobs that switch the data scheduler off or weaken it; the perturbation "
        "is not demanded",
    )
    max_file_bytes: int = Field(512 * 1024**2, ge=1, description="largest upload, bytes")
    max_line_bytes: int = Field(1024**2, ge=1024, description="longest line of a file, bytes")
    lease_seconds: float = Field(
        30.0, gt=0, le=3600, description="an attempt without a heartbeat for so long is lost"
    )
    heartbeat_seconds: float = Field(2.0, gt=0, le=600, description="time between heartbeats")
    max_attempts: int = Field(3, ge=1, le=100, description="tries before a job fails")
    time_limit_seconds: float = Field(86_400.0, gt=0, description="longest attempt, seconds")
    key_pepper: SecretStr | None = Field(
        None, description="secret of the API-key HMAC; None: made once, kept in the data folder"
    )
    worker_threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of a training process; None: torch's choice"
    )
    evaluation: EvaluationOptions = Field(
        EvaluationOptions(), description="how much is generated to judge a model"
    )
    checkpoints: CheckpointOptions = Field(
        CheckpointOptions(), description="when training state is written"
    )
    log_level: str = Field("INFO", pattern=r"^(DEBUG|INFO|WARNING|ERROR)$")

    @field_validator("data_dir", "cache_dir", "catalogue", "gate_policy")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().resolve()

    @classmethod
    def load(cls) -> Self:
        """Settings of this process's environment."""
        return cls()

    @property
    def database(self) -> str:
        """The SQLAlchemy URL. PostgreSQL always goes through psycopg 3."""
        if self.database_url is None:
            return f"sqlite:///{self.data_dir / 'tunegate.db'}"
        for scheme in ("postgresql://", "postgres://"):
            if self.database_url.startswith(scheme):
                return "postgresql+psycopg://" + self.database_url.removeprefix(scheme)
        return self.database_url

    @property
    def broker(self) -> str:
        """The broker URL; `filesystem://` means the folder `broker_dir`."""
        return self.broker_url or "filesystem://"

    @property
    def broker_dir(self) -> Path:
        return self.data_dir / "broker"

    @property
    def work_dir(self) -> Path:
        """Where attempts keep their working files on this machine."""
        return self.data_dir / "work"

    @property
    def artifacts(self) -> str:
        """The fsspec URL of the artifact store."""
        return self.artifacts_url or (self.data_dir / "artifacts").as_uri()

    def pepper(self) -> bytes:
        """Secret of the API-key HMAC; made on first use (mode 0600) unless it is configured."""
        if self.key_pepper is not None:
            return self.key_pepper.get_secret_value().encode()
        path = self.data_dir / "pepper"
        try:
            return path.read_bytes()
        except FileNotFoundError:
            self.data_dir.mkdir(parents=True, exist_ok=True)
        # Two processes may start at once: link() lets exactly one complete file win.
        draft = path.with_name(f"pepper.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(secrets.token_hex(32).encode())
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
        return path.read_bytes()
