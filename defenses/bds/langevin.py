"""Stochastic gradient Langevin dynamics (SGLD), the sampler of the BDS paper's theory."""

from collections.abc import Sequence

import torch
from torch import Tensor


def langevin_step(
    tensors: Sequence[Tensor],
    gradients_of_log_posterior: Sequence[Tensor],
    eta: float,
    generator: torch.Generator,
) -> list[Tensor]:
    """One unadjusted Langevin step of every tensor; the arguments are left as they are.

        x <- x + (eta/2) * d log p(x) / dx + sqrt(eta) * N(0, I)

    tensors: any shapes, together the point x; gradients_of_log_posterior: one of the same shape
    for each, of the log posterior of the whole set (minibatch sums scaled by N/b). eta: step,
    above 0; the mean is off by O(eta). The noise is drawn on the generator's device in the
    tensor's own precision, in the order of the tensors. Nothing is clipped: that would sample
    another posterior. Samples converge to the posterior only as eta falls; at a fixed eta, and
    with a model that learns meanwhile, they are near it at best.

    In BDS this moves v (or phi) alone. The paper's theory moves theta, the adapter, by the same
    step in turn with v; here theta stays the point estimate that the training loop's AdamW makes,
    as in the release. Raises ValueError for an eta that is not above 0 or a gradient that does
    not fit. Source: arXiv 2510.27172; Welling and Teh, ICML 2011.
    """
    if not eta > 0:
        raise ValueError(f"a Langevin step needs eta above 0, got {eta}")
    moved = []
    for x, gradient in zip(tensors, gradients_of_log_posterior, strict=True):
        if x.shape != gradient.shape:
            raise ValueError(
                f"a gradient of shape {tuple(gradient.shape)} does not fit a tensor of shape "
                f"{tuple(x.shape)}"
            )
        noise = torch.randn(
            x.shape, generator=generator, dtype=x.dtype, device=generator.device
        ).to(x.device)
        moved.append(x.detach() + eta / 2.0 * gradient.detach() + eta**0.5 * noise)
    return moved
