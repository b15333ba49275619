"""The very files that a gate run judges, hashed before they are read and after the verdict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoTokenizer

from jobspec.catalogue import BaseModelEntry, FolderSource, HubSource
from workers.pipeline.bundle import ADAPTER, ADAPTER_CONFIG
from workers.pipeline.failure import PipelineFailure, is_storage_full
from workers.pipeline.hashing import file_sha256, text_sha256
from workers.pipeline.models import model_folder

WEIGHTS = ".safetensors"
# Whatever else may change an answer: settings, tokenizer, chat template.
_SETTINGS = (".json", ".jinja", ".model", ".txt")


class Artifact(NamedTuple):
    """files: SHA-256 by name of all that decides how the model answers."""

    kind: Literal["adapter", "model"]
    folder: Path
    files: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """The hash of the weights file; of several files, the hash over their names and hashes."""
        weights = {name: sha for name, sha in self.files.items() if name.endswith(WEIGHTS)}
        if self.kind == "adapter":
            return weights[ADAPTER]
        return text_sha256("".join(f"{name} {sha}\n" for name, sha in sorted(weights.items())))

    def key(self) -> str:
        """Names what this artifact answered, in the folder of kept answers."""
        return text_sha256(repr(sorted(self.files.items())))

    def report(self) -> dict[str, Any]:
        """The block of report.json."""
        return {
            "kind": self.kind,
            f"{self.kind}_sha256": self.sha256,
            "files": dict(sorted(self.files.items())),
        }

    def check_unchanged(self) -> None:
        """Raises PipelineFailure(model_unavailable) when a file is not the one that was hashed."""
        now = _hashes(self.folder, self.kind)
        for name in sorted({*self.files, *now}):
            if self.files.get(name) != now.get(name):
                raise _unavailable(
                    f"{name} changed while the model was judged. Nothing was decided; run the "
                    "gate again."
                )


def adapter_artifact(folder: Path) -> Artifact:
    """A peft adapter. Raises PipelineFailure(model_unavailable) without weights in safetensors."""
    for name in (ADAPTER, ADAPTER_CONFIG):
        if not (folder / name).is_file():
            raise _unavailable(f"The adapter folder {folder} has no {name}.")
    return Artifact("adapter", folder, _hashes(folder, "adapter"))


def model_artifact(folder: Path) -> Artifact:
    """A whole model. Raises PipelineFailure(model_unavailable) without weights in safetensors."""
    files = _hashes(folder, "model")
    if not any(name.endswith(WEIGHTS) for name in files):
        raise _unavailable(
            f"The model folder {folder} has no weights as safetensors. Other formats may hold code "
            "and are not read; save the model with safetensors."
        )
    return Artifact("model", folder, files)


def local_entry(entry: BaseModelEntry, cache_dir: Path) -> BaseModelEntry:
    """The entry with its files in a folder of this machine, fetched or converted where needed.

    Raises PipelineFailure(model_unavailable).
    """
    if isinstance(entry.source, HubSource):
        folder = _snapshot(entry, entry.source)
    else:
        folder = Path(model_folder(entry, cache_dir)[0])
    return entry.model_copy(update={"source": FolderSource(path=folder), "aligned_from": None})


def load_adapter(model: Any, artifact: Artifact) -> Any:
    """`model` with the artifact's adapter on it, which can be switched off.

    Raises PipelineFailure(model_unavailable) where it does not fit, also where only some of its
    tensors do: peft would leave the others out, and something else would be judged.
    """
    try:
        adapted = PeftModel.from_pretrained(model, str(artifact.folder), is_trainable=False)
        found = set_peft_model_state_dict(adapted, load_file(artifact.folder / ADAPTER))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        if is_storage_full(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _unavailable(
            f"The adapter in {artifact.folder} does not fit the model: {reason}"
        ) from error
    prefix = getattr(adapted.base_model, "prefix", "lora_")
    absent = [name for name in found.missing_keys if prefix in name]
    if absent or found.unexpected_keys:
        name = (absent or found.unexpected_keys)[0]
        raise _unavailable(
            f"The adapter in {artifact.folder} does not fit the model: {name} has no counterpart. "
            "Name the model that it was tuned on."
        )
    return adapted.eval()


def load_tokenizer(entry: BaseModelEntry) -> Any:
    """The tokenizer of an entry that `local_entry` made. Raises PipelineFailure."""
    assert isinstance(entry.source, FolderSource)
    try:
        return AutoTokenizer.from_pretrained(entry.source.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _unavailable(f"The tokenizer of {entry.name} cannot be loaded: {reason}") from error


def _hashes(folder: Path, kind: Literal["adapter", "model"]) -> dict[str, str]:
    if kind == "adapter":
        paths = [folder / ADAPTER, folder / ADAPTER_CONFIG]
    else:
        kinds = (WEIGHTS, *_SETTINGS)
        paths = [path for path in folder.glob("*") if path.suffix in kinds]
    return {path.name: file_sha256(path) for path in paths if path.is_file()}


def _snapshot(entry: BaseModelEntry, source: HubSource) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in (WEIGHTS, *_SETTINGS)]
    try:
        return Path(
            snapshot_download(source.repository, revision=source.revision, allow_patterns=patterns)
        )
    except (OSError, ValueError) as error:
        if is_storage_full(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _unavailable(f"The model {entry.name} cannot be fetched: {reason}") from error


def _unavailable(message: str) -> PipelineFailure:
    return PipelineFailure("model_unavailable", message)
