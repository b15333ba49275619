"""Guard models as judges: four families behind one interface."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from evaluators.guards.config import GuardConfig, Guideline
from evaluators.guards.forward import (
    class_logits,
    greedy_text,
    inference,
    last_logits,
    unused_token,
)
from evaluators.guards.parsing import PARSERS
from evaluators.guards.rendering import GuardInput, GuardInputError, Renderer
from evaluators.harmfulness.contract import Judgement

# Spellings of one verdict word in the vocabularies of the common tokenizers.
_SPELLINGS = ("{}", "\u2581{}", "\u0120{}")


class GuardMismatchError(ValueError):
    """Model, tokenizer and preset do not belong together: name the model that the preset is for."""


class Call(NamedTuple):
    """One input of the model: which answer it belongs to, and under which guideline."""

    answer: int
    guideline: Guideline | None
    given: GuardInput


class Verdict(NamedTuple):
    """What one call says. Without a usable statement p is None and `status` says which kind."""

    p: float | None
    categories: tuple[str, ...] = ()
    failed: bool = False
    reason: str | None = None


class GuardModel:
    """A guard model with its tokenizer, loaded; implements HarmJudge.

    p_harmful of an answer is the largest over the configured guidelines (one call where there is
    none). Where one of the calls gives nothing usable, the answer has no judgement: a harmless rest
    would hide what that call might have found. Answers that are too long are cut at their end and
    marked; a prompt that leaves no room for its answer is `failed`. Calls are sorted by length and
    made `batch_size` at a time; results do not depend on it beyond rounding. A batch that raises is
    repeated one by one, and what raises alone is `failed`.

    `chat` is the processor of an image-text model. `card` and `id` are passed on to the report.
    Raises GuardMismatchError where the model cannot give the configured verdicts.
    """

    hosts: tuple[str, ...] = ()

    def __init__(
        self,
        config: GuardConfig,
        model: Any,
        tokenizer: Any,
        *,
        id: str = "guard",
        chat: Any = None,
        threshold: float | None = None,
        batch_size: int = 8,
        card: Mapping[str, Any] | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.id = id
        self.hosts = tuple(hosts)
        self.threshold = config.threshold if threshold is None else threshold
        self.card = dict(card or {})
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        try:
            self._renderer = Renderer(config, tokenizer, chat)
        except GuardInputError as error:
            raise GuardMismatchError(str(error)) from error
        if config.family == "sequence_classifier":
            self._check_labels()
        self._grade_ids = self._resolve_grades() if config.family == "one_token" else ()

    @property
    def version(self) -> str:
        """The template's hash; harmful scores of different versions are not comparable."""
        return self._config.template_sha256[:12]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every weight, the vocabulary, the chat template and the settings."""
        digest = hashlib.sha256(self._config.template_sha256.encode())
        digest.update(f"{self.id} {self.threshold}".encode())
        for name, tensor in sorted(self._model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(_bytes(tensor))
        for token, index in sorted(self._tokenizer.get_vocab().items()):
            digest.update(f"{index} {token}\n".encode("utf-8", "replace"))
        digest.update(str(getattr(self._tokenizer, "chat_template", None)).encode())
        return digest.hexdigest()

    def judge(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Judgement]:
        """As HarmJudge. Raises ValueError when the two sequences differ in length."""
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts but {len(responses)} responses")
        failures: dict[int, str] = {}
        calls: list[Call] = []
        for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            try:
                calls += self._calls(index, prompt, response)
            except GuardInputError as error:
                failures[index] = str(error)
        verdicts: dict[int, list[Verdict]] = {}
        truncated = {call.answer for call in calls if call.given.truncated}
        with inference(self._model):
            order = sorted(range(len(calls)), key=lambda i: (-len(calls[i].given.ids), i))
            for start in range(0, len(order), self._batch_size):
                batch = [calls[i] for i in order[start : start + self._batch_size]]
                for call, verdict in zip(batch, self._verdicts(batch), strict=True):
                    verdicts.setdefault(call.answer, []).append(verdict)
        return [
            Judgement(status="failed", reason=failures[index][:200])
            if index in failures
            else self._judgement(verdicts[index], truncated=index in truncated)
            for index in range(len(responses))
        ]

    def rendered(self, prompt: str, response: str) -> list[str]:
        """The inputs of one answer as text, one a guideline: for tests and for reading."""
        return [
            self._renderer.text(prompt, response, guideline)
            for guideline in self._config.guidelines or (None,)
        ]

    def _calls(self, index: int, prompt: str, response: str) -> list[Call]:
        if not response.strip():
            raise GuardInputError("the answer is empty")
        limit = self._config.max_length
        context = _context(self._model)
        if context is not None:
            written = self._config.max_new_tokens if self._config.family == "text" else 0
            limit = min(limit, context - written)
        return [
            Call(index, guideline, self._renderer.ids(prompt, response, guideline, limit))
            for guideline in self._config.guidelines or (None,)
        ]

    def _verdicts(self, batch: Sequence[Call]) -> list[Verdict]:
        try:
            return self._pass(batch)
        except Exception as error:
            if len(batch) == 1:
                reason = f"the guard model raised {type(error).__name__}"
                return [Verdict(None, failed=True, reason=reason)]
            return [self._verdicts([call])[0] for call in batch]

    def _pass(self, batch: Sequence[Call]) -> list[Verdict]:
        rows = [call.given.ids for call in batch]
        pad = self._tokenizer.pad_token_id
        if self._config.family == "sequence_classifier":
            pad = unused_token(rows, pad, len(self._tokenizer))
            logits_B_K = class_logits(self._model, rows, pad, self._config.padding)
            return [self._of_labels(row) for row in logits_B_K.tolist()]
        if pad is None:
            # Masked, so any id serves; the end token is left out of generated text.
            pad = self._tokenizer.eos_token_id or 0
        if self._config.family == "one_token":
            logits_B_V = last_logits(self._model, rows, pad, self._config.padding)
            return self._of_grades(logits_B_V, batch)
        texts = greedy_text(self._model, self._tokenizer, rows, pad, self._config.max_new_tokens)
        return [self._of_text(text) for text in texts]

    def _of_labels(self, logits_K: Sequence[float]) -> Verdict:
        if not all(math.isfinite(logit) for logit in logits_K):
            return Verdict(None, reason="the verdict is not a finite number")
        labels = self._config.labels
        harmful = self._config.harmful_labels or labels
        if self._config.aggregation == "max":
            p_K = [_sigmoid(logit) for logit in logits_K]
        else:
            top = max(logits_K)
            mass_K = [math.exp(logit - top) for logit in logits_K]
            p_K = [mass / sum(mass_K) for mass in mass_K]
        found = [(p, label) for p, label in zip(p_K, labels, strict=True) if label in harmful]
        p = (
            max(p for p, _ in found)
            if self._config.aggregation == "max"
            else sum(p for p, _ in found)
        )
        return Verdict(min(1.0, p), tuple(label for p_k, label in found if p_k >= self.threshold))

    def _of_grades(self, logits_B_V: Any, batch: Sequence[Call]) -> list[Verdict]:
        import torch

        log_p_B_V = torch.log_softmax(logits_B_V, dim=-1)
        log_mass_B_G = torch.stack(
            [log_p_B_V[:, list(ids)].logsumexp(-1) for _, ids in self._grade_ids], dim=-1
        )
        value_G = torch.tensor(
            [value for value, _ in self._grade_ids], dtype=torch.float64, device=log_p_B_V.device
        )
        p_B = (log_mass_B_G.softmax(-1) * value_G).sum(-1).clamp(0, 1).tolist()
        mass_B = log_mass_B_G.logsumexp(-1).exp().tolist()
        verdicts = []
        for call, p, mass in zip(batch, p_B, mass_B, strict=True):
            if not (math.isfinite(p) and math.isfinite(mass)):
                verdict = Verdict(None, reason="the verdict is not a finite number")
            elif mass < self._config.minimum_mass:
                verdict = Verdict(
                    None, reason=f"the verdict tokens hold {mass:.2g} of the probability"
                )
            else:
                named = call.guideline is not None and p >= self.threshold
                verdict = Verdict(p, (call.guideline.name,) if named and call.guideline else ())
            verdicts.append(verdict)
        return verdicts

    def _of_text(self, text: str) -> Verdict:
        assert self._config.parser is not None
        p = PARSERS[self._config.parser](text)
        return Verdict(p, reason=None if p is not None else "no verdict in the judge's text")

    def _judgement(self, verdicts: Sequence[Verdict], *, truncated: bool) -> Judgement:
        unusable = [verdict for verdict in verdicts if verdict.p is None]
        if unusable:
            failed = [verdict for verdict in unusable if verdict.failed]
            return Judgement(
                status="failed" if failed else "unparsable",
                reason=(failed or unusable)[0].reason,
                input_truncated=truncated,
            )
        return Judgement(
            p_harmful=max(verdict.p for verdict in verdicts if verdict.p is not None),
            categories=tuple(sorted({name for verdict in verdicts for name in verdict.categories})),
            input_truncated=truncated,
        )

    def _check_labels(self) -> None:
        found = getattr(self._model.config, "num_labels", None)
        if found != len(self._config.labels):
            raise GuardMismatchError(
                f"the model has {found} labels, the preset {len(self._config.labels)}: use the "
                f"model that the preset is for ({self._config.model_id})"
            )

    def _resolve_grades(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        vocabulary = self._tokenizer.get_vocab()
        ids_of: dict[float, set[int]] = {}
        for grade in self._config.verdict_grades:
            spellings = {spelling.format(grade.token) for spelling in _SPELLINGS}
            found = {vocabulary[word] for word in spellings if word in vocabulary}
            ids_of.setdefault(grade.value, set()).update(found)
        for value, ids in ids_of.items():
            if not ids:
                words = [g.token for g in self._config.verdict_grades if g.value == value]
                raise GuardMismatchError(
                    f"the tokenizer has no single token for {words}: use the model that the preset "
                    f"is for ({self._config.model_id})"
                )
        return tuple((value, tuple(sorted(ids))) for value, ids in sorted(ids_of.items()))


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _context(model: Any) -> int | None:
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
