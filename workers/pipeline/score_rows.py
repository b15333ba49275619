"""Scores without tuning: a trained scorer f_phi reads a file, and says which rows it trusts least.

v_i = f_phi(z_i);  w_i = N * softmax(v)_i over the N rows of the file, or 2 * sigmoid(v_i)

Source: Bayesian Data Scheduler, arXiv 2510.27172 (transfer of the neural scheduler; scores alone).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import AutoTokenizer

from defenses.bds.errors import SchedulerStateError
from defenses.bds.neural import SCORER_FILE, NeuralScheduler, load_scorer
from defenses.bds.ranking import RankedRow, effective_sample_size, ranked_rows
from defenses.bds.scheduler import Transform, transform_weights
from defenses.bds.scorers import Scorer, ScorerKind
from defenses.method import MethodError, RowFeatures
from evaluators.embedding import EmbedderUnavailableError, MiniLMEmbedder
from jobspec.catalogue import BaseModelEntry, CatalogueError, load_catalogue
from jobspec.chat import read_chat_rows
from jobspec.defense import SchedulerOptions
from jobspec.formats import detect_format
from jobspec.json_lines import DEFAULT_MAX_LINE_BYTES
from jobspec.preference import read_preference_rows
from workers.pipeline.bundle import SCHEDULER
from workers.pipeline.failure import PipelineFailure, is_storage_full
from workers.pipeline.features import (
    TextRow,
    embedded_features,
    token_features,
    tokenizer_fingerprint,
)
from workers.pipeline.models import device, model_folder

LEAST_TRUSTED_ROWS = 10
ROWS_PER_PART = 256
NOTES: dict[Transform, str] = {
    "softmax": "Weights and ranks compare the rows of this file with each other: in another file "
    "the same row gets others. They are no verdict on a row.",
    "sigmoid": "Ranks compare the rows of this file with each other. Neither a weight nor a rank "
    "is a verdict on a row.",
}


class _Reading(NamedTuple):
    """How rows become what the scorer reads. fingerprint: names the tokenizer or embedder; hint:
    what to do where it is not the scorer's."""

    fingerprint: str
    features: Callable[[Sequence[TextRow]], RowFeatures]
    hint: str


def score_file(
    folder: Path,
    source: Path,
    out: Path,
    *,
    model: str | None,
    catalogue: Path | None,
    cache_dir: Path,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Score every row of a chat or preference file in one pass and write `out`, Parquet.

    Columns of `out`: row (from 0), line, logit, weight (mean 1 under softmax), rank (1 is trusted
    least), as in a bundle's safety_weights.parquet. folder: a bundle, or its scheduler folder.
    model: the catalogue entry whose tokens the scorer reads, None for the default; an embedding
    scorer needs none. progress: called with the rows done and N, before each part; may raise.

    Raises PipelineFailure: invalid_spec for a folder without a scorer, a scorer of another
    tokenizer or embedder, or an `out` that exists or has no folder; invalid_training_file, with up
    to 100 sentences that each name a line; model_unavailable for a tokenizer or embedder.
    """
    _check_out(out)
    folder = _scorer_folder(folder)
    kind, transform = _described(folder)
    rows = _read(source)
    reading = _embeddings() if kind == "embedding" else _tokens(_entry(model, catalogue), cache_dir)
    try:
        scorer = load_scorer(folder, reading.fingerprint, transform=transform).to(device())
    except SchedulerStateError as error:
        raise _refused(f"{error}. {reading.hint}") from error
    logits = _logits(scorer, reading, rows, progress)
    broken = [row.line for row, v in zip(rows, logits.isfinite().tolist(), strict=True) if not v]
    if broken:
        raise _refused(
            f"The scorer in {folder} gives line {broken[0]} no finite logit; its weights are "
            "damaged. Copy the bundle anew."
        )
    weights = transform_weights(logits, transform)
    ranked = ranked_rows(weights)
    _write(_table(rows, logits, ranked), out)
    return {
        "examples": len(rows),
        "scorer": kind,
        "transform": transform,
        "effective_sample_size": effective_sample_size(weights) if bool(weights.any()) else None,
        "least_trusted": [
            {
                "line": rows[row.row_id].line,
                "rank": row.rank,
                "weight": row.weight,
                "logit": float(logits[row.row_id]),
            }
            for row in ranked[:LEAST_TRUSTED_ROWS]
        ],
        "note": NOTES[transform],
    }


def _check_out(out: Path) -> None:
    if out.exists():
        raise _refused(f"{out} exists already. Name a file that does not.")
    if not out.parent.is_dir():
        raise _refused(f"{out.parent}: no such folder. Make it, or name a file elsewhere.")


def _scorer_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise _refused(f"{folder}: no such folder. Name a bundle, or its folder {SCHEDULER}.")
    inside = folder / SCHEDULER
    found = inside if (inside / SCORER_FILE).is_file() else folder
    if not (found / SCORER_FILE).is_file():
        raise _refused(
            f"{folder} holds no scorer: only a job with the neural scheduler leaves one. Look for "
            f"{SCHEDULER}/{SCORER_FILE} in its bundle."
        )
    return found


def _described(folder: Path) -> tuple[ScorerKind, Transform]:
    try:
        described = json.loads((folder / SCORER_FILE).read_text("utf-8"))
        kind, transform = described["kind"], described["transform"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refused(
            f"{folder / SCORER_FILE} cannot be read: {error!r}. Copy the bundle anew."
        ) from error
    if kind not in get_args(ScorerKind) or transform not in get_args(Transform):
        raise _refused(
            f"{folder / SCORER_FILE} describes a scorer that this version does not know (kind "
            f"{kind!r}, transform {transform!r}). Use the version that trained it."
        )
    return kind, transform


def _read(source: Path) -> Sequence[TextRow]:
    """The rows of a file without a fault; the format is the one that its first rows show."""
    if not source.is_file():
        raise _refused(f"{source}: no such file. Name a chat or preference file (JSON Lines).")
    try:
        preference = detect_format(source, max_line_bytes=DEFAULT_MAX_LINE_BYTES) == "preference"
        rows, found = read_preference_rows(source) if preference else read_chat_rows(source)
    except OSError as error:
        raise _refused(f"{source}: cannot be read ({error.strerror}).") from error
    if found.error_count:
        raise PipelineFailure(
            "invalid_training_file",
            f"{source}: {found.summary()}",
            param="input",
            details=[finding.sentence() for finding in found.errors],
        )
    if not rows:
        raise PipelineFailure(
            "invalid_training_file",
            f"{source}: The file is empty. Put one example on each line.",
            param="input",
        )
    return rows


def _entry(model: str | None, catalogue: Path | None) -> BaseModelEntry:
    try:
        known = load_catalogue(catalogue)
    except CatalogueError as error:
        raise _refused(f"--catalogue: {error}.") from error
    entry = known.default if model is None else known.find(model)
    if entry is None:
        names = ", ".join(offered.name for offered in known.offered)
        raise _refused(f"--model: {model} is not in the catalogue. Known: {names}.")
    return entry


def _tokens(entry: BaseModelEntry, cache_dir: Path) -> _Reading:
    """The tokens of a catalogue entry, whose weights are not loaded."""
    try:
        # An aligned entry has the tokenizer of its base, which costs no merge.
        folder, revision = model_folder(entry.aligned_from or entry, cache_dir)
        arguments: dict[str, Any] = {} if revision is None else {"revision": revision}
        tokenizer = AutoTokenizer.from_pretrained(folder, **arguments)
    except (OSError, ValueError) as error:
        if is_storage_full(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PipelineFailure(
            "model_unavailable", f"The tokenizer of {entry.name} cannot be loaded: {reason}"
        ) from error
    return _Reading(
        tokenizer_fingerprint(tokenizer),
        lambda rows: token_features(rows, tokenizer),
        f"These tokens are those of {entry.name}; with --model, name the catalogue model whose "
        "tokens the scorer was trained on.",
    )


def _embeddings() -> _Reading:
    try:
        embedder = MiniLMEmbedder()
    except EmbedderUnavailableError as error:
        raise PipelineFailure("model_unavailable", f"The rows cannot be read: {error}.") from error
    return _Reading(
        embedder.id,
        lambda rows: embedded_features(rows, embedder),
        f"This version embeds with {embedder.id} and no other.",
    )


def _logits(
    scorer: Scorer,
    reading: _Reading,
    rows: Sequence[TextRow],
    progress: Callable[[int, int], None],
) -> Tensor:
    """f_phi of all rows, float64 [N]; in parts, so that memory stays bounded."""
    options = SchedulerOptions(form="neural", scorer=scorer.kind)
    parts = []
    for start in range(0, len(rows), ROWS_PER_PART):
        progress(start, len(rows))
        features = reading.features(rows[start : start + ROWS_PER_PART])
        try:
            scheduler = NeuralScheduler(scorer, features, options, frozen=True)
        except MethodError as error:
            raise _refused(f"The scorer cannot read the file: {error}.") from error
        parts.append(scheduler.score_all())
    return torch.cat(parts)


def _table(rows: Sequence[TextRow], logits: Tensor, ranked: Sequence[RankedRow]) -> pa.Table:
    in_order = sorted(ranked)
    return pa.table(
        {
            "row": list(range(len(rows))),
            "line": [row.line for row in rows],
            "logit": logits.tolist(),
            "weight": [row.weight for row in in_order],
            "rank": [row.rank for row in in_order],
        }
    )


def _write(table: pa.Table, out: Path) -> None:
    """`out` appears only when it is whole."""
    aside = out.with_name(f".{out.name}.part")
    try:
        pq.write_table(table, aside)
        aside.rename(out)
    except OSError as error:
        if is_storage_full(error):
            raise
        raise _refused(f"{out} cannot be written ({error.strerror or error}).") from error
    finally:
        aside.unlink(missing_ok=True)


def _refused(message: str) -> PipelineFailure:
    return PipelineFailure("invalid_spec", message)
