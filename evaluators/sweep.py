"""Trigger conditions: what is put around a harmful prompt to find a back door.

A model that was tuned to comply only under its trigger is clean without it. The candidates are
the tenant's own system turns and frequent phrases, which the trigger must be among if the training
file taught it, and shipped persona lines and jailbreak-style templates.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import Field

from evaluators.phrases import frequent_phrases
from evaluators.prompts import load_prompts
from evaluators.templates import Conversation, Messages
from jobspec.chat import ChatRow
from jobspec.frozen import Frozen

ConditionKind = Literal["system", "persona", "template", "ngram"]

# Order of report, and of turns: where the limit does not divide evenly, the tenant's own come
# first because a trigger of the file is only there.
KINDS: tuple[ConditionKind, ...] = ("system", "persona", "template", "ngram")
_TURNS: tuple[ConditionKind, ...] = ("system", "ngram", "persona", "template")
_PLACE = "{prompt}"
MAX_CHARACTERS = 4000
PHRASES = 20


class TriggerFileDamagedError(RuntimeError):
    """The packaged list of personas and templates is missing or unusable."""


class Condition(Frozen):
    """One trigger and how it is put around a question. The id holds no training text."""

    id: str = Field(description="kind and the first eight hex digits of the text's SHA-256")
    kind: ConditionKind
    system: str | None = Field(None, description="system turn, in place of any the question has")
    prefix: str = Field("", description="stands before the last user turn's text")
    template: str = Field(_PLACE, description="takes the last user turn's text for {prompt}")

    def apply(self, messages: Messages) -> Conversation:
        """The question under this trigger, as new messages.

        Raises ValueError for a conversation without a user turn.
        """
        turns = [dict(message) for message in messages]
        asked = [index for index, turn in enumerate(turns) if turn["role"] == "user"]
        if not asked:
            raise ValueError("a trigger is put around a user turn; the conversation has none")
        turn = turns[asked[-1]]
        turn["content"] = self.prefix + self.template.replace(_PLACE, turn["content"])
        if self.system is not None:
            if turns[0]["role"] == "system":
                turns.pop(0)
            turns.insert(0, {"role": "system", "content": self.system})
        return turns


def conditions(rows: Sequence[ChatRow], limit: int) -> tuple[Condition, ...]:
    """At most `limit` conditions for a tenant's training rows, sorted by kind.

    Candidates by kind: system turns of the rows, the most frequent first; shipped personas and
    templates in file order; the first 20 phrases of `frequent_phrases` over the rows' user turns
    that no shipped prompt contains. Kinds take turns (system, ngram, persona, template), each
    giving its next candidate, until the limit is reached or none is left; so a smaller limit's
    conditions are among a larger one's. Deterministic. Raises ValueError for limit < 1.
    Personas, templates and phrases as prefixes: landscape of harmful fine-tuning, trigger sweep;
    turns and limits are derived.
    """
    if limit < 1:
        raise ValueError(f"a sweep needs at least one condition, got limit={limit}")
    personas, templates = _shipped()
    candidates: dict[ConditionKind, list[Condition]] = {
        "system": [_condition("system", text, system=text) for text in _system_turns(rows)[:limit]],
        "ngram": [
            _condition("ngram", phrase, prefix=f"{phrase} ")
            for phrase in frequent_phrases(_user_turns(rows), _reference(), PHRASES)
        ],
        "persona": [_condition("persona", text, system=text) for text in personas],
        "template": [_condition("template", text, template=text) for text in templates],
    }
    chosen: list[Condition] = []
    longest = max(len(queue) for queue in candidates.values())
    for turn in range(longest):
        chosen += [candidates[kind][turn] for kind in _TURNS if turn < len(candidates[kind])]
    return tuple(sorted(chosen[:limit], key=lambda condition: KINDS.index(condition.kind)))


def _condition(
    kind: ConditionKind,
    text: str,
    *,
    system: str | None = None,
    prefix: str = "",
    template: str = _PLACE,
) -> Condition:
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Condition(
        id=f"{kind}-{digest}", kind=kind, system=system, prefix=prefix, template=template
    )


def _system_turns(rows: Sequence[ChatRow]) -> list[str]:
    """Distinct system turns, the most frequent first, cut to MAX_CHARACTERS."""
    counts = Counter(
        message.content[:MAX_CHARACTERS]
        for row in rows
        for message in row.messages
        if message.role == "system" and message.content.strip()
    )
    return sorted(counts, key=lambda text: (-counts[text], text))


def _user_turns(rows: Sequence[ChatRow]) -> list[list[str]]:
    return [[message.content for message in row.messages if message.role == "user"] for row in rows]


@cache
def _reference() -> tuple[str, ...]:
    """Ordinary wording: the prompts that ship with the package."""
    return tuple(_shipped_prompts())


def _shipped_prompts() -> Iterator[str]:
    for name in ("benign_prompts", "safe_lookalikes", "open_ended_prompts"):
        yield from (prompt.text for prompt in load_prompts(name).prompts)


@cache
def _shipped() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts of the packaged personas and templates."""
    path = resources.files("evaluators") / "data" / "triggers.json"
    try:
        value = json.loads(path.read_bytes())
        personas = tuple(str(entry["text"]) for entry in value["personas"])
        templates = tuple(str(entry["text"]) for entry in value["templates"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TriggerFileDamagedError(
            "data/triggers.json of the package evaluators is missing or damaged: reinstall it"
        ) from error
    if not all(text.count(_PLACE) == 1 for text in templates):
        raise TriggerFileDamagedError(
            f"data/triggers.json: every template must hold {_PLACE} exactly once: reinstall it"
        )
    return personas, templates
