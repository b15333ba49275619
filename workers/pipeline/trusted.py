"""The service's own sets that the defenses lean on, tokenised for the base model of a job.

Every trusted row that is read beside the tenant's rows takes over their system turns. Where the
tenant's rows carry one and the trusted rows do not, the template alone tells the two sets apart,
and the model learns to refuse only without it. Derived.
"""

import hashlib
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jobspec.chat import ChatMessage, ChatRow
from jobspec.defense import TrustedOptions
from jobspec.hyperparameters import ResolvedHyperparameters
from jobspec.preference import PreferenceRow
from jobspec.spec import JobSpec
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.models import LoadedModel
from workers.pipeline.pairs import packaged, pair_rows
from workers.pipeline.rows import RowTooLong, TemplateMismatch, TokenRow, encode_row

LEAST_BATCHES = 50
# A set that lost more than this to the overlap would no longer be the defense it was measured as.
LEAST_KEPT = 0.5
TEMPLATE_TOKENS = 2
# As in the alignment stage: with as many refusals as harmless rows the model refuses look-alikes.
MIXTURE = ("refusals", "harmless rows", "harmless rows")
LARGEST_SYSTEM_SHARE = 0.5

UserRow = ChatRow | PreferenceRow


class SystemTurns(NamedTuple):
    """The system turns the tenant's rows open with. share: of the rows that have one, 0 to 1."""

    share: float
    texts: tuple[str, ...]


class Adopted(NamedTuple):
    """Trusted rows as they are read. adopted: how many took over a system turn; dropped: how many
    should have, but would be too long with it or have a template that allows none."""

    chat: list[ChatRow]
    rows: list[TokenRow]
    adopted: int
    dropped: int


class AlignmentSet(NamedTuple):
    """D_safe as one job reads it.

    wanted: M as asked for; there may be fewer rows. overlap_left_out: rows left out because the
    tenant's rows on overlap_lines ask the same.
    """

    rows: list[TokenRow]
    wanted: int
    overlap_left_out: int = 0
    overlap_lines: tuple[int, ...] = ()
    system_turns_adopted: int = 0
    system_turns_dropped: int = 0
    template_differs: bool = False


def alignment_rows(
    spec: JobSpec,
    base: LoadedModel,
    user: Sequence[UserRow],
    user_tokens: Sequence[TokenRow],
    hyper: ResolvedHyperparameters,
    *,
    max_length: int | None = None,
    alignment_file: Path | None = None,
) -> AlignmentSet:
    """D_safe: M rows of the shipped alignment set, a third refusals, the rest harmless answers, or
    of an operator's own file of pairs.

    M = min(max(N, 50 batches), the option's cap), so that a small file does not get a defense of
    a handful of rows. A row whose prompt the tenant's rows ask too is left out and another one
    takes its place: one question with two answers teaches neither. `user_tokens` are the tenant's
    rows (of a preference job either side of the pairs); max_length is the longest row in tokens,
    by default the base model's. The set is empty for methods that read none.

    Raises PipelineFailure(invalid_spec) for a bad alignment file, and for an overlap that leaves
    less than half of the refusals, of the harmless rows, or of the operator's file.
    """
    options = spec.defense.scheduler
    if not isinstance(options, TrustedOptions):
        return AlignmentSet([], 0)
    wanted = min(max(len(user), LEAST_BATCHES * hyper.batch_size), options.alignment_rows)
    limit = max_length or spec.model.lora.max_length
    lines_of = _prompts(user)
    mixture: tuple[str, ...]
    if alignment_file is not None:
        stocks, mixture = {"rows": pair_rows(alignment_file)}, ("rows",)
    else:
        mixture = MIXTURE
        stocks = {
            "refusals": pair_rows(packaged("alignment_refusals.jsonl")),
            "harmless rows": pair_rows(packaged("alignment_harmless.jsonl")),
        }
    kept, overlap = {}, []
    for name, stock in stocks.items():
        left = [row for row in stock if _normalised(row.messages[0].content) not in lines_of]
        overlap += [row for row in stock if _normalised(row.messages[0].content) in lines_of]
        if len(left) < LEAST_KEPT * len(stock):
            raise PipelineFailure(
                "invalid_spec",
                f"The alignment set overlaps with the training file: {len(stock) - len(left)} of "
                f"its {len(stock)} {name} have a prompt that the file asks too, so too little is "
                "left to defend with. Remove these rows from the file, or use another alignment "
                "set.",
                param="training_file",
            )
        kept[name] = left
    possible = min(len(left) * len(mixture) // mixture.count(name) for name, left in kept.items())
    order = [mixture[place % len(mixture)] for place in range(min(wanted, possible))]
    turns = system_turns(user)
    parts = {
        name: adopt(
            base.tokenizer,
            _shuffled(left, spec.seed, name)[: order.count(name)],
            turns,
            limit,
            spec.seed,
            name,
        )
        for name, left in kept.items()
    }
    source = {name: iter(part.rows) for name, part in parts.items()}
    rows = [next(source[name]) for name in order]
    lines = {line for row in overlap for line in lines_of[_normalised(row.messages[0].content)]}
    return AlignmentSet(
        rows=rows,
        wanted=wanted,
        overlap_left_out=len(overlap),
        overlap_lines=tuple(sorted(lines)),
        system_turns_adopted=sum(part.adopted for part in parts.values()),
        system_turns_dropped=sum(part.dropped for part in parts.values()),
        template_differs=template_mismatch(user_tokens, rows),
    )


def harmful_rows(
    spec: JobSpec, base: LoadedModel, *, canaries: int = 0, harmful_file: Path | None = None
) -> list[TokenRow]:
    """D_h of the perturbation: requests with empty compliant answers, never shown to tenants.

    Without the rows that harmful_canaries takes for the same seed and number of canaries.
    """
    if spec.defense.perturbation.mode == "none":
        return []
    _, rest = _split_harmful(spec.seed, canaries, harmful_file)
    none = SystemTurns(0.0, ())
    limit = spec.model.lora.max_length
    return adopt(base.tokenizer, rest, none, limit, spec.seed, "harmful").rows


def harmful_canaries(
    seed: int, canaries: int, *, harmful_file: Path | None = None
) -> list[ChatRow]:
    """At most `canaries` known-harmful rows, and at most a third of the stock, so that the rest
    still makes a D_h. Which ones depends on seed and prompt only, not on the order of the file."""
    return _split_harmful(seed, canaries, harmful_file)[0]


def system_turns(user: Sequence[UserRow]) -> SystemTurns:
    """The opening system turns of the tenant's rows."""
    texts = tuple(row.messages[0].content for row in user if row.messages[0].role == "system")
    return SystemTurns(len(texts) / len(user) if user else 0.0, texts)


def adopt(
    tokenizer: Any,
    rows: Sequence[ChatRow],
    turns: SystemTurns,
    limit: int,
    seed: int,
    name: str,
) -> Adopted:
    """Encode trusted rows, the tenant's share of them under system turns of the tenant's.

    As large a share of the rows as of the tenant's, but at most half, chosen by seed, opens with a
    system text: an attacker's rows and the gate's prompts come without one, so the plain opening
    has to be defended too. The texts come from the tenant's rows without replacement as long as
    there are any, so in their proportion. Rows are cut at `limit` tokens. Raises
    PipelineFailure(invalid_spec) for a row that cannot be encoded without a system turn either.
    """
    random_source = _random(seed, f"system turns/{name}")
    share = min(turns.share, LARGEST_SYSTEM_SHARE)
    chosen = set(random_source.sample(range(len(rows)), round(share * len(rows))))
    texts = random_source.sample(turns.texts, len(turns.texts))
    result = Adopted([], [], 0, 0)
    adopted = dropped = 0
    for index, row in enumerate(rows):
        if index in chosen:
            text = texts[(adopted + dropped) % len(texts)]
            opened = row._replace(messages=(ChatMessage("system", text, False), *row.messages))
            try:
                result.rows.append(encode_row(tokenizer, opened, limit))
            except (RowTooLong, TemplateMismatch):
                dropped += 1
            else:
                result.chat.append(opened)
                adopted += 1
                continue
        try:
            result.rows.append(encode_row(tokenizer, row, limit, truncate=True))
        except (RowTooLong, TemplateMismatch) as error:
            raise PipelineFailure(
                "invalid_spec",
                f"Line {row.line} of the {name} cannot be used with this base model: {error}.",
            ) from error
        result.chat.append(row)
    return result._replace(adopted=adopted, dropped=dropped)


def template_mismatch(user: Sequence[TokenRow], trusted: Sequence[TokenRow]) -> bool:
    """Whether the template alone tells the two sets apart.

    True where the tokens that all user rows open with and those that all trusted rows open with
    differ among the first two, such as a system turn against a user turn. A coarse guard: it sees
    no difference further on.
    """
    if not user or not trusted:
        return False
    first, second = _common_prefix(user), _common_prefix(trusted)
    length = min(len(first), len(second))
    return first[:length] != second[:length]


def _common_prefix(rows: Sequence[TokenRow]) -> tuple[int, ...]:
    prefix = rows[0].ids[:TEMPLATE_TOKENS]
    for row in rows:
        while row.ids[: len(prefix)] != prefix:
            prefix = prefix[:-1]
    return prefix


def _split_harmful(
    seed: int, canaries: int, harmful_file: Path | None
) -> tuple[list[ChatRow], list[ChatRow]]:
    stock = pair_rows(harmful_file or packaged("harmful_compliances.jsonl"))
    reserved = min(canaries, len(stock) // 3)
    order = sorted(
        stock,
        key=lambda row: hashlib.sha256(f"{seed}/{row.messages[0].content}".encode()).digest(),
    )
    taken = {row.line for row in order[:reserved]}
    return order[:reserved], [row for row in stock if row.line not in taken]


def _prompts(user: Sequence[UserRow]) -> dict[str, list[int]]:
    """Lines of the tenant's rows by the normalised text of every user turn."""
    lines: dict[str, list[int]] = {}
    for row in user:
        for message in row.messages:
            if message.role == "user":
                lines.setdefault(_normalised(message.content), []).append(row.line)
    return lines


def _normalised(text: str) -> str:
    """Compatibility forms, letter case and runs of white space are no difference."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _shuffled(rows: Sequence[ChatRow], seed: int, name: str) -> list[ChatRow]:
    return _random(seed, name).sample(rows, len(rows))


def _random(seed: int, name: str) -> random.Random:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))
