"""Loads a guard model that a preset names."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evaluators.guards.adapter import GuardModel
from evaluators.guards.config import GuardConfig
from evaluators.guards.presets import preset


class GuardUnavailableError(RuntimeError):
    """The guard model cannot be loaded; the message says from where and what to do."""


def load_guard(
    name: str,
    *,
    model: str | None = None,
    threshold: float | None = None,
    batch_size: int = 8,
    device: str = "auto",
) -> GuardModel:
    """The preset's model, from `model` (a local folder or hub id) or from the preset's own id.

    Weights keep the type of their checkpoint. Code from a model's repository is never run. Hosts of
    the judge: none for a local folder or offline; the hub's where files may have come from it.
    Raises UnknownPresetError, GuardUnavailableError and GuardMismatchError.
    """
    found = preset(name)
    source = model or found.config.model_id
    if source is None:
        raise GuardUnavailableError(
            f"the preset {name} is for any strong model: name one in judge.model"
        )
    try:
        loaded, tokenizer, chat = _load(found.config, source)
        loaded.to(_device(device))
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise GuardUnavailableError(
            f"cannot load the guard model {source} ({type(error).__name__}): set judge.model to a "
            "local folder with weights and tokenizer; gated models need their licence accepted "
            "first"
        ) from error
    return GuardModel(
        found.config,
        loaded,
        tokenizer,
        id=f"guard-{name}",
        chat=chat,
        threshold=threshold,
        batch_size=batch_size,
        card={**found.card, "model": source},
        hosts=contacted_hosts(source),
    )


def _load(config: GuardConfig, source: str) -> tuple[Any, Any, Any]:
    import transformers

    if config.image_text:
        chat = transformers.AutoProcessor.from_pretrained(source)
        tokenizer = chat.tokenizer
        kind: Any = transformers.AutoModelForImageTextToText
    else:
        tokenizer = chat = transformers.AutoTokenizer.from_pretrained(source)
        kind = (
            transformers.AutoModelForSequenceClassification
            if config.family == "sequence_classifier"
            else transformers.AutoModelForCausalLM
        )
    arguments: dict[str, Any] = {}
    if config.text_config_defaults:
        settings = transformers.AutoConfig.from_pretrained(source)
        text_settings = settings.get_text_config()
        for key, value in config.text_config_defaults.items():
            if getattr(text_settings, key, None) is None:
                setattr(text_settings, key, value)
        arguments["config"] = settings
    return kind.from_pretrained(source, dtype="auto", **arguments), tokenizer, chat


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def contacted_hosts(source: str) -> tuple[str, ...]:
    """The model hub's host, unless `source` is a folder or the hub client is set offline."""
    from huggingface_hub import constants

    if Path(source).is_dir() or constants.HF_HUB_OFFLINE:
        return ()
    host = urlsplit(constants.ENDPOINT).hostname
    return () if host is None else (host,)
