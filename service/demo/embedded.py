"""An embedded service for the length of the demo, in a child process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from service.cli.output import UNAVAILABLE, CommandError
from service.cli.processes import dies_with_parent

STOP_SECONDS = 60
# Enough prompts for the demo's policy, few enough for two CPU cores; the table says how many.
EVALUATION = {
    "harmful_prompts": 112,
    "safe_lookalikes": 30,
    "benign_prompts": 10,
    "open_ended_samples": 3,
}
# The shipped policy asks for 200 prompts. Fewer make wider intervals; the limits stay.
MINIMUM_PROMPTS = 100
KEPT_SETTINGS = ("TUNEGATE_CACHE_DIR", "TUNEGATE_WORKER_THREADS")


class Running(NamedTuple):
    """Where the service answers and the key that opens it."""

    url: str
    key: str


@contextmanager
def embedded_service(data_dir: Path) -> Iterator[Running]:
    """Run `tunegate up` on a free port in `data_dir`; stopped when the block ends.

    The operator's own settings (database, policy, catalogue) are left out, so that the demo
    touches nothing of theirs and measures what it says. Raises CommandError with the service's
    last words if it does not start.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TUNEGATE_") or name in KEPT_SETTINGS
    } | {
        "TUNEGATE_DATA_DIR": str(data_dir),
        "TUNEGATE_EVALUATION": json.dumps(EVALUATION),
        "TUNEGATE_GATE_POLICY": str(_write_policy(data_dir)),
    }
    command = [sys.executable, "-m", "service.cli.main"]
    with tempfile.TemporaryFile("w+") as words:
        service = subprocess.Popen(
            [*command, "up", "--json", "--port", "0"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
        try:
            assert service.stdout is not None
            line = service.stdout.readline()
            if not line:
                words.seek(0)
                reason = words.read()[-1000:].strip() or "no reason given"
                raise CommandError(f"the embedded service did not start: {reason}", UNAVAILABLE)
            key = subprocess.run(
                [*command, "keys", "create", "--organization", "demo", "--json"],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            yield Running(json.loads(line)["url"], json.loads(key.stdout)["key"])
        finally:
            service.terminate()
            try:
                service.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()


def _write_policy(data_dir: Path) -> Path:
    """The shipped policy for fewer prompts, as a file that the service reads."""
    from evaluators.gate import default_policy

    data_dir.mkdir(parents=True, exist_ok=True)
    path = data_dir / "demo-policy.json"
    policy = default_policy().model_copy(update={"minimum_prompts": MINIMUM_PROMPTS})
    path.write_text(policy.model_dump_json(indent=2), "utf-8")
    return path
