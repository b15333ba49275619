"""One step of DP-SGD on an adapter, through Opacus.

    l_i = mean loss of row i over its own supervised tokens
    g_i = gradient of l_i over all adapter tensors jointly,  gbar_i = g_i min(1, C / |g_i|)
    g   = (sum_{i drawn} gbar_i + sigma C z) / (q N),  z ~ N(0, I)

q N is the expected size of a Poisson sample, never the drawn one: dividing by the drawn size would
tell it, and would make the noise depend on it. Taking a row away changes the sum by at most C,
because no g_i depends on another row. The usual loss of causal models, a mean over all tokens of
the batch, lacks that property. Source: the DP-SGD of Abadi et al. (arXiv 1607.00133).
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor

from defenses.losses import response_nll_and_accuracy_B
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.forward import length_groups
from workers.pipeline.private_noise import StepRandomness
from workers.pipeline.rows import TokenRow, collate

# A drawn batch may be far larger than expected. Defended jobs read two sets of batch_size rows in a
# step, so twice the batch is what a machine must hold anyway.
ROWS_AT_ONCE = 2


class Drawn(NamedTuple):
    """What a step measured on its rows, in their order: mean loss (float64, nats a token), right
    tokens and trained tokens, gradient norms before clipping. discarded: rows whose gradient was
    not finite and counted as 0."""

    losses: Tensor
    correct: int
    tokens: int
    norms: Tensor
    discarded: int


class _NoisedOptimizer(DPOptimizer):  # type: ignore[misc]
    """Opacus' optimiser with noise from a source of ours, and no room for a row that is not finite.

    Leaving out a step because a gradient is not finite would tell that such a row was drawn.
    """

    random: StepRandomness

    def clip_and_accumulate(self) -> None:
        samples = self.grad_samples
        norm_B = torch.stack([g.flatten(1).norm(dim=1) for g in samples], dim=1).norm(dim=1)
        lost = ~torch.isfinite(norm_B)
        if bool(lost.any()):
            for sample in samples:
                sample[lost] = 0.0
        self.norms.append(norm_B.detach())
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        deviation = self.noise_multiplier * self.max_grad_norm
        for parameter in self.params:
            _check_processed_flag(parameter.summed_grad)
            total = parameter.summed_grad
            parameter.grad = total + deviation * self.random.normal(total)
            _mark_as_processed(total)


class PrivateGradients:
    """Hooks on a model that keep the gradient of every row, and the optimiser that they go to.

    optimizer: of exactly `parameters`, the adapter. expected_batch: q N. rows_at_once: rows whose
    gradients are held together; a larger draw is read in parts. Call close() before the model is
    used for anything else. Raises PipelineFailure where single rows have no gradient.
    """

    def __init__(
        self,
        model: Any,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        clip: float,
        expected_batch: float,
        rows_at_once: int,
    ) -> None:
        self._model, self._parameters = model, parameters
        self._device = next(model.parameters()).device
        self._rows_at_once = rows_at_once
        try:
            # What Opacus' make_private does with wrap_model=False. The sum over rows is
            # differentiated; the division by q N is the optimiser's.
            self._hooks = GradSampleHooks(model, loss_reduction="sum", strict=True)
        except NotImplementedError as error:
            raise PipelineFailure(
                "invalid_spec",
                f"Single rows have no gradient of their own in this model: {error} Choose other "
                "lora.targets in the catalogue, or leave privacy out.",
                param="privacy",
            ) from error
        self.optimizer = _NoisedOptimizer(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip,
            expected_batch_size=expected_batch,
            loss_reduction="mean",
        )
        self.optimizer.norms = []

    def step(self, rows: Sequence[TokenRow], random: StepRandomness) -> Drawn:
        """Read the drawn rows, clip, add noise and move the adapter; also where none was drawn."""
        optimizer = self.optimizer
        optimizer.random, optimizer.norms = random, []
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(random.seed())
        parts = self._parts(rows)
        losses = torch.zeros(len(rows), dtype=torch.float64)
        correct = tokens = 0
        for place, part in enumerate(parts):
            chosen = [rows[i] for i in part]
            scores = response_nll_and_accuracy_B(self._model, *collate(chosen, self._device))
            with warnings.catch_warnings():
                # The first layer's input asks for no gradient; its hook fires all the same.
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                scores.nll.sum().backward()  # type: ignore[no-untyped-call]
            self._check(len(part))
            losses[part] = scores.nll.detach().double().cpu()
            correct += int(scores.correct.sum())
            tokens += int(scores.token_count.sum())
            if place < len(parts) - 1:
                # Clipped and added up; noise comes once, after the last part.
                optimizer.signal_skip_step(True)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if not parts:
            for parameter in self._parameters.values():
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))  # type: ignore[attr-defined]
        optimizer.signal_skip_step(False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        order = [i for part in parts for i in part]
        found = torch.cat([norm.double().cpu() for norm in optimizer.norms])
        norms = torch.zeros(len(rows), dtype=torch.float64)
        norms[order] = found
        return Drawn(losses, correct, tokens, norms, int((~torch.isfinite(norms)).sum()))

    def close(self) -> None:
        """Take the hooks off, and all that they left on the adapter's tensors."""
        self._hooks.cleanup()
        for parameter in self._parameters.values():
            if hasattr(parameter, "summed_grad"):
                del parameter.summed_grad

    def _parts(self, rows: Sequence[TokenRow]) -> list[list[int]]:
        """Places of the rows of each forward pass. Every part has a backward pass of its own: two
        passes before one backward would be taken for one pass of a layer that is used twice."""
        lengths = [len(row.ids) for row in rows]
        order = sorted(range(len(rows)), key=lambda place: lengths[place])
        count = math.ceil(len(rows) / self._rows_at_once)
        parts: list[list[int]] = []
        for index in range(count):
            part = order[index * len(rows) // count : (index + 1) * len(rows) // count]
            groups = length_groups([lengths[i] for i in part])
            parts += [[part[i] for i in group] for group in groups]
        return parts

    def _check(self, rows: int) -> None:
        for name, parameter in self._parameters.items():
            sample = getattr(parameter, "grad_sample", None)
            if not isinstance(sample, Tensor) or sample.shape != (rows, *parameter.shape):
                raise PipelineFailure(
                    "invalid_spec",
                    f"The adapter's tensor {name} has no gradient for each row. Leave its module "
                    "out of lora.targets in the catalogue, or leave privacy out.",
                    param="privacy",
                )
