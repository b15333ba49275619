"""The command as a user types it, and a base model small enough for tests."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "service.cli.main"]


class Cli:
    """Runs `tunegate` in processes of its own, with a data folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "data"
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TUNEGATE_", "OPENAI_"))
        } | {
            "TUNEGATE_DATA_DIR": str(self.data_dir),
            "TUNEGATE_CACHE_DIR": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=REPOSITORY,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=REPOSITORY,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


@pytest.fixture
def cli(tmp_path: Path) -> Any:
    made = Cli(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


@pytest.fixture
def eventually() -> Callable[..., Any]:
    def wait(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.1)
        raise AssertionError("waited in vain")

    return wait


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with path.open("w") as lines:
        for index in range(16):
            messages = [
                {"role": "user", "content": f"Say number {index}"},
                {"role": "assistant", "content": f"Number {index}"},
            ]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return path
