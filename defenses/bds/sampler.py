"""How the scheduler's numbers (v, or a scorer's phi) move: AdamW, or Langevin dynamics."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from defenses.bds.errors import SchedulerStateError
from defenses.bds.langevin import langevin_step
from jobspec.defense import SchedulerOptions

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Sampler(Protocol):
    """Moves a fixed set of tensors in place, given the gradients of what is to fall."""

    def move(self, gradients: Sequence[Tensor]) -> float:
        """Takes one step; returns the global norm of the gradients as they came."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Copies of all it needs to continue bit for bit, flat."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a state; raises SchedulerStateError if it is of something else."""
        ...


class AdamSampler:
    """x <- AdamW(x, clip(gradient, global norm)), no weight decay: the release's update.

    The result is a point estimate, not a sample. The state of the parameter called n is
    adam/n/step, adam/n/exp_avg and adam/n/exp_avg_sq; of a single parameter called "", adam/step
    and so on. It is empty before the first step.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], options: SchedulerOptions, learning_rate: float
    ) -> None:
        self._parameters = dict(parameters)
        self._clip = options.clip
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=learning_rate,
            betas=options.betas,
            eps=options.eps,
            weight_decay=0.0,
        )

    def move(self, gradients: Sequence[Tensor]) -> float:
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        return {
            _moment_key(name, moment): value.detach().clone()
            for name, parameter in self._parameters.items()
            for moment, value in self._optimizer.state.get(parameter, {}).items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        moments: dict[int, dict[str, Tensor]] = {}
        if state:
            expected = {_moment_key(name, m) for name in self._parameters for m in _MOMENTS}
            _check_keys(set(state), expected, "adam")
            for index, (name, parameter) in enumerate(self._parameters.items()):
                found = {m: state[_moment_key(name, m)].clone() for m in _MOMENTS}
                if found["exp_avg"].shape != parameter.shape:
                    raise SchedulerStateError(
                        f"saved moment {_moment_key(name, 'exp_avg')} has shape "
                        f"{tuple(found['exp_avg'].shape)}, the scheduler's is "
                        f"{tuple(parameter.shape)}; resume with the options of the first run"
                    )
                moments[index] = found
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})


class LangevinSampler:
    """x <- x - (eta/2) * dU/dx + sqrt(eta) * N(0, I), with U = -log posterior; see langevin_step.

    Its own generator makes the noise, so nothing else in the process changes it. The state is that
    generator's.
    """

    def __init__(self, parameters: Mapping[str, Tensor], eta: float, seed: int) -> None:
        self._parameters = list(parameters.values())
        self._eta = eta
        self._generator = torch.Generator().manual_seed(seed)

    def move(self, gradients: Sequence[Tensor]) -> float:
        moved = langevin_step(
            self._parameters, [-gradient for gradient in gradients], self._eta, self._generator
        )
        with torch.no_grad():
            for parameter, value in zip(self._parameters, moved, strict=True):
                parameter.copy_(value)
        return float(torch.nn.utils.get_total_norm(gradients))

    def state(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        _check_keys(set(state), {"generator"}, "sgld")
        self._generator.set_state(state["generator"].cpu())


def make_sampler(
    parameters: Mapping[str, Tensor], options: SchedulerOptions, learning_rate: float, seed: int
) -> Sampler:
    """The sampler that the options name, over these tensors."""
    if options.sampler == "sgld":
        return LangevinSampler(parameters, options.sgld_step, seed)
    return AdamSampler(parameters, options, learning_rate)


def _moment_key(name: str, moment: str) -> str:
    return f"adam/{name}/{moment}" if name else f"adam/{moment}"


def _check_keys(found: set[str], expected: set[str], sampler: str) -> None:
    if found != expected:
        raise SchedulerStateError(
            f"saved state is not of this {sampler} sampler: missing {sorted(expected - found)}, "
            f"unexpected {sorted(found - expected)}; resume with the options of the first run"
        )
