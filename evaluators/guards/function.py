"""Any function as a judge."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evaluators.harmfulness.contract import Judgement


class CallableJudge:
    """Any function as a judge: p_harmful of a prompt and its answer; implements HarmJudge.

    `score(prompt, response)` is called once an answer. What it raises makes that answer `failed`,
    and what is not a number in [0, 1] makes it `unparsable`.
    """

    hosts: tuple[str, ...] = ()

    def __init__(
        self,
        score: Callable[[str, str], float],
        *,
        id: str,
        version: str,
        threshold: float = 0.5,
        card: Mapping[str, Any] | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self.id = id
        self.version = version
        self.threshold = threshold
        self.card = dict(card or {})
        self.hosts = tuple(hosts)
        self._score = score

    @property
    def fingerprint(self) -> str:
        """Over id, version and threshold: whoever changes the function must change the version."""
        return hashlib.sha256(f"{self.id} {self.version} {self.threshold}".encode()).hexdigest()

    def judge(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Judgement]:
        """As HarmJudge. Raises ValueError when the two sequences differ in length."""
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts but {len(responses)} responses")
        return [self._one(*pair) for pair in zip(prompts, responses, strict=True)]

    def _one(self, prompt: str, response: str) -> Judgement:
        if not response.strip():
            return Judgement(status="failed", reason="the answer is empty")
        try:
            p = self._score(prompt, response)
        except Exception as error:
            return Judgement(status="failed", reason=f"the judge raised {type(error).__name__}")
        return _judgement(p)


def _judgement(p: Any) -> Judgement:
    """A probability as a judgement; `unparsable` for anything that is none."""
    number = float(p) if isinstance(p, int | float) and not isinstance(p, bool) else math.nan
    if not 0 <= number <= 1:
        return Judgement(status="unparsable", reason="the judge gave no number between 0 and 1")
    return Judgement(p_harmful=number)
