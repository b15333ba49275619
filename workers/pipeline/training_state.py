"""The complete state of a tuning run, to and from a checkpoint."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.pipeline.checkpoint import (
    TrainingState,
    newest_checkpoint,
    optimizer_tensors,
    restore_optimizer,
)

if TYPE_CHECKING:
    from workers.pipeline.training import Training


def training_state(run: "Training") -> TrainingState:
    """Everything that the next step depends on."""
    names = list(run.parameters)
    tensors: dict[str, Tensor] = {f"adapter/{n}": p for n, p in run.parameters.items()}
    tensors |= optimizer_tensors(run.optimizer, names, "adam")
    tensors["last_nll"] = run.last_nll
    if run.tuned_logits is not None and run.tuned_weights is not None:
        tensors |= {"tuned_logits": run.tuned_logits, "tuned_weights": run.tuned_weights}
    tensors |= {f"method/{name}": t for name, t in run.method.state().items()}
    tensors |= {f"coefficients/{name}": t for name, t in run.coefficients.state().items()}
    tensors |= {f"eps/{name}": t for name, t in (run.perturbation or {}).items()}
    numbers = {
        "user_step": run.user_step,
        "trained_tokens": run.trained_tokens,
        "skipped_in_a_row": run.skipped_in_a_row,
        "counters": run.counters,
        "metrics": run.metrics,
        "rho": run.rho,
        "spent": run.spent,
    }
    return TrainingState(run.step, run.settings.key, tensors, numbers)


def resume(run: "Training") -> None:
    """Continue from the newest checkpoint in the work folder, if there is one."""
    state = newest_checkpoint(run.work, run.settings.key)
    if state is None:
        return
    tensors = state.tensors
    with torch.no_grad():
        for name, parameter in run.parameters.items():
            parameter.copy_(tensors[f"adapter/{name}"])
    restore_optimizer(run.optimizer, list(run.parameters), "adam", tensors)
    run.last_nll = tensors["last_nll"]
    run.tuned_logits = tensors.get("tuned_logits")
    run.tuned_weights = tensors.get("tuned_weights")
    run.method.load_state(_below(tensors, "method/"))
    run.coefficients.load_state(_below(tensors, "coefficients/"))
    run.perturbation = {
        name: tensor.to(run.device) for name, tensor in _below(tensors, "eps/").items()
    } or None
    numbers = state.numbers
    run.step = run.saved_step = state.step
    run.user_step = numbers["user_step"]
    run.trained_tokens = numbers["trained_tokens"]
    run.skipped_in_a_row = numbers["skipped_in_a_row"]
    run.counters = numbers["counters"]
    run.metrics = numbers["metrics"]
    run.rho = numbers["rho"]
    run.spent[:] = [(sigma, rate, steps) for sigma, rate, steps in numbers.get("spent", [])]
    run.emit(
        "message",
        level="info",
        message=f"Resumed from the checkpoint at step {run.first_step + state.step}.",
        data={"step": run.first_step + state.step},
    )


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
