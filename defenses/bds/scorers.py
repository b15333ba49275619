"""Scorers f_phi: networks that read a training row and give its logit (amortised BDS).

Every scorer takes the features of B rows and returns logits [B]. A scorer reads the tokens of its
own tokenizer, never those of the model that is tuned: the release does the latter, and the ids
then stand for other words. Weights are drawn from a passed generator; the global one is untouched.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from defenses.method import MethodError, RowFeatures

ScorerKind = Literal["tokens", "embedding", "causal_lm"]


class PaddedTokens(NamedTuple):
    """Ids int64 [B, T], padded with 0 on the right, and where they are real, bool [B, T]."""

    tokens_BT: Tensor
    real_BT: Tensor


class Scorer(nn.Module):
    """f_phi. kind and sizes() are enough to build it again before its weights are loaded."""

    kind: ClassVar[ScorerKind]
    reads: ClassVar[Literal["tokens", "embeddings"]]
    rows_per_pass: ClassVar[int]

    def sizes(self) -> dict[str, Any]:
        """What the architecture depends on, JSON-serialisable."""
        raise NotImplementedError

    def forward(self, rows: RowFeatures) -> Tensor:
        """Logits [B] of the B rows."""
        raise NotImplementedError


class TokenScorer(Scorer):
    """A small network over token ids: f(z) = w . mean_t tanh(W e(z_t) + b) + c.

    Embedding, hidden layer and pooled vector all have `width` entries; the mean is over the row's
    own tokens. Ids from `vocabulary` on share one more, last embedding.
    """

    kind = "tokens"
    reads = "tokens"
    rows_per_pass = 256

    def __init__(self, vocabulary: int, generator: torch.Generator, width: int = 32) -> None:
        super().__init__()
        self.vocabulary, self.width = vocabulary, width
        self.embedding = nn.Embedding(vocabulary + 1, width, device="meta").to_empty(device="cpu")
        nn.init.normal_(self.embedding.weight, generator=generator)
        self.hidden = _linear(width, width, generator)
        self.head = _linear(width, 1, generator)

    def sizes(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary, "width": self.width}

    def forward(self, rows: RowFeatures) -> Tensor:
        tokens_BT, real_BT = padded_tokens(_tokens(rows), self.head.weight.device)
        embedded_BTD = self.embedding(tokens_BT.clamp(max=self.vocabulary))
        hidden_BTD = torch.tanh(self.hidden(embedded_BTD))
        return _score(self.head, masked_mean(hidden_BTD, real_BT))


class EmbeddingScorer(Scorer):
    """A head over cached sentence embeddings: f(z) = w . tanh(W x + b) + c, x = e / rms(e).

    The embedder is frozen and long gone; only the head is trained. Scaling x to root mean square 1
    makes the start independent of the embedder's own scale (derived).
    """

    kind = "embedding"
    reads = "embeddings"
    rows_per_pass = 4096

    def __init__(self, dimension: int, generator: torch.Generator, width: int = 64) -> None:
        super().__init__()
        self.dimension, self.width = dimension, width
        self.hidden = _linear(dimension, width, generator)
        self.head = _linear(width, 1, generator)

    def sizes(self) -> dict[str, Any]:
        return {"dimension": self.dimension, "width": self.width}

    def forward(self, rows: RowFeatures) -> Tensor:
        if rows.embeddings_ND is None:
            raise MethodError("an embedding scorer needs sentence embeddings of the rows")
        e_BD = rows.embeddings_ND.to(self.head.weight)
        rms_B1 = e_BD.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
        return _score(self.head, torch.tanh(self.hidden(e_BD / rms_B1)))


class CausalLmScorer(Scorer):
    """A causal language model without its vocabulary head: f(z) = w . mean_t h_t(z) + c.

    model: a transformers causal model or its bare backbone; turned to float32, all weights
    trainable, without dropout. h_t: last hidden states at positions 0..len-1. The paper's
    architecture (arXiv 2510.27172); the bias c is inert under the batch softmax.
    """

    kind = "causal_lm"
    reads = "tokens"
    rows_per_pass = 32

    def __init__(self, model: Any, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone: Any = getattr(model, "base_model", model).float().requires_grad_(True).eval()
        self.head = _linear(self.backbone.config.hidden_size, 1, generator)
        self.head.to(next(self.backbone.parameters()).device)

    def sizes(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.backbone.config.to_json_string())
        return {"config": config}

    def forward(self, rows: RowFeatures) -> Tensor:
        tokens_BT, real_BT = padded_tokens(_tokens(rows), self.head.weight.device)
        hidden_BTD: Tensor = self.backbone(
            input_ids=tokens_BT, attention_mask=real_BT.to(torch.int64), use_cache=False
        ).last_hidden_state
        return _score(self.head, masked_mean(hidden_BTD, real_BT))


def new_scorer(kind: ScorerKind, features: RowFeatures, seed: int) -> Scorer:
    """A fresh scorer that fits the features; raises MethodError where they do not fit.

    tokens: the vocabulary ends at the largest id of the set. A causal_lm needs its backbone, so
    the caller builds that one.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "embedding":
        if features.embeddings_ND is None:
            raise MethodError("an embedding scorer needs sentence embeddings of the rows")
        return EmbeddingScorer(features.embeddings_ND.shape[1], generator)
    if kind == "tokens":
        largest = max((max(row, default=0) for row in _tokens(features)), default=0)
        return TokenScorer(largest + 1, generator)
    raise MethodError(
        "a causal_lm scorer is made from a loaded model: pass CausalLmScorer(model, generator)"
    )


def empty_scorer(kind: ScorerKind, sizes: dict[str, Any]) -> Scorer:
    """A scorer of these sizes whose weights are yet to be loaded; the global generator is kept."""
    generator = torch.Generator()
    if kind == "tokens":
        return TokenScorer(sizes["vocabulary"], generator, sizes["width"])
    if kind == "embedding":
        return EmbeddingScorer(sizes["dimension"], generator, sizes["width"])
    from transformers import AutoConfig, AutoModel

    with torch.random.fork_rng(devices=[]):
        backbone = AutoModel.from_config(AutoConfig.for_model(**sizes["config"]))
    return CausalLmScorer(backbone, generator)


def rows_of(features: RowFeatures, row_ids_B: Tensor) -> RowFeatures:
    """The features of the given rows, in their order."""
    return RowFeatures(
        tokenizer=features.tokenizer,
        embeddings_ND=None
        if features.embeddings_ND is None
        else features.embeddings_ND[row_ids_B.to(features.embeddings_ND.device)],
        tokens=None
        if features.tokens is None
        else [features.tokens[row_id] for row_id in row_ids_B.tolist()],
    )


def padded_tokens(tokens: Sequence[Sequence[int]], device: torch.device) -> PaddedTokens:
    """B sequences as one rectangle. Raises MethodError for a row without tokens."""
    lengths = [len(row) for row in tokens]
    if min(lengths, default=0) == 0:
        raise MethodError("a scorer needs at least one token of every row; drop empty rows first")
    tokens_BT = torch.zeros((len(tokens), max(lengths)), dtype=torch.int64)
    for index, row in enumerate(tokens):
        tokens_BT[index, : lengths[index]] = torch.as_tensor(row, dtype=torch.int64)
    real_BT = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    return PaddedTokens(tokens_BT.to(device), real_BT.to(device))


def masked_mean(hidden_BTD: Tensor, real_BT: Tensor) -> Tensor:
    """Mean over the real positions of each row, [B, D]."""
    real_BT1 = real_BT.unsqueeze(-1).to(hidden_BTD)
    return (hidden_BTD * real_BT1).sum(dim=1) / real_BT1.sum(dim=1)


def _tokens(rows: RowFeatures) -> Sequence[Sequence[int]]:
    if rows.tokens is None:
        raise MethodError("this scorer needs the token ids of the rows, from its own tokenizer")
    return rows.tokens


def _score(head: nn.Module, pooled_BD: Tensor) -> Tensor:
    score_B1: Tensor = head(pooled_BD)
    return score_B1.squeeze(-1)


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A linear layer with weights and bias from U(-1/sqrt(inputs), 1/sqrt(inputs))."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    bound = 1.0 / math.sqrt(inputs)
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return layer
