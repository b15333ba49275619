"""What a folder in sentence-transformers' layout says about its model."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

_STEPS = (("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize"))
_MAX_CONFIG_BYTES = 1 << 20


class UnsupportedEmbedderError(ValueError):
    """A folder that is no sentence embedder this package can run; the message says why."""


class SentenceFolder(NamedTuple):
    """Where the transformer lies, how texts are prepared for it, and what its weights are."""

    transformer: Path
    max_tokens: int | None
    lower_case: bool
    weights_sha256: str


def read_sentence_folder(folder: Path) -> SentenceFolder:
    """Read modules.json, the pooling config and sentence_bert_config.json of `folder`.

    Only mean pooling over the mask is read, alone or followed by normalisation, with weights as
    safetensors: other steps (dense layers, a prompt before each text) would be left out silently.
    Raises UnsupportedEmbedderError.
    """
    modules = _json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(part, dict) for part in modules):
        raise UnsupportedEmbedderError(f"{folder}/modules.json is not a list of modules")
    kinds = tuple(str(part.get("type", "")).rpartition(".")[2] for part in modules)
    if kinds not in _STEPS:
        raise UnsupportedEmbedderError(
            f"{folder} is a pipeline of {', '.join(kinds) or 'nothing'}: only Transformer, Pooling "
            "and Normalize can be run"
        )
    transformer, pooling = (_inside(folder, part) for part in modules[:2])
    _check_pooling(_json(pooling / "config.json"), folder)
    _check_prompt(folder)
    bert = transformer / "sentence_bert_config.json"
    about = _json(bert) if bert.is_file() else {}
    longest = about.get("max_seq_length") if isinstance(about, dict) else None
    weights = sorted(transformer.glob("*.safetensors"))
    if not weights:
        raise UnsupportedEmbedderError(
            f"{transformer} has no *.safetensors file: other weight formats can carry code and are "
            "not loaded"
        )
    digest = hashlib.sha256()
    for path in weights:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return SentenceFolder(
        transformer=transformer,
        max_tokens=longest if isinstance(longest, int) and longest > 0 else None,
        lower_case=isinstance(about, dict) and bool(about.get("do_lower_case")),
        weights_sha256=digest.hexdigest(),
    )


def _check_pooling(config: Any, folder: Path) -> None:
    if not isinstance(config, dict):
        raise UnsupportedEmbedderError(f"the pooling config of {folder} is not a JSON object")
    modes = {
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value is True
    }
    if isinstance(config.get("pooling_mode"), str):
        modes.add(config["pooling_mode"])
    if not modes or not modes <= {"mean", "mean_tokens"}:
        raise UnsupportedEmbedderError(
            f"{folder} pools by {', '.join(sorted(modes)) or 'an unnamed rule'}: only mean pooling "
            "can be run"
        )


def _check_prompt(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    config = _json(path) if path.is_file() else {}
    if isinstance(config, dict) and config.get("default_prompt_name"):
        raise UnsupportedEmbedderError(
            f"{folder} puts the prompt {config['default_prompt_name']!r} before every text, which "
            "cannot be run"
        )


def _inside(folder: Path, module: dict[str, Any]) -> Path:
    path = folder / str(module.get("path", ""))
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UnsupportedEmbedderError(f"{folder}/modules.json names a path outside the folder")
    return path


def _json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
        if len(content) > _MAX_CONFIG_BYTES:
            raise ValueError("it is too large")
        return json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"is unusable: {error}"
        raise UnsupportedEmbedderError(f"{path} {reason}") from error
