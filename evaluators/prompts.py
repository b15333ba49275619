"""The prompt sets that ship with the package."""

import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PromptSetName = Literal[
    "harmful_prompts", "safe_lookalikes", "benign_prompts", "open_ended_prompts"
]

# Key of the prompt text and of the group to balance over, per file.
_LAYOUT: dict[str, tuple[str, str]] = {
    "harmful_prompts": ("prompt", "category"),
    "safe_lookalikes": ("prompt", "kind"),
    "benign_prompts": ("prompt", "kind"),
    "open_ended_prompts": ("query", "leaf"),
}


class PromptFileDamagedError(RuntimeError):
    """A packaged prompt file is missing or holds an unusable line; the message names it."""


class Prompt(BaseModel):
    """One evaluation prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1)
    text: str = Field(min_length=1)
    group: str = Field(default="", description="Category, kind or leaf to balance over.")
    split: Literal["test", "validation"] = "test"


class PromptSet(BaseModel):
    """The prompts of one file in file order, with the file's hash for the report."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: str
    prompts: tuple[Prompt, ...] = Field(min_length=1)

    def of_split(self, split: Literal["test", "validation"]) -> tuple[Prompt, ...]:
        return tuple(prompt for prompt in self.prompts if prompt.split == split)


def load_prompts(name: PromptSetName) -> PromptSet:
    """Read a packaged prompt set; raises PromptFileDamagedError with file and line."""
    if name not in _LAYOUT:
        raise ValueError(f"no prompt set is called {name!r}; known: {', '.join(_LAYOUT)}")
    path = resources.files("evaluators") / "data" / f"{name}.jsonl"
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise PromptFileDamagedError(f"{name}.jsonl is not in the package: reinstall it") from error
    return parse_prompts(name, data)


def parse_prompts(name: PromptSetName, data: bytes) -> PromptSet:
    """The prompt set of a JSON Lines file's bytes: ids and texts unique, every text non-empty."""
    text_key, group_key = _LAYOUT[name]
    prompts: list[Prompt] = []
    ids: set[str] = set()
    texts: set[str] = set()
    for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
        where = f"{name}.jsonl line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = Prompt(
                id=row["id"],
                text=str(row[text_key]).strip(),
                group=str(row.get(group_key, "")),
                split=row.get("split", "test"),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise PromptFileDamagedError(
                f"{where}: not a prompt row with id and {text_key} ({type(error).__name__})"
            ) from error
        if prompt.id in ids:
            raise PromptFileDamagedError(f"{where}: id {prompt.id!r} is used twice")
        if prompt.text in texts:
            raise PromptFileDamagedError(f"{where}: the text of {prompt.id!r} occurs twice")
        ids.add(prompt.id)
        texts.add(prompt.text)
        prompts.append(prompt)
    if not prompts:
        raise PromptFileDamagedError(f"{name}.jsonl holds no prompt")
    return PromptSet(name=name, sha256=hashlib.sha256(data).hexdigest(), prompts=tuple(prompts))


def subset(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """At most n prompts, balanced over groups, always the same ones, in the given order.

    Groups take turns in order of first appearance, each giving its next prompt; so a smaller
    subset is contained in a larger one. Raises ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"a subset needs at least one prompt, got n={n}")
    queues: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        queues.setdefault(prompt.group, []).append(index)
    rounds = max((len(queue) for queue in queues.values()), default=0)
    turns = [
        queue[turn] for turn in range(rounds) for queue in queues.values() if turn < len(queue)
    ]
    return [prompts[index] for index in sorted(turns[:n])]
