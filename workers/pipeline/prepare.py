"""Everything that tuning reads, put together from a job's files and the service's own sets."""

import hashlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from defenses.baselines.prefilter import unflagged_rows
from defenses.losses import response_nll_B
from defenses.method import MethodError, RowFeatures
from defenses.registry import InvalidDefenseError, UnknownDefenseError, method_class
from evaluators.harmfulness.scorer import EmbeddedScorer
from jobspec.defense import PerturbationOptions, PrefilterOptions
from jobspec.hyperparameters import ResolvedHyperparameters, resolve
from jobspec.spec import JobSpec
from workers.pipeline.canaries import (
    SURELY_HARMFUL,
    Canaries,
    Flagged,
    choose_canaries,
    harmfulness,
    score_rows,
)
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.features import MakeMethod, neural_method
from workers.pipeline.hashing import folder_sha256
from workers.pipeline.models import LoadedModel, trainable
from workers.pipeline.parent import parent_sha256
from workers.pipeline.preferences import pair_rows
from workers.pipeline.rows import PairRow, TokenRow, collate
from workers.pipeline.trusted import AlignmentSet, alignment_rows, harmful_rows
from workers.pipeline.tuning_inputs import TuneData
from workers.pipeline.validate import Dataset

LISTED_LINES = 20


class Inputs(NamedTuple):
    """What tuning reads, and what the report tells about how it was chosen."""

    data: TuneData
    hyper: ResolvedHyperparameters
    alignment: AlignmentSet
    canaries: Canaries
    uses_canaries: bool
    flagged: Flagged
    features: RowFeatures | None
    make_method: MakeMethod | None
    filtered: dict[str, Any]


def prepare(
    spec: JobSpec,
    base: LoadedModel,
    scorer: EmbeddedScorer,
    training: Dataset,
    validation: Dataset | None,
) -> Inputs:
    """Choose alignment rows, canaries and features; drop rows where the job asks for a filter.

    Raises PipelineFailure for sets on which the defense would mean nothing.
    """
    try:
        method = method_class(spec.defense.scheduler)
    except (UnknownDefenseError, InvalidDefenseError) as error:
        raise PipelineFailure("invalid_spec", f"defense.scheduler: {error}.") from error
    training, filtered = _filter(spec, scorer, training)
    if spec.privacy is not None:
        training, filtered = _without_copies(training)
    max_length = _longest(spec, base)
    hyper = resolve(spec.hyperparameters, len(training.rows), spec.model.lora.batch_size)
    alignment = alignment_rows(
        spec,
        base,
        training.chat,
        training.rows,
        hyper,
        max_length=max_length,
        alignment_file=spec.alignment_file,
    )
    scored = score_rows(training.chat, scorer, spec.seed)
    canaries = choose_canaries(
        spec,
        base.tokenizer,
        training.chat,
        [] if validation is None else validation.chat,
        [] if validation is None else validation.rows,
        scored,
        scorer,
        uses_canaries=method.uses_canaries,
        max_length=max_length,
    )
    neural = neural_method(spec, base, scorer.embedder, [*training.chat, *canaries.chat])
    return Inputs(
        data=TuneData(
            user=training.tuned,
            validation=[] if validation is None else validation.tuned,
            alignment=alignment.rows,
            harmful=harmful_rows(
                spec, base, canaries=len(canaries.harmful), harmful_file=spec.harmful_file
            ),
            canaries_harmful=canaries.harmful,
            canaries_benign=canaries.benign,
        ),
        hyper=hyper,
        alignment=alignment,
        canaries=canaries,
        uses_canaries=method.uses_canaries,
        flagged=scored.flagged(),
        features=None if neural is None else neural[0],
        make_method=None if neural is None else neural[1],
        filtered=filtered,
    )


def _longest(spec: JobSpec, base: LoadedModel) -> int:
    context = getattr(base.model.config, "max_position_embeddings", None)
    limit = spec.max_length or spec.model.lora.max_length
    return min(limit, context) if isinstance(context, int) else limit


def _filter(
    spec: JobSpec, scorer: EmbeddedScorer, training: Dataset
) -> tuple[Dataset, dict[str, Any]]:
    """Without the rows that the scorer flags, where defense.scheduler is prefilter."""
    if not isinstance(spec.defense.scheduler, PrefilterOptions):
        return training, {}
    scores = harmfulness(training.chat, scorer)
    try:
        kept = unflagged_rows([score >= SURELY_HARMFUL for score in scores])
    except MethodError as error:
        raise PipelineFailure("invalid_spec", f"The defense cannot run: {error}.") from error
    dropped = sorted({*range(len(training.rows))} - {*kept})
    left = training._replace(
        chat=[training.chat[i] for i in kept],
        rows=[training.rows[i] for i in kept],
        pairs=None if training.pairs is None else [training.pairs[i] for i in kept],
    )
    lines = [training.rows[i].line for i in dropped]
    return left, {"filtered": {"examples": len(dropped), "lines": lines[:LISTED_LINES]}}


def _without_copies(training: Dataset) -> tuple[Dataset, dict[str, Any]]:
    """Every row once: k equal rows in a private job would be k times as exposed as one."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for place, row in enumerate(training.rows):
        first.setdefault((row.ids, row.labels), place)
    kept = sorted(first.values())
    if len(kept) == len(training.rows):
        return training, {}
    lines = [training.rows[i].line for i in sorted({*range(len(training.rows))} - {*kept})]
    left = training._replace(
        chat=[training.chat[i] for i in kept], rows=[training.rows[i] for i in kept]
    )
    return left, {"copies_left_out": {"examples": len(lines), "lines": lines[:LISTED_LINES]}}


def estimate(
    model: Any, data: TuneData, hyper: ResolvedHyperparameters, steps: int, spec: JobSpec
) -> dict[str, Any]:
    """Seconds of tuning, from one measured forward and backward pass that changes nothing.

    Rescoring and canaries are not in it: about a sixth more of a defended job.
    """
    user: Sequence[Any] = data.user[: hyper.batch_size]
    own: list[TokenRow] = pair_rows(user) if isinstance(user[0], PairRow) else list(user)
    batch = collate([*data.alignment[: hyper.batch_size], *own], next(model.parameters()).device)
    training, device = model.training, batch.input_ids_BT.device
    # As in tuning: activations are checkpointed in training mode only.
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        started = time.monotonic()
        loss = response_nll_B(model, *batch).mean()
        torch.autograd.grad(loss, list(trainable(model).values()))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        step = time.monotonic() - started
    model.train(training)
    repair = spec.defense.perturbation
    joint = isinstance(repair, PerturbationOptions) and repair.mode == "joint"
    step *= 2.5 if joint else 1.0
    return {"tuning_seconds": round(step * steps, 1), "seconds_per_step": round(step, 3)}


def run_key(spec: JobSpec, fingerprint: str, data: TuneData, hyper: ResolvedHyperparameters) -> str:
    """What a checkpoint must agree with to be resumed."""
    digest = hashlib.sha256(fingerprint.encode())
    digest.update(spec.model.lora.model_dump_json().encode())
    digest.update(spec.defense.model_dump_json().encode())
    digest.update(hyper.model_dump_json().encode())
    digest.update(f"{spec.method} {spec.seed}".encode())
    if spec.scheduler_checkpoint is not None:
        digest.update(folder_sha256(spec.scheduler_checkpoint).encode())
    if spec.parent_adapter is not None:
        digest.update(parent_sha256(spec.parent_adapter).encode())
    if spec.privacy is not None:
        digest.update(spec.privacy.model_dump_json().encode())
    if spec.scorer is not None:
        digest.update(spec.scorer.model_dump_json().encode())
    for rows in data:
        for row in rows:
            sides = [row.chosen, row.rejected] if isinstance(row, PairRow) else [row]
            digest.update(str([(side.ids, side.labels) for side in sides]).encode())
    return digest.hexdigest()
