"""What a neural scheduler reads of each row, in the tokens of its own scorer."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from defenses.bds.errors import SchedulerStateError
from defenses.bds.methods import NeuralBds
from defenses.bds.neural import load_scorer, save_scorer
from defenses.bds.scorers import CausalLmScorer
from defenses.method import MethodContext, RowFeatures, TuningMethod
from evaluators.embedding import Embedder
from jobspec.chat import ChatRow
from jobspec.defense import SchedulerOptions, TuningOptions
from jobspec.preference import PreferenceRow
from jobspec.spec import JobSpec
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.models import LoadedModel, load_base

SCORER_TOKENS = 512

TextRow = ChatRow | PreferenceRow
MakeMethod = Callable[[MethodContext], TuningMethod]


def row_text(row: TextRow) -> str:
    """A row as one text: its messages and the answer that is learned, system turns left out, so
    that a scorer that has learned from one tenant can read another's rows."""
    parts = [message.content for message in row.messages if message.role != "system"]
    if isinstance(row, PreferenceRow):
        parts.append(row.preferred.content)
    return "\n\n".join(parts)


def embedded_features(rows: Sequence[TextRow], embedder: Embedder) -> RowFeatures:
    """One sentence embedding a row, computed once."""
    vectors = embedder.embed([row_text(row) for row in rows])
    return RowFeatures(embedder.id, embeddings_ND=torch.from_numpy(vectors))


def token_features(rows: Sequence[TextRow], tokenizer: Any) -> RowFeatures:
    """At most 512 ids a row of the scorer's own tokenizer, closed by its end token (brief: prompt,
    response, end)."""
    end = tokenizer.eos_token_id
    closing = [] if end is None else [end]
    ids = [
        [*tokenizer(row_text(row), add_special_tokens=False)["input_ids"][:SCORER_TOKENS], *closing]
        for row in rows
    ]
    return RowFeatures(tokenizer_fingerprint(tokenizer), tokens=ids)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Names a vocabulary: two tokenizers with the same one give the same ids a meaning."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    return f"vocabulary:{digest.hexdigest()[:20]}"


def neural_method(
    spec: JobSpec, base: LoadedModel, embedder: Embedder, rows: Sequence[TextRow]
) -> tuple[RowFeatures, MakeMethod] | None:
    """Features of user rows and canaries and the way to build the scheduler; None for other forms.

    A job with a scheduler checkpoint uses its scorer as it is (transfer). Raises PipelineFailure
    for a checkpoint that belongs to another tokenizer or embedder, or a scorer that cannot load.
    """
    options = spec.defense.scheduler
    if not isinstance(options, SchedulerOptions) or options.form != "neural":
        if spec.scheduler_checkpoint is not None:
            raise PipelineFailure(
                "invalid_spec",
                "A scheduler checkpoint needs the neural scheduler: set defense.scheduler to "
                "{name: bds, form: neural}.",
            )
        return None
    backbone = _backbone(spec, base, options)
    features = (
        embedded_features(rows, embedder)
        if options.scorer == "embedding"
        else token_features(rows, backbone.tokenizer)
    )
    checkpoint = spec.scheduler_checkpoint
    if checkpoint is not None:
        try:
            trained = load_scorer(checkpoint, features.tokenizer, transform=options.transform)
        except SchedulerStateError as error:
            raise PipelineFailure("invalid_spec", f"scheduler_checkpoint: {error}.") from error
        return features, lambda context: NeuralBds(context, options, trained, frozen=True)
    if options.scorer != "causal_lm":
        return features, lambda context: NeuralBds(context, options)
    generator = torch.Generator().manual_seed(spec.seed)
    scorer = CausalLmScorer(backbone.model, generator)
    return features, lambda context: NeuralBds(context, options, scorer)


def _backbone(spec: JobSpec, base: LoadedModel, options: SchedulerOptions) -> LoadedModel:
    """The model whose tokens the scorer reads; a causal_lm's weights are a copy of its own."""
    if options.scorer != "causal_lm":
        return base
    return load_base(spec.scorer or spec.model, spec.cache_dir)


def save_scheduler(
    method: TuningMethod, options: TuningOptions, features: RowFeatures | None, folder: Path
) -> Path | None:
    """Keep a trained scorer, so that another job can use it; None where there is none."""
    if not (isinstance(method, NeuralBds) and isinstance(options, SchedulerOptions)):
        return None
    assert features is not None
    scorer = method.scheduler.scorer
    save_scorer(folder, scorer, tokenizer=features.tokenizer, transform=options.transform)
    return folder
