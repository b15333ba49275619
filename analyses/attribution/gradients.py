"""Every row's gradient of a LoRA adapter in one backward pass for a batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from analyses.attribution.rows import IGNORED, EncodedRow, TokenBatch, batches, collate
from analyses.context import AnalysisError

Blocks = Sequence["Block"]
# One tensor a block: [D, size] for D directions.
BlockVectors = list[Tensor]
Take = Callable[[int, Tensor], None]


class Block(NamedTuple):
    """The weight of one linear layer, [out, in]: of LoRA, an A or a B."""

    name: str
    module: nn.Linear

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def size(self) -> int:
        return self.module.weight.numel()


def linear_blocks(model: nn.Module) -> tuple[Block, ...]:
    """Every linear layer of a plain network, for use without an adapter."""
    return tuple(
        Block(name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    )


def lora_blocks(model: nn.Module) -> tuple[Block, ...]:
    """The A and B of every adapted layer, by name.

    Raises AnalysisError: no adapter, or one with parts that are not linear layers of LoRA.
    """
    blocks = [
        Block(name, module)
        for name, module in model.named_modules()
        if (".lora_A." in name or ".lora_B." in name) and isinstance(module, nn.Linear)
    ]
    if not blocks:
        raise AnalysisError(
            "the job has no LoRA adapter: there is nothing that its rows could have changed", "job"
        )
    known = {f"{block.name}.weight" for block in blocks}
    for name, _ in model.named_parameters():
        if name not in known and ("lora_" in name or "modules_to_save" in name):
            raise AnalysisError(
                f"the adapter has a part that is no linear layer of LoRA ({name}); only plain LoRA "
                "is supported",
                "job",
            )
    return tuple(blocks)


class _Tap(torch.autograd.Function):
    """Identity that hands on the gradient of its input. The probe makes the output need one though
    no weight does, so that autograd never forms the batch's own weight gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, probe: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.take(gradients[0])
        return gradients[0], None, None


@contextmanager
def _tapped(blocks: Blocks, take: Take) -> Iterator[None]:
    handles = []
    probe = torch.zeros((), device=blocks[0].weight.device, requires_grad=True)
    frozen = [block.weight.requires_grad for block in blocks]

    def hook(index: int) -> Callable[..., Tensor]:
        def tap(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = inputs[0].detach()

            def arrived(g: Tensor) -> None:
                take(index, _products(x, g))

            tapped: Tensor = _Tap.apply(output, probe, arrived)  # type: ignore[no-untyped-call]
            return tapped

        return tap

    for index, block in enumerate(blocks):
        block.weight.requires_grad_(False)
        handles.append(block.module.register_forward_hook(hook(index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block, asked in zip(blocks, frozen, strict=True):
            block.weight.requires_grad_(asked)


def _products(x: Tensor, g: Tensor) -> Tensor:
    """dW_i = g_i' x_i as [B, out * in], float32 or wider; x [B, (T,) in], g [B, (T,) out]."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    g = g.to(x.dtype)
    product = torch.einsum("bo,bi->boi", g, x) if x.dim() == 2 else torch.bmm(g.mT, x)
    return product.flatten(1)


def row_gradients(blocks: Blocks, row_losses: Callable[[], Tensor], take: Take) -> Tensor:
    """One forward and backward pass: calls take(block index, G [B, size]) for every block.

    row_losses gives one loss a row, [B]; a row's loss must not depend on other rows. Then
    G[i] = d loss_i / d W = sum_t g_it x_it' with x the layer's input and g the gradient at its
    output, of the backward pass on the sum of the losses. Returns the losses, detached. Layers that
    act on a row must see it as one entry of the first axis. Source: the brief, 2.4.
    """
    with _tapped(blocks, take), torch.enable_grad():
        losses_B = row_losses()
        losses_B.sum().backward()  # type: ignore[no-untyped-call]
    return losses_B.detach()


def answer_logits(model: Any, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [n, V] in float32 or wider, their tokens [n], their rows [n]) at the trained tokens
    alone: the vocabulary's matrix meets no other position."""
    keep_BT = torch.zeros_like(batch.labels_BT, dtype=torch.bool)
    keep_BT[:, :-1] = batch.labels_BT[:, 1:] != IGNORED
    tokens = batch.labels_BT[:, 1:][keep_BT[:, :-1]]
    rows = keep_BT.nonzero()[:, 0]
    head = model.get_output_embeddings()
    handle = None
    if isinstance(head, nn.Linear):

        def gather(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0][keep_BT], *inputs[1:])

        handle = head.register_forward_pre_hook(gather)
    try:
        logits = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, use_cache=False).logits
    finally:
        if handle is not None:
            handle.remove()
    if logits.dim() == 3:
        logits = logits[keep_BT]
    return (logits if logits.dtype == torch.float64 else logits.float()), tokens, rows


def completion_losses(model: Any, batch: TokenBatch) -> Tensor:
    """Mean negative log-likelihood of each row's own trained tokens, nats, [B]."""
    logits, tokens, rows = answer_logits(model, batch)
    nll = functional.cross_entropy(logits, tokens, reduction="none")
    sums_B = torch.zeros(len(batch.ids_BT), dtype=nll.dtype, device=nll.device)
    counts_B = torch.bincount(rows, minlength=len(sums_B)).clamp(min=1)
    return sums_B.index_add(0, rows, nll) / counts_B


def stacked_gradients(
    model: Any, blocks: Blocks, rows: Sequence[EncodedRow], batch_size: int
) -> tuple[BlockVectors, Tensor]:
    """(gradients by block, each [R, size], losses [R]) of a few rows, kept in memory."""
    kept = [block.weight.new_zeros((len(rows), block.size)) for block in blocks]
    losses_R = torch.zeros(len(rows))
    for chosen in batches(rows, batch_size):
        batch = collate([rows[index] for index in chosen], blocks[0].weight.device)

        def take(block: int, gradient_BP: Tensor, chosen: list[int] = chosen) -> None:
            kept[block][chosen] = gradient_BP.to(kept[block].dtype)

        losses = row_gradients(blocks, partial(completion_losses, model, batch), take)
        losses_R[chosen] = losses.float().cpu()
    return kept, losses_R


class PassResult(NamedTuple):
    """What one pass over the rows found; memory grows with N only by these numbers.

    dots_DN: inner product of direction and row. block_dots_NM: the same by block for the direction
    asked for. mean_gradient: by block, of all rows. mean_square_M: mean over rows and entries of
    g^2, by block. norms_N, losses_N.
    """

    dots_DN: Tensor
    block_dots_NM: Tensor
    norms_N: Tensor
    losses_N: Tensor
    mean_gradient: BlockVectors
    mean_square_M: Tensor

    def mean_square(self, blocks: Blocks) -> float:
        """lambda0 of the brief: mean over rows and all entries of g^2."""
        sizes = torch.tensor([block.size for block in blocks], dtype=torch.float64)
        return float((self.mean_square_M * sizes).sum() / sizes.sum())

    @property
    def gradient_ratio(self) -> float:
        """|grad R| / mean |g_i|."""
        norm = float(torch.stack([part.double().norm() for part in self.mean_gradient]).norm())
        mean = float(self.norms_N.double().mean())
        return norm / mean if mean > 0 else 0.0


def pass_over_rows(
    model: Any,
    blocks: Blocks,
    rows: Sequence[EncodedRow],
    directions: BlockVectors,
    *,
    batch_size: int,
    detail: int = 0,
    also: Callable[[Sequence[int], int, Tensor], None] | None = None,
    each: Callable[[int], None] = lambda done: None,
) -> PassResult:
    """Stream all rows once against D directions, each given by block as [D, size].

    detail: the direction whose inner products are kept by block. also(rows, block, G): sees every
    gradient, for a store. each(done): after a batch; it may raise to stop.
    """
    count, wide = directions[0].shape[0], len(blocks)
    dots_DN = torch.zeros((count, len(rows)), dtype=torch.float64)
    block_dots_NM = torch.zeros((len(rows), wide))
    squares_NM = torch.zeros((len(rows), wide), dtype=torch.float64)
    losses_N = torch.zeros(len(rows))
    mean = [torch.zeros_like(block.weight).flatten() for block in blocks]
    done = 0
    for chosen in batches(rows, batch_size):
        batch = collate([rows[index] for index in chosen], blocks[0].weight.device)

        def take(block: int, gradient_BP: Tensor, chosen: list[int] = chosen) -> None:
            dots_DB = (directions[block].to(gradient_BP.dtype) @ gradient_BP.T).double().cpu()
            dots_DN[:, chosen] += dots_DB
            if count:
                block_dots_NM[chosen, block] += dots_DB[detail].float()
            size_B = torch.linalg.vector_norm(gradient_BP, dim=1)
            squares_NM[chosen, block] += size_B.double().square().cpu()
            mean[block] += gradient_BP.sum(0).to(mean[block].dtype)
            if also is not None:
                also(chosen, block, gradient_BP)

        losses = row_gradients(blocks, partial(completion_losses, model, batch), take)
        losses_N[chosen] = losses.float().cpu()
        done += len(chosen)
        each(done)
    sizes_M = torch.tensor([block.size for block in blocks], dtype=torch.float64)
    return PassResult(
        dots_DN,
        block_dots_NM,
        squares_NM.sum(1).sqrt(),
        losses_N,
        [part / len(rows) for part in mean],
        squares_NM.mean(0) / sizes_M,
    )


@torch.no_grad()
def directional_differences(
    model: Any,
    blocks: Blocks,
    rows: Sequence[EncodedRow],
    direction: BlockVectors,
    *,
    batch_size: int,
    step: float = 1e-2,
) -> Tensor:
    """x . g_i by two forward passes: [L_i(theta + e x) - L_i(theta - e x)] / (2 e), e |x| = step.

    direction: by block, [1, size]. Needs float32; relative error about 1e-3. The brief, 2.4.
    """
    norm = float(torch.stack([part.double().norm() for part in direction]).norm())
    e = step / norm
    kept = [block.weight.detach().clone() for block in blocks]
    sides = []
    try:
        for sign in (1.0, -1.0):
            for block, start, part in zip(blocks, kept, direction, strict=True):
                block.weight.copy_(start + sign * e * part.view_as(start))
            losses_N = torch.zeros(len(rows), dtype=torch.float64)
            for chosen in batches(rows, batch_size):
                batch = collate([rows[i] for i in chosen], blocks[0].weight.device)
                losses_N[chosen] = completion_losses(model, batch).double().cpu()
            sides.append(losses_N)
    finally:
        for block, start in zip(blocks, kept, strict=True):
            block.weight.copy_(start)
    return (sides[0] - sides[1]) / (2 * e)
