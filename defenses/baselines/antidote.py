"""Antidote: the weights that matter most for harmful rows are set to zero."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from defenses.losses import response_nll_B
from defenses.method import MethodError

TokenBatch = tuple[Tensor, Tensor, Tensor]


class Antidote(NamedTuple):
    """delta: -W at pruned entries, 0 elsewhere, by parameter name. pruned: entries of each tensor.

    rows: harmful rows read. harmful_loss: their mean loss before pruning, nats a token. complete:
    False if `stop` ended the pass early; delta is empty then.
    """

    delta: dict[str, Tensor]
    pruned: dict[str, int]
    rows: int
    harmful_loss: float
    complete: bool


def wanda_scores(weight: Tensor, input_norm: Tensor) -> Tensor:
    """score_ij = |W_ij| * ||X_j||_2. weight: [out, in]; input_norm: [in], over rows and tokens.

    Raises ValueError for shapes that do not fit. Source: Wanda, as used by arXiv 2408.09600.
    """
    if weight.dim() != 2 or input_norm.shape != weight.shape[1:]:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} has no scores under input norms of shape "
            f"{tuple(input_norm.shape)}; give [out, in] and [in]"
        )
    return weight.detach().abs() * input_norm.detach().to(weight)


def prune_mask(scores: Tensor, share: float, *, per_row: bool = True) -> Tensor:
    """True where a weight is pruned: the ceil(share * n) largest scores. bool, the shape of scores.

    per_row: n = in, each output row by itself, as the release does (which keeps floor((1 - share)
    n) of a row, so even a short row loses one entry); else n = out * in, one ranking of the whole
    matrix. Of equal scores the first counts as larger. Raises ValueError for a share outside
    [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must lie in [0, 1], got {share}")
    ranked = scores.detach() if per_row else scores.detach().reshape(1, -1)
    count = math.ceil(share * ranked.shape[1] - 1e-9)
    order = torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, :count]
    mask = torch.zeros(ranked.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter(1, order, True).reshape(scores.shape)


def antidote_delta(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    batches: Iterable[TokenBatch],
    share: float,
    stop: Callable[[], bool] = lambda: False,
) -> Antidote:
    """What takes the adapter's most harmful weights away: w + delta has them at 0.

        A [r, in]:  score = |A_ij| ||x_j||,  x the module's input
        B [out, r]: score = |B_ij| ||z_j||,  z = A x
        norms over all attended tokens of the harmful rows; per-row share pruned

    batches: (input ids, attention mask, labels), int64 [B, T], of harmful rows. Only matrices of
    linear layers are pruned; the rest of `parameters` is left out. The model is read in evaluation
    mode, without gradients, and left in the mode it had. `stop` is asked before every batch.

    Raises MethodError for an empty harmful set or a model without adapted linear layers, and
    UnsupervisedRowError. Source: Antidote, arXiv 2408.09600, whose release prunes LoRA factors in
    this way; simplified: the paper's equation is for full weight matrices (wanda_scores and
    prune_mask serve those). Leaving padding out of the norms is derived.
    """
    layers = _linear_layers(model, parameters)
    squares = {
        name: torch.zeros(layer.in_features, dtype=torch.float64, device=layer.weight.device)
        for name, layer in layers.items()
    }
    rows, loss_sum = 0, 0.0
    training = model.training
    model.eval()
    try:
        for ids_BT, mask_BT, labels_BT in batches:
            if stop():
                return Antidote({}, {}, rows, loss_sum / max(rows, 1), complete=False)
            with torch.no_grad(), _collecting(layers, squares, mask_BT.bool()):
                loss_B = response_nll_B(model, ids_BT, mask_BT, labels_BT)
            rows += int(loss_B.numel())
            loss_sum += float(loss_B.double().sum())
    finally:
        model.train(training)
    if rows == 0:
        raise MethodError("antidote needs harmful rows to find the weights that serve them")
    delta, pruned = {}, {}
    for name, square in squares.items():
        weight = parameters[name].detach()
        scores = wanda_scores(weight.double(), square.sqrt())
        mask = prune_mask(scores, share)
        delta[name] = torch.where(mask, -weight, 0.0)
        pruned[name] = int(mask.sum())
    return Antidote(delta, pruned, rows, loss_sum / rows, complete=True)


def _linear_layers(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, nn.Linear]:
    owners = {id(module.weight): module for module in model.modules() if type(module) is nn.Linear}
    found = {name: owners[id(p)] for name, p in parameters.items() if id(p) in owners}
    if not found:
        raise MethodError(
            "antidote found no linear layer among the trainable parameters; it prunes LoRA "
            "adapters of linear layers"
        )
    return found


@contextmanager
def _collecting(
    layers: Mapping[str, nn.Linear], squares: Mapping[str, Tensor], attended_BT: Tensor
) -> Iterator[None]:
    """Adds the squared inputs of attended tokens to `squares` while the block runs."""

    def collect(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            x_BTD = inputs[0].detach()
            # Where the model's head is adapted too, it sees supervised tokens only: [1, M, D].
            if x_BTD.shape[:-1] == attended_BT.shape:
                x_BTD = x_BTD[attended_BT.to(x_BTD.device)]
            squares[name].add_(x_BTD.reshape(-1, x_BTD.shape[-1]).double().square().sum(dim=0))

        return hook

    handles = [layer.register_forward_pre_hook(collect(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
