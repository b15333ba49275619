"""Plain supervised tuning, called like every other method."""

from defenses.method import MethodContext, PlainMethod
from jobspec.defense import PlainOptions, PrefilterOptions


class Plain(PlainMethod):
    """L = mean_i l_i over the user's rows.

    Also the tuning of methods that choose rows first: `prefilter` on those that passed, and the
    second stage of `seal` on those that were kept.
    """

    def __init__(self, context: MethodContext, options: PlainOptions | PrefilterOptions) -> None:
        self.context, self.options = context, options
