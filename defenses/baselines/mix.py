"""Alignment rows beside the user's, without weights: what BDS is without its scheduler."""

from typing import ClassVar

from torch import Tensor

from defenses.method import MethodContext, PlainMethod, StepLosses, shared_mean
from jobspec.defense import MixOptions


class MixMethod(PlainMethod):
    """L = c * mean_m a_m + mean_i l_i, c = alignment_coefficient.

    a: response losses of the step's alignment rows, l: of its user rows, both [b], nats a token.
    Source: SafeInstruct (arXiv 2309.07875) shuffles a few hundred safety rows into the set; here
    every step reads a batch of each, so c sets their share and not the sizes of the sets.
    """

    uses_alignment: ClassVar[bool] = True

    def __init__(self, context: MethodContext, options: MixOptions) -> None:
        self.context, self.options = context, options

    def objective(self, losses: StepLosses) -> Tensor:
        alignment = shared_mean(losses.alignment_B, losses.alignment_count)
        user = shared_mean(losses.user_B, losses.user_count)
        return self.options.alignment_coefficient * alignment + user
