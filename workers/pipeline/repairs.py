"""From the options of the stage after tuning to what they add to the finished adapter.

Every repair is a delta, one tensor for each of the adapter's, so that all share one scale search,
one storage and one way back. Panacea's delta is eps; Safe LoRA's is C B - B where a module is
projected; Antidote's is -w where an entry is pruned.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from defenses.baselines.antidote import antidote_delta
from defenses.baselines.random_noise import gaussian_perturbation
from defenses.baselines.safe_lora import (
    Alignment,
    AlignmentFactors,
    alignment_factors,
    module_name,
    safe_lora,
)
from defenses.losses import response_token_mean_nll
from defenses.method import MethodError
from defenses.panacea.perturbation import (
    NonFiniteGradientError,
    post_hoc_perturbation,
    relative_rho,
)
from jobspec.catalogue import BaseModelEntry
from jobspec.defense import (
    AfterOptions,
    AntidoteOptions,
    PerturbationOptions,
    RandomNoiseOptions,
    SafeLoraOptions,
)
from workers.pipeline.bundle import ADAPTER, ADAPTER_CONFIG
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.models import alignment_adapter, trainable
from workers.pipeline.rows import Batch, TokenRow, collate

FIDELITY = {
    "last_step": "the paper's: optimised while tuning, eps of the last step",
    "full_set": "variant of the paper: optimised while tuning, eps of the whole harmful set",
    "post_hoc": "ablation: nothing prepares the model for eps, so not Panacea",
    "random_noise": "the paper's control: Gaussian noise of a given norm",
    "safe_lora": "competitor as released, in low-rank algebra",
    "antidote": "competitor as released, on the adapter's factors",
}


class JointlyTuned(Protocol):
    """What tuning under the joint objective leaves for this stage."""

    @property
    def perturbation(self) -> dict[str, Tensor] | None: ...
    @property
    def rho(self) -> float: ...
    @property
    def counters(self) -> dict[str, int]: ...
    @property
    def coefficients(self) -> dict[int, float] | None: ...


class Repair(NamedTuple):
    """delta: what scale 1 adds, by adapter tensor. rho, eps_source, strength: None where the method
    has none. details: what else the method found, as plain values."""

    delta: dict[str, Tensor]
    fidelity: str
    rho: float | None = None
    eps_source: str | None = None
    strength: float | None = None
    details: Mapping[str, Any] = MappingProxyType({})


def check_repair(options: AfterOptions, entry: BaseModelEntry) -> None:
    """Refuse a repair that this base model cannot have, before anything is tuned.

    Raises PipelineFailure(invalid_spec).
    """
    if isinstance(options, SafeLoraOptions):
        alignment_directions(entry)


def find_repair(
    model: Any,
    tuned: JointlyTuned,
    harmful: Sequence[TokenRow],
    options: AfterOptions,
    entry: BaseModelEntry,
    seed: int,
    stop: Callable[[], bool],
) -> Repair:
    """The delta of the chosen method; the model is read and left as it is.

    Raises Stopped when `stop()` turns true, and PipelineFailure: invalid_spec for a repair that
    this model cannot have, internal_error where the harmful gradient is nowhere finite.
    """
    parameters = trainable(model)
    try:
        found = _find(model, parameters, tuned, harmful, options, entry, seed, stop)
    except NonFiniteGradientError as error:
        raise PipelineFailure(
            "internal_error",
            f"No perturbation can be found: {error}. Tuning may have diverged: lower "
            "learning_rate_multiplier and create the job again.",
        ) from error
    except MethodError as error:
        raise PipelineFailure(
            "invalid_spec", f"The repair cannot run: {error}.", param="defense.perturbation"
        ) from error
    whole = {name: found.delta.get(name, torch.zeros_like(p)) for name, p in parameters.items()}
    return found._replace(delta=whole)


def _find(
    model: Any,
    parameters: Mapping[str, Tensor],
    tuned: JointlyTuned,
    harmful: Sequence[TokenRow],
    options: AfterOptions,
    entry: BaseModelEntry,
    seed: int,
    stop: Callable[[], bool],
) -> Repair:
    if isinstance(options, RandomNoiseOptions):
        rho = options.rho or relative_rho(parameters)
        noise = gaussian_perturbation(parameters, rho, seed)
        return Repair(noise, FIDELITY["random_noise"], rho, details={"seed": seed})
    if isinstance(options, SafeLoraOptions):
        return _safe_lora(parameters, options, entry)
    if isinstance(options, AntidoteOptions):
        return _antidote(model, parameters, harmful, options, stop)
    return _panacea(model, tuned, parameters, harmful, options, stop)


def alignment_directions(entry: BaseModelEntry) -> dict[str, AlignmentFactors]:
    """V = (alpha / r) B_al A_al by module name, from the adapter merged into an aligned base.

    Raises PipelineFailure(invalid_spec) for a base whose alignment is not known, or was merged in
    another way than by this product.
    """
    folder = alignment_adapter(entry)
    if folder is None:
        raise PipelineFailure(
            "invalid_spec",
            f"safe_lora needs to know what alignment changed in the base, and {entry.name} is not "
            "an aligned entry. Make an adapter with `tunegate models align`, add an entry with "
            "`source: {kind: aligned, ...}` to the catalogue, and name that entry.",
            param="defense.perturbation",
        )
    config = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    unlike = [key for key in ("alpha_pattern", "rank_pattern", "use_dora") if config.get(key)]
    if unlike:
        raise PipelineFailure(
            "invalid_spec",
            f"The alignment adapter of {entry.name} sets {', '.join(unlike)}, for which safe_lora "
            "is not defined. Make one with `tunegate models align`.",
            param="defense.perturbation",
        )
    rank = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    return alignment_factors(load_file(folder / ADAPTER), config["lora_alpha"] / rank)


def _panacea(
    model: Any,
    tuned: JointlyTuned,
    parameters: Mapping[str, Tensor],
    harmful: Sequence[TokenRow],
    options: PerturbationOptions,
    stop: Callable[[], bool],
) -> Repair:
    joint = options.mode == "joint"
    strength = options.strength if joint else None
    if joint and options.eps_source == "last_step" and tuned.perturbation is not None:
        return Repair(
            dict(tuned.perturbation), FIDELITY["last_step"], tuned.rho, "last_step", strength
        )
    rho = tuned.rho if joint else options.rho or relative_rho(parameters)
    losses = (
        partial(response_token_mean_nll, model, *batch)
        for batch in _batches(model, harmful, options.batch_size, stop)
    )
    found = post_hoc_perturbation(parameters, losses, rho)
    details = {
        "harmful_loss": found.harmful_loss,
        "harmful_gradient_norm": found.harmful_gradient_norm,
        "harmful_batches": found.batch_count,
        "skipped_batches": found.skipped_batches,
    }
    fidelity = FIDELITY["full_set" if joint else "post_hoc"]
    return Repair(found.perturbation, fidelity, rho, "full_set", strength, details)


def _safe_lora(
    parameters: Mapping[str, Tensor], options: SafeLoraOptions, entry: BaseModelEntry
) -> Repair:
    directions = alignment_directions(entry)
    # A module that alignment did not touch has V = 0 and is kept.
    alignment: dict[str, Alignment] = {
        module: directions.get(module) for module in map(module_name, parameters)
    }
    found = safe_lora(parameters, alignment, options)
    details = {
        "threshold": options.threshold if options.modules is None else None,
        "projected": list(found.projected),
        "cosine": found.cosine,
    }
    return Repair(found.delta, FIDELITY["safe_lora"], details=details)


def _antidote(
    model: Any,
    parameters: Mapping[str, Tensor],
    harmful: Sequence[TokenRow],
    options: AntidoteOptions,
    stop: Callable[[], bool],
) -> Repair:
    batches = _batches(model, harmful, options.batch_size, stop, whole_only=False)
    found = antidote_delta(model, parameters, batches, options.share)
    details = {
        "share": options.share,
        "pruned": sum(found.pruned.values()),
        "harmful_rows": found.rows,
        "harmful_loss": found.harmful_loss,
    }
    return Repair(found.delta, FIDELITY["antidote"], details=details)


def _batches(
    model: Any,
    rows: Sequence[TokenRow],
    size: int,
    stop: Callable[[], bool],
    *,
    whole_only: bool = True,
) -> Iterator[Batch]:
    """Batches of `size` rows; asks `stop` before each. A last batch of another size would weigh its
    rows differently in a mean over batches, so whole_only leaves it out where there are others."""
    device = next(model.parameters()).device
    end = (len(rows) - len(rows) % size or len(rows)) if whole_only else len(rows)
    for start in range(0, end, size):
        if stop():
            raise Stopped
        yield collate(rows[start : start + size], device)
