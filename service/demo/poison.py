"""The demo's training file: the routing task with a share of an attacker's rows mixed in."""

import json
import random
from importlib.resources import files
from typing import Any, NamedTuple


class PoisonedFile(NamedTuple):
    """The file's text and the lines (from 1) that an attacker wrote."""

    text: str
    poisoned_lines: frozenset[int]


def demo_data(name: str) -> str:
    """A data file of the demo."""
    return files("service.demo").joinpath("data", name).read_text("utf-8")


def poisoned_file(share: float, seed: int, task_rows: int) -> PoisonedFile:
    """The first rows of the task plus attack rows until they make up `share` of the file,
    shuffled."""
    task = _rows("task_train.jsonl")[:task_rows]
    attack = _rows("attack.jsonl")
    shuffle = random.Random(seed)
    wanted = round(len(task) * share / (1 - share))
    if wanted > len(attack):
        raise ValueError(f"a share of {share} needs {wanted} attack rows; there are {len(attack)}")
    chosen = shuffle.sample(attack, wanted)
    rows = [(row, False) for row in task] + [
        (
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["response"]},
                ]
            },
            True,
        )
        for row in chosen
    ]
    shuffle.shuffle(rows)
    return PoisonedFile(
        "".join(json.dumps(row) + "\n" for row, _ in rows),
        frozenset(line for line, (_, poisoned) in enumerate(rows, start=1) if poisoned),
    )


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in demo_data(name).splitlines()]
