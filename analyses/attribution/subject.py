"""The tuned model, its rows and what is kept of its tuning."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from analyses.attribution.gradients import Block, Blocks, lora_blocks
from analyses.attribution.rows import EncodedRow, encode_file
from analyses.attribution.spec import FinalModelRequest
from analyses.context import AnalysisContext, AnalysisError
from jobspec.catalogue import BaseModelEntry, load_catalogue
from jobspec.chat import read_chat_rows

ADAPTER = "adapter_model.safetensors"
BEFORE = Path("perturbation") / "adapter_before.safetensors"
WEIGHTS = "safety_weights.parquet"
OPTIMIZER_FILE = "optimizer_state"
# Of the AdamW that jobs are tuned with.
JOB_BETAS = (0.9, 0.95)


class Subject(NamedTuple):
    """model: float32, in evaluation mode. weight_N: of the scheduler, by row, or None.
    base: names the base model and its tokenizer, for the cache."""

    job_id: str | None
    model: Any
    tokenizer: Any
    blocks: Blocks
    rows: list[EncodedRow]
    weight_N: list[float] | None
    adapter_sha256: str
    base: str
    context_length: int
    warnings: list[str]

    @property
    def parameters(self) -> int:
        return sum(block.size for block in self.blocks)


class AdamState(NamedTuple):
    """AdamW's moments by block, [size] each, and the steps taken."""

    first: list[Tensor]
    second: list[Tensor]
    step: int


def load_subject(request: FinalModelRequest, context: AnalysisContext) -> Subject:
    """Load what the request asks about. Raises AnalysisError for all that is missing or does not
    fit: no job and no files, no adapter, another tokenizer, rows that cannot be read."""
    job_id, entry, bundle, training_file = _sources(request, context)
    if not (bundle / ADAPTER).is_file():
        raise AnalysisError(
            f"the job has no adapter ({ADAPTER} is not in its bundle); only a finished job with "
            "LoRA can be explained",
            "job",
        )
    if context.load_model is None:
        raise AnalysisError("this place cannot load models", "job")
    model, tokenizer = context.load_model(entry, bundle)
    _check_tokenizer(tokenizer, bundle)
    model.float().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    blocks = lora_blocks(model)
    weights_file = bundle / ADAPTER
    if request.at == "pre_perturbation":
        weights_file = bundle / BEFORE
        _put_back(blocks, weights_file)
    length = int(getattr(model.config, "max_position_embeddings", 0) or 1_000_000)
    read, report = read_chat_rows(training_file)
    if not read:
        raise AnalysisError(
            f"training_file: no chat row can be read ({report.rows} rows); only jobs tuned on chat "
            "rows can be explained",
            "training_file",
        )
    rows, warnings = encode_file(tokenizer, read, min(length, _longest_row(entry, context)))
    return Subject(
        job_id,
        model,
        tokenizer,
        blocks,
        rows,
        _weights(bundle, rows, required=request.weights == "scheduler"),
        hashlib.sha256(weights_file.read_bytes()).hexdigest(),
        f"{entry.name}/{_tokenizer_hash(tokenizer)}",
        length,
        warnings,
    )


def _longest_row(entry: BaseModelEntry, context: AnalysisContext) -> int:
    """Tokens at which the tuning cut rows: the job may have asked for another limit."""
    data = {} if context.job is None else context.job.report.get("data") or {}
    found = data.get("max_length")
    return found if isinstance(found, int) else entry.lora.max_length


def _sources(
    request: FinalModelRequest, context: AnalysisContext
) -> tuple[str | None, BaseModelEntry, Path, Path]:
    if context.job is not None:
        job = context.job
        return job.job_id, job.base, job.bundle, job.training_file
    missing = [name for name in ("adapter", "training_file") if name not in context.files]
    if missing:
        raise AnalysisError(
            f"{missing[0]}: is missing; name a job, or give an adapter folder and training_file",
            missing[0],
        )
    catalogue = load_catalogue()
    entry = catalogue.default if request.base_model is None else catalogue.find(request.base_model)
    if entry is None:
        known = ", ".join(found.name for found in catalogue.offered)
        raise AnalysisError(
            f"base_model: {request.base_model!r} is not in the catalogue ({known})", "base_model"
        )
    return None, entry, context.files["adapter"], context.files["training_file"]


def _check_tokenizer(tokenizer: Any, bundle: Path) -> None:
    """A bundle carries the tokenizer of its tuning; rows would be other tokens under another."""
    if not (bundle / "tokenizer_config.json").is_file():
        return
    from transformers import AutoTokenizer

    kept = AutoTokenizer.from_pretrained(bundle, trust_remote_code=False)
    if _tokenizer_hash(kept) != _tokenizer_hash(tokenizer):
        raise AnalysisError(
            "the base model's tokenizer or chat template is not the one that the job was tuned "
            "with; its rows would be other tokens. Use the catalogue of that time",
            "job",
        )


def _tokenizer_hash(tokenizer: Any) -> str:
    digest = hashlib.sha256(str(tokenizer.chat_template).encode())
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{index} {token}\n".encode(errors="replace"))
    return digest.hexdigest()[:16]


@torch.no_grad()
def _put_back(blocks: Blocks, path: Path) -> None:
    if not path.is_file():
        raise AnalysisError(
            "at: the job kept no adapter from before a perturbation; ask for `released`", "at"
        )
    try:
        kept = load_file(path)
    except SafetensorError as error:
        raise AnalysisError(f"at: {path.name} cannot be read: {error}", "at") from error
    for block in blocks:
        tensor = _named(kept, block)
        if tensor is None or tensor.shape != block.weight.shape:
            raise AnalysisError(
                f"at: {path.name} has no tensor that fits {block.name}; is it of this job?", "at"
            )
        block.weight.copy_(tensor)


def _named(tensors: Mapping[str, Tensor], block: Block) -> Tensor | None:
    name = f"{block.name}.weight"
    found = tensors.get(name)
    # peft leaves out the adapter's own name in files of its own.
    return found if found is not None else tensors.get(name.replace(".default.", "."))


def _weights(bundle: Path, rows: list[EncodedRow], *, required: bool) -> list[float] | None:
    path = bundle / WEIGHTS
    if not path.is_file():
        if required:
            raise AnalysisError(
                "weights: the job kept no weights of rows; ask for `none`", "weights"
            )
        return None
    table = pq.read_table(path, columns=["line", "weight"]).to_pydict()
    by_line = dict(zip(table["line"], table["weight"], strict=True))
    found = [by_line.get(row.line) for row in rows]
    if any(weight is None for weight in found):
        if required:
            raise AnalysisError("weights: the kept weights do not cover all rows", "weights")
        return None
    return [float(weight) for weight in found if weight is not None]


def adam_state(context: AnalysisContext, blocks: Blocks) -> AdamState | None:
    """The last state of AdamW, from the file `optimizer_state`: safetensors with NAME/exp_avg,
    NAME/exp_avg_sq and NAME/step, as a checkpoint of a job has them under `adam/`. None without
    the file; raises AnalysisError where it does not fit."""
    path = context.files.get(OPTIMIZER_FILE)
    if path is None:
        return None
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise AnalysisError(f"{OPTIMIZER_FILE}: cannot be read: {error}", OPTIMIZER_FILE) from error
    first, second, step = [], [], 0
    for block in blocks:
        start = f"adam/{block.name}.weight"
        if f"{start}/exp_avg_sq" not in tensors:
            start = start.removeprefix("adam/")
        try:
            moments = [tensors[f"{start}/{field}"] for field in ("exp_avg", "exp_avg_sq")]
            step = int(tensors[f"{start}/step"])
        except KeyError as error:
            raise AnalysisError(
                f"{OPTIMIZER_FILE}: has no {error.args[0]}; give the state of this adapter's last "
                "checkpoint",
                OPTIMIZER_FILE,
            ) from error
        if moments[1].shape != block.weight.shape or step < 1:
            raise AnalysisError(
                f"{OPTIMIZER_FILE}: does not fit {block.name}; is it of this adapter?",
                OPTIMIZER_FILE,
            )
        device = block.weight.device
        first.append(moments[0].flatten().float().to(device))
        second.append(moments[1].flatten().float().to(device))
    return AdamState(first, second, step)
