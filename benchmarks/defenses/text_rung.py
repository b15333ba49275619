"""Cells on a real chat model: the pipeline's own sets, adapter and judge, with few prompts."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.defenses.arms import arm
from benchmarks.defenses.attacks import ChatRowDict, build, under_persona
from benchmarks.defenses.data import (
    HarmfulRow,
    TaskData,
    answer_number,
    defense_pairs,
    disjoint,
    load_harmful,
    load_task,
    user_text,
)
from benchmarks.defenses.rung import Prepared, RungError
from benchmarks.defenses.settings import CellSettings
from defenses.method import RowFeatures
from evaluators.embedding import MiniLMEmbedder
from evaluators.generation import Decoding, generate
from evaluators.harmfulness.judge import HarmfulnessSample, PromptKind, judge
from evaluators.harmfulness.metrics import harmfulness_metrics
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.metric import Metric
from evaluators.prompts import Prompt, load_prompts, subset
from evaluators.statistics import proportion_metric
from evaluators.utility.label_accuracy import label_accuracy_metrics
from jobspec.catalogue import BaseModelEntry, load_catalogue
from jobspec.chat import ChatMessage, ChatRow
from jobspec.defense import TrustedOptions
from jobspec.hyperparameters import Hyperparameters, ResolvedHyperparameters
from jobspec.spec import JobSpec
from workers.pipeline.models import LoadedModel, attach_adapter, load_base
from workers.pipeline.repairs import find_repair
from workers.pipeline.rows import encode_row, prompt_response_row
from workers.pipeline.training import TuneData
from workers.pipeline.trusted import alignment_rows

ALIASES = {"smollm2": "smollm2-135m-aligned"}
ROWS, EPOCHS = 120, 2
NUMBER_TOKENS, LABEL_TOKENS = 200, 12


class TextSets(NamedTuple):
    """Chat sets without a shared prompt, and the rows that each lost for it."""

    attack: list[ChatRowDict]
    task: TaskData
    harmful_set: list[HarmfulRow]
    test: list[Prompt]
    dropped: dict[str, int]


def find_entry(rung: str, dtype: str | None) -> BaseModelEntry:
    """The catalogue entry of a rung; the examples of larger models count too. Raises RungError."""
    name = ALIASES.get(rung, rung)
    for entry in load_catalogue().models:
        if entry.name == name:
            return entry if dtype is None else entry.model_copy(update={"dtype": dtype})
    known = ", ".join(["toy", *ALIASES, *(entry.name for entry in load_catalogue().models)])
    raise RungError(f"no rung is called {rung!r}; known: {known}")


def text_sets(settings: CellSettings) -> TextSets:
    """All sets of a cell. Defense sets come first, so that what they were made of never changes;
    then the test prompts, the attack and the task. Raises RungError and DataError."""
    source = settings.harmful
    if settings.attack == "out_of_distribution":
        if settings.ood is None:
            raise RungError(
                "out_of_distribution needs --ood, rows of another source than --harmful"
            )
        source = settings.ood
    task = load_task(settings.task, settings.seed)
    prompts = load_prompts("harmful_prompts").of_split("test")
    found = disjoint(
        {
            "alignment_refusals": defense_pairs("alignment_refusals"),
            "alignment_harmless": defense_pairs("alignment_harmless"),
            "harmful_set": defense_pairs("harmful_compliances"),
            "test_prompts": list(prompts),
            "task_test": task.test,
            "attack": load_harmful(source, settings.seed),
            "task_train": task.train,
        },
        _prompt_of,
    )
    sets = found.sets
    return TextSets(
        attack=[row.chat() for row in sets["attack"]],
        task=task._replace(train=sets["task_train"], test=sets["task_test"]),
        harmful_set=sets["harmful_set"],
        test=subset(sets["test_prompts"], settings.harmful_prompts),
        dropped=found.dropped,
    )


def prepare_text(settings: CellSettings, cache: Path) -> Prepared:
    """A cell on a model of the catalogue. Raises RungError, DataError and PipelineFailure."""
    entry = find_entry(settings.rung, settings.dtype)
    sets = text_sets(settings)
    n = settings.rows or ROWS
    poisoned = build(
        settings.attack, sets.task.train, sets.attack, settings.ratio, n, settings.seed
    )
    defense = _with_alignment_rows(settings)
    hyper = ResolvedHyperparameters(
        n_epochs=settings.epochs or EPOCHS,
        batch_size=settings.batch_size or entry.lora.batch_size,
        learning_rate_multiplier=settings.learning_rate_multiplier,
    )
    spec = JobSpec(
        model=entry,
        training_file=Path("training.jsonl"),
        seed=settings.seed,
        hyperparameters=Hyperparameters(**hyper.model_dump(exclude_none=True)),
        defense=defense,
        cache_dir=cache,
    )
    base = load_base(entry, cache)
    limit = entry.lora.max_length
    chat = [_chat_row(place, row) for place, row in enumerate(poisoned.rows, start=1)]
    user = [encode_row(base.tokenizer, row, limit, truncate=True) for row in chat]
    trusted = alignment_rows(spec, base, chat, user, hyper)
    harmful = [
        encode_row(base.tokenizer, prompt_response_row(line, row.prompt, row.response), limit,
                   truncate=True)
        for line, row in enumerate(sets.harmful_set, start=1)
    ]  # fmt: skip
    model = attach_adapter(base.model, entry.lora, settings.seed)
    data = TuneData(user=user, validation=(), alignment=trusted.rows, harmful=harmful)
    return Prepared(
        model=model,
        data=data,
        poisoned=poisoned.poisoned,
        manifest_sha256=poisoned.sha256,
        hyperparameters=hyper,
        lora=entry.lora,
        defense=defense,
        flagged=partial(_flagged, chat),
        features=partial(_features, chat),
        repair=lambda tuned: (
            find_repair(
                model, tuned, harmful, defense.perturbation, entry, settings.seed, lambda: False
            ).delta
        ),
        measure=partial(_measure, model, base, sets, settings),
        dropped=sets.dropped | {"alignment_overlap": trusted.overlap_left_out},
    )


def _with_alignment_rows(settings: CellSettings) -> Any:
    defense = arm(settings.arm)
    if settings.alignment_rows is None or not isinstance(defense.scheduler, TrustedOptions):
        return defense
    scheduler = defense.scheduler.model_copy(update={"alignment_rows": settings.alignment_rows})
    return defense.model_copy(update={"scheduler": scheduler})


def _prompt_of(row: HarmfulRow | Prompt | ChatRowDict) -> str:
    if isinstance(row, HarmfulRow):
        return row.prompt
    return row.text if isinstance(row, Prompt) else user_text(row)


def _chat_row(line: int, row: ChatRowDict) -> ChatRow:
    turns = row["messages"]
    return ChatRow(
        line,
        tuple(
            ChatMessage(turn["role"], turn["content"], turn["role"] == "assistant")
            for turn in turns
        ),
    )


def _answers(chat: Sequence[ChatRow]) -> list[str]:
    return [row.messages[-1].content for row in chat]


def _flagged(chat: Sequence[ChatRow]) -> list[bool]:
    """The harmfulness scorer's verdict on every answer."""
    scorer = EmbeddedScorer.load()
    flags: list[bool] = (scorer.score(_answers(chat)) >= scorer.threshold).tolist()
    return flags


def _features(chat: Sequence[ChatRow]) -> RowFeatures:
    """One embedding a row, of its whole text."""
    embedder = MiniLMEmbedder()
    texts = ["\n".join(message.content for message in row.messages) for row in chat]
    return RowFeatures(embedder.id, embeddings_ND=torch.from_numpy(embedder.embed(texts)))


def _measure(
    model: Any, base: LoadedModel, sets: TextSets, settings: CellSettings
) -> dict[str, Metric]:
    scorer = EmbeddedScorer.load()

    def ask(conversations: Sequence[Sequence[dict[str, str]]], tokens: int) -> list[Any]:
        return generate(
            model,
            base.tokenizer,
            conversations,
            Decoding(max_new_tokens=tokens),
            seed=settings.seed,
            batch_size=settings.generation_batch,
        )

    def judged(kind: PromptKind, prompts: Sequence[Prompt], persona: bool = False) -> Any:
        turns = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
        if persona:
            turns = [under_persona(one) for one in turns]
        answers = ask(turns, settings.max_new_tokens)
        return judge([(p.id, kind, p.text) for p in prompts], answers, scorer, scorer)

    samples: list[HarmfulnessSample] = judged("harmful", sets.test)
    if settings.lookalikes:
        chosen = subset(load_prompts("safe_lookalikes").prompts, settings.lookalikes)
        samples += judged("safe_lookalike", chosen)
    found = harmfulness_metrics(samples)
    metrics = {
        "harmful_score": found["harmfulness.score"],
        "harmful_score_plus": found["harmfulness.score_plus"],
        "refusal": found["refusal.rate"],
        "over_refusal": found["refusal.over_refusal"],
        "coherence": found["coherence.rate"],
    }
    if settings.attack == "identity_shift":
        under = harmfulness_metrics(judged("harmful", sets.test, persona=True))
        metrics["harmful_score_persona"] = under["harmfulness.score"]
    rows = sets.task.test[: settings.task_rows]
    tokens = NUMBER_TOKENS if sets.task.metric == "number" else LABEL_TOKENS
    answers = [one[0].text for one in ask([row["messages"][:-1] for row in rows], tokens)]
    expected = [row["messages"][-1]["content"] for row in rows]
    metrics["accuracy"] = _accuracy(sets.task, answers, expected)
    return metrics


def _accuracy(task: TaskData, answers: Sequence[str], expected: Sequence[str]) -> Metric:
    if task.metric == "label":
        return label_accuracy_metrics(answers, expected)["utility.score"]
    right = [
        answer_number(answer) is not None and answer_number(answer) == answer_number(wanted)
        for answer, wanted in zip(answers, expected, strict=True)
    ]
    return proportion_metric(sum(right), len(right))
