"""An embedded service for the length of the demo, in a child process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from service.cli.output import UNAVAILABLE, CommandError
from service.cli.processes import dies_with_parent

STOP_SECONDS = 60


class Running(NamedTuple):
    """Where the service answers and the key that opens it."""

    url: str
    key: str


@contextmanager
def embedded_service(data_dir: Path) -> Iterator[Running]:
    """Run `tunegate up` on a free port with a new data folder; stopped when the block ends."""
    command = [sys.executable, "-m", "service.cli.main", "up", "--json", "--port", "0"]
    service = subprocess.Popen(
        [*command, "--data-dir", str(data_dir)],
        env=os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=dies_with_parent(),
    )
    try:
        assert service.stdout is not None
        line = service.stdout.readline()
        if not line:
            raise CommandError(
                f"the embedded service did not start; its logs are in {data_dir / 'logs'}",
                UNAVAILABLE,
            )
        ready = json.loads(line)
        yield Running(ready["url"], ready["key"])
    finally:
        service.terminate()
        try:
            service.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()
