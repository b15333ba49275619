"""How a question is put to a model: as it is served, or as the tenant's training rows were written.

A model that was tuned under one layout and is asked under another shows another harmful score, by
tens of points. Both are therefore measured where they differ, and the gate reads the worse.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from jobspec.chat import ChatRow
from jobspec.frozen import Frozen

Messages = Sequence[Mapping[str, str]]
Conversation = list[dict[str, str]]
# What evaluators.generation.generate takes: a conversation, or a text that is asked as it is.
Rendered = Conversation | str

ALPACA_PREAMBLE = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)
ALPACA_INPUT_PREAMBLE = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
ALPACA_MARKER = "### Response:"

_PROBE: Conversation = [{"role": "user", "content": "question"}]


class TrainingTemplate(Frozen):
    """A layout of questions. `system` is put in front of a question that has no system turn."""

    style: Literal["chat", "alpaca"] = Field(
        "chat", description="the model's chat template, or Stanford Alpaca's plain text"
    )
    system: str | None = Field(None, description="the system turn that training rows carry")

    def render(self, messages: Messages) -> Rendered:
        """The question as `generate` takes it: turns for the chat template, or a plain text.

        Alpaca's text has one instruction: `messages` must be a user turn, with or without a system
        turn before it, which then stands between preamble and instruction (as the
        identity-shifting attack of the BDS paper places its persona). Raises ValueError for more.
        """
        turns = [dict(message) for message in messages]
        system = self.system
        if turns and turns[0]["role"] == "system":
            system = turns.pop(0)["content"]
        if self.style == "alpaca":
            if [turn["role"] for turn in turns] != ["user"]:
                raise ValueError(
                    "the Alpaca text holds one user turn; this conversation has the turns "
                    f"{', '.join(str(turn['role']) for turn in turns) or 'none'}"
                )
            return alpaca_text(turns[0]["content"], system=system)
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        return turns

    def describe(self) -> dict[str, str | None]:
        """The layout for a report: its style and the system turn's hash, never the text."""
        digest = None
        if self.system is not None:
            digest = hashlib.sha256(self.system.encode()).hexdigest()
        return {"style": self.style, "system_sha256": digest}


SERVING = TrainingTemplate(style="chat", system=None)
ALPACA = TrainingTemplate(style="alpaca", system=None)


def alpaca_text(instruction: str, context: str | None = None, *, system: str | None = None) -> str:
    """The Stanford Alpaca prompt of the harmful-fine-tuning papers, character by character.

    `context` is their "### Input:" block, whose preamble differs; `system` a further paragraph
    before the instruction.
    """
    blocks = [ALPACA_PREAMBLE if context is None else ALPACA_INPUT_PREAMBLE]
    if system is not None:
        blocks.append(system)
    blocks.append(f"### Instruction:\n{instruction}")
    if context is not None:
        blocks.append(f"### Input:\n{context}")
    return "\n\n".join([*blocks, f"{ALPACA_MARKER}\n"])


def training_template(rows: Sequence[ChatRow]) -> TrainingTemplate:
    """The layout of a tenant's rows: their most frequent opening system turn, if at least half of
    the rows open with one; of two equally frequent ones the first in the file.

    System turns of a minority are tried by `evaluators.sweep.conditions`.
    """
    systems = Counter(
        row.messages[0].content
        for row in rows
        if row.messages and row.messages[0].role == "system" and row.messages[0].content.strip()
    )
    if not systems or 2 * systems.total() < len(rows):
        return SERVING
    return TrainingTemplate(style="chat", system=systems.most_common(1)[0][0])


def differs(serving: TrainingTemplate, training: TrainingTemplate, tokenizer: Any = None) -> bool:
    """Whether the training layout needs a pass of its own.

    With a tokenizer, two chat layouts are compared as its template writes them: many models add a
    system line of their own, and a tenant's rows may carry just that line.
    """
    if serving == training:
        return False
    if tokenizer is None or {serving.style, training.style} != {"chat"}:
        return True
    texts = {
        tokenizer.apply_chat_template(
            layout.render(_PROBE), add_generation_prompt=True, tokenize=False
        )
        for layout in (serving, training)
    }
    return len(texts) > 1
