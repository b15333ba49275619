"""The embedded scorer's files, and the card that tells its error rates; loads nothing heavy."""

import hashlib
import json
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

SCORER_ID = "embedded-minilm-tfidf"
WEIGHTS_FILE = "embedded.safetensors"
VOCABULARY_FILE = "embedded.vocabulary.json"
CARD_FILE = "embedded.json"


class ScorerDamagedError(RuntimeError):
    """The scorer's files are missing, incomplete, altered, or made for another embedder."""


def scorer_folder(folder: Path | None = None) -> Traversable:
    """The folder itself, or that of the packaged scorer."""
    return folder or resources.files("evaluators.harmfulness") / "weights"


def read_card(folder: Path | None = None) -> dict[str, Any]:
    """The card in a scorer's folder; None: the packaged scorer's.

    Raises ScorerDamagedError where there is no readable card of this kind of scorer.
    """
    data = read_file(CARD_FILE, folder)
    try:
        card = json.loads(data)
        found = card["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise ScorerDamagedError(
            f"{CARD_FILE} is not a scorer's card: {_remedy(folder)}"
        ) from error
    if found != SCORER_ID:
        raise ScorerDamagedError(
            f"{CARD_FILE} is of the scorer {found!r}, this version reads {SCORER_ID!r}: "
            f"{_remedy(folder)}"
        )
    return dict(card)


def read_file(name: str, folder: Path | None = None, *, sha256: str | None = None) -> bytes:
    """A file of the scorer; raises ScorerDamagedError where it is missing or has another hash."""
    try:
        data = (scorer_folder(folder) / name).read_bytes()
    except OSError as error:
        raise ScorerDamagedError(f"{name} of the scorer is missing: {_remedy(folder)}") from error
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and digest != sha256:
        raise ScorerDamagedError(
            f"{name} has sha256 {digest}, the scorer's card says {sha256}: {_remedy(folder)}"
        )
    return data


def _remedy(folder: Path | None) -> str:
    return "reinstall tunegate" if folder is None else f"fit the scorer in {folder} again"
