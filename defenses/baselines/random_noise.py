"""Gaussian noise in the place of Panacea's perturbation: what a step of that length does alone."""

from collections.abc import Mapping

import torch
from torch import Tensor


def gaussian_perturbation(
    parameters: Mapping[str, Tensor], rho: float, seed: int
) -> dict[str, Tensor]:
    """delta = rho * z / ||z||_2,  z ~ N(0, I) over all tensors read as one vector.

    The control of the Panacea paper (arXiv 2501.18100) adds s * z, of norm s * sqrt(d) up to
    chance; here the norm is rho exactly, s = rho / ||z||, so that arms of equal norm are compared.
    Drawn in float64 on the CPU in the order of the names: the device and the order of the mapping
    change nothing. Returned in each parameter's dtype and on its device.
    Raises ValueError for a negative or non-finite rho.
    """
    if not 0.0 <= rho < float("inf"):
        raise ValueError(f"rho must be a finite norm of at least 0, got {rho}")
    generator = torch.Generator().manual_seed(seed)
    z = {
        name: torch.randn(parameters[name].shape, generator=generator, dtype=torch.float64)
        for name in sorted(parameters)
    }
    if not z:
        return {}
    norm = torch.stack([tensor.square().sum() for tensor in z.values()]).sum().sqrt()
    return {name: (z[name] * (rho / norm)).to(tensor) for name, tensor in parameters.items()}
