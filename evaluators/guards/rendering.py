"""From a prompt and an answer to the token ids that a guard model reads."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evaluators.guards.config import GuardConfig, Guideline

_JINJA = ImmutableSandboxedEnvironment(
    keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False
)
# Private-use characters, which stand for the answer while its place in the frame is looked for.
_PLACE = "\ue000\ue001\ue000"
# No tokenizer in use has longer tokens on average; more text would be cut anyway.
_CHARACTERS_PER_TOKEN = 32


class GuardInputError(ValueError):
    """One pair cannot be put to this guard: its prompt is too long or breaks the template."""


class GuardInput(NamedTuple):
    """Token ids of one call, and whether a part of the answer is missing in them."""

    ids: list[int]
    truncated: bool


class Renderer:
    """Renders pairs for one tokenizer.

    `chat` is what carries the chat template: the tokenizer, or the processor of an image-text
    model. Raises GuardInputError at once for a tokenizer that cannot report offsets.
    """

    def __init__(self, config: GuardConfig, tokenizer: Any, chat: Any = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise GuardInputError(
                f"{type(tokenizer).__name__} reports no offsets: the guard needs a fast tokenizer"
            )
        if config.template is None and getattr(chat or tokenizer, "chat_template", None) is None:
            raise GuardInputError(
                "the guard's tokenizer has no chat template: use the folder of the original model"
            )
        self._config = config
        self._tokenizer = tokenizer
        self._chat = chat if chat is not None else tokenizer
        self._frames = _special_strings(tokenizer, config.markers)
        self._template = None if config.template is None else _JINJA.from_string(config.template)
        self._turns = [(turn.role, _JINJA.from_string(turn.content)) for turn in config.messages]

    def text(
        self,
        prompt: str,
        response: str,
        guideline: Guideline | None = None,
        *,
        truncated: bool = False,
    ) -> str:
        """The whole input as text; special tokens are written out."""
        variables = {
            "prompt": self._plain(prompt),
            "response": self._plain(response),
            "guideline": "" if guideline is None else guideline.text,
            "bos": self._tokenizer.bos_token or "",
            "eos": self._tokenizer.eos_token or "",
            "truncated": truncated,
        }
        text = self._rendered(variables)
        prefix = self._config.verdict_prefix
        # Some chat templates write it, or the first half of it, themselves.
        there = next(n for n in range(len(prefix), -1, -1) if text.endswith(prefix[:n]))
        return text + prefix[there:]

    def ids(
        self, prompt: str, response: str, guideline: Guideline | None, limit: int
    ) -> GuardInput:
        """Token ids, at most `limit`; only tokens of the answer are ever left out, from its end.

        Raises GuardInputError where the prompt and the template alone fill the limit.
        """
        most = self._config.max_response_tokens
        shown = response[: _CHARACTERS_PER_TOKEN * (limit if most is None else min(limit, most))]
        ids, answer = self._tokens(prompt, shown, guideline, truncated=False)
        if len(shown) == len(response) and len(ids) <= limit and len(answer) <= (most or limit):
            return GuardInput(ids, truncated=False)
        ids, answer = self._tokens(prompt, shown, guideline, truncated=True)
        room = min(len(answer) - max(0, len(ids) - limit), most or limit)
        if room < 1:
            raise GuardInputError(
                f"prompt and template have {len(ids) - len(answer)} tokens; the guard reads {limit}"
            )
        dropped = set(answer[room:])
        return GuardInput([t for i, t in enumerate(ids) if i not in dropped], truncated=True)

    def _tokens(
        self, prompt: str, response: str, guideline: Guideline | None, *, truncated: bool
    ) -> tuple[list[int], list[int]]:
        """Token ids, and the positions of those that lie wholly within the answer."""
        text = self.text(prompt, response, guideline, truncated=truncated)
        frame = self.text(prompt, _PLACE, guideline, truncated=truncated).split(_PLACE)
        if len(frame) != 2 or not (text.startswith(frame[0]) and text.endswith(frame[1])):
            raise GuardInputError("the template does not hold the answer exactly once")
        start, end = len(frame[0]), len(text) - len(frame[1])
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        positions = [
            index
            for index, (first, last) in enumerate(encoded["offset_mapping"])
            if start <= first and last <= end and last > first
        ]
        bos = self._tokenizer.bos_token_id
        if self._config.template is not None and self._config.bos and bos is not None:
            return [int(bos), *ids], [index + 1 for index in positions]
        return ids, positions

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        if self._template is not None:
            return self._template.render(variables)
        turns = [
            {"role": role, "content": self._content(content.render(variables))}
            for role, content in self._turns
        ]
        try:
            return str(
                self._chat.apply_chat_template(
                    turns,
                    tokenize=False,
                    add_generation_prompt=self._config.add_generation_prompt,
                    **self._config.template_arguments,
                )
            )
        except jinja2.TemplateError as error:
            # The template's own message may quote the turns, which reasons must not.
            raise GuardInputError("the chat template refuses the turns") from error

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if self._config.content_parts else text

    def _plain(self, text: str) -> str:
        readable = text.encode("utf-8", "replace").decode("utf-8")
        if self._frames is None:
            return readable
        return self._frames.sub(lambda match: match[0][0] + " " + match[0][1:], readable)


def _special_strings(tokenizer: Any, markers: Sequence[str]) -> re.Pattern[str] | None:
    """Matches whatever would be read as structure where it stands in a prompt or an answer."""
    special = [
        str(token.content)
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        if token.special
    ]
    found = {text for text in (*special, *tokenizer.all_special_tokens, *markers) if len(text) > 1}
    if not found:
        return None
    longest_first = sorted(found, key=lambda text: (-len(text), text))
    return re.compile("|".join(re.escape(text) for text in longest_first))
