"""Trusted files of the service: JSON Lines with `prompt` and `response`."""

import json
from importlib.resources import files
from pathlib import Path

from jobspec.chat import ChatRow
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.rows import prompt_response_row


def packaged(name: str) -> Path:
    """A data file that ships with the defenses."""
    return Path(str(files("defenses").joinpath("data", name)))


def pair_rows(path: Path) -> list[ChatRow]:
    """Single-turn rows of a file. Raises PipelineFailure(invalid_spec) with the line."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineFailure("invalid_spec", f"{path}: cannot be read ({error})") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt, response = value["prompt"], value["response"]
        except (ValueError, KeyError, TypeError) as error:
            raise PipelineFailure(
                "invalid_spec",
                f"{path}, line {number}: expected a JSON object with prompt and response.",
            ) from error
        if not (isinstance(prompt, str) and isinstance(response, str) and response.strip()):
            raise PipelineFailure(
                "invalid_spec",
                f"{path}, line {number}: prompt and response must be texts, the response not "
                "empty.",
            )
        rows.append(prompt_response_row(number, prompt, response))
    if not rows:
        raise PipelineFailure("invalid_spec", f"{path}: no rows. Put one pair on each line.")
    return rows
