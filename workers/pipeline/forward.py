"""A step's rows through the model: in one forward pass, or in two where that saves padding.

All rows of one pass are padded to the longest. A step that reads two sets joins rows of two length
distributions, and no order of the streams brings those together: with 8 refusals of about 40 tokens
beside 8 chat rows of about 90, 35 % of one pass is padding, 11 % of two. Losses and gradients are
the same but for rounding, and both passes are differentiated together.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from defenses.losses import ResponseScores, response_nll_and_accuracy_B
from workers.pipeline.rows import TokenRow, collate

SAVING = 0.15


def length_groups(lengths: Sequence[int], saving: float = SAVING) -> list[list[int]]:
    """Places of the rows of each forward pass: all in one, in the given order, unless two passes
    read fewer padded tokens by at least the share `saving`; then shorter rows and longer rows,
    each in the given order.

    One pass reads n * max_i L_i tokens; two read k * L_(k) + (n - k) * L_(n) with L sorted, at the
    best k. Derived.
    """
    count = len(lengths)
    ranked = sorted(range(count), key=lambda place: lengths[place])
    whole = count * lengths[ranked[-1]]

    def split_cost(k: int) -> int:
        return k * lengths[ranked[k - 1]] + (count - k) * lengths[ranked[-1]]

    best = min(range(1, count), key=split_cost, default=0)
    if best == 0 or split_cost(best) > (1.0 - saving) * whole:
        return [list(range(count))]
    return [sorted(ranked[:best]), sorted(ranked[best:])]


def response_scores(
    model: Any, rows: Sequence[TokenRow], device: torch.device, saving: float = SAVING
) -> ResponseScores:
    """Scores of all rows in the given order, differentiable; see response_nll_and_accuracy_B.

    token_nll and supervised are as wide as the longest row, less one.
    """
    groups = length_groups([len(row.ids) for row in rows], saving)
    parts = [
        response_nll_and_accuracy_B(model, *collate([rows[i] for i in group], device))
        for group in groups
    ]
    if len(parts) == 1:
        return parts[0]
    order_B = torch.tensor([place for group in groups for place in group]).argsort()
    width = max(part.supervised.shape[1] for part in parts)

    def joined(tensors: list[Tensor]) -> Tensor:
        padded = [
            torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))
            if tensor.dim() == 2
            else tensor
            for tensor in tensors
        ]
        whole = torch.cat(padded)
        return whole[order_B.to(whole.device)]

    return ResponseScores(*(joined(list(field)) for field in zip(*parts, strict=True)))
