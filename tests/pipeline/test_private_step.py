"""The step of DP-SGD on the tiny model: gradients of rows, clipping, noise, empty samples."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from opacus.grad_sample import GradSampleHooks
from scipy.stats import kstest
from torch import Tensor

from benchmarks.workload import adapted_model, mixed_rows
from defenses.losses import response_nll_B
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.models import trainable
from workers.pipeline.private_gradients import PrivateGradients
from workers.pipeline.private_noise import SecretStep, seeded
from workers.pipeline.rows import TokenRow, collate

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_model_folder) -> Any:
    """The tiny model in float64 with an adapter whose both factors have gradients."""
    adapted = adapted_model(str(tiny_model_folder)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(adapted).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapted


@pytest.fixture
def rows() -> list[TokenRow]:
    return mixed_rows(7, 2, shortest=3, longest=24, median=9.0, vocabulary=258)


def gradients(
    model: Any, *, noise: float = 0.0, clip: float = 1e9, expected: float = 1.0, at_once: int = 100
) -> PrivateGradients:
    """With plain descent at rate 1, a step moves the adapter by minus the step's gradient."""
    parameters = trainable(model)
    descent = torch.optim.SGD(parameters.values(), lr=1.0)
    return PrivateGradients(
        model,
        parameters,
        descent,
        noise_multiplier=noise,
        clip=clip,
        expected_batch=expected,
        rows_at_once=at_once,
    )


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def adapter(model: Any) -> Tensor:
    return flat(list(trainable(model).values()))


def one_row_at_a_time(model: Any, rows: Sequence[TokenRow]) -> Tensor:
    """Gradient of each row's loss, from a forward and backward pass of its own; [B, P]."""
    return torch.stack(
        [
            flat(
                torch.autograd.grad(
                    response_nll_B(model, *collate([row], CPU)).mean(),
                    list(trainable(model).values()),
                )
            )
            for row in rows
        ]
    )


def step_gradient(model: Any, rows: Sequence[TokenRow], **options: Any) -> Tensor:
    before = adapter(model)
    private = gradients(model, **options)
    private.step(rows, seeded(5)(0))
    private.close()
    moved = before - adapter(model)
    offset = 0
    with torch.no_grad():
        for parameter in trainable(model).values():
            count = parameter.numel()
            parameter.copy_(before[offset : offset + count].view_as(parameter))
            offset += count
    return moved


def kept_gradients(model: Any, rows: Sequence[TokenRow]) -> Tensor:
    """What the hooks keep for each row of one step, in the order in which rows were read."""
    private = gradients(model)
    kept: list[Tensor] = []
    take = private.optimizer.clip_and_accumulate

    def keep() -> None:
        samples = private.optimizer.grad_samples
        kept.append(torch.cat([sample.flatten(1) for sample in samples], dim=1).clone())
        take()

    private.optimizer.clip_and_accumulate = keep
    private.step(rows, seeded(5)(0))
    private.close()
    return torch.cat(kept)


def test_the_gradient_of_each_row_is_that_of_the_row_alone(model: Any, rows: list[TokenRow]):
    alone = one_row_at_a_time(model, sorted(rows, key=lambda row: len(row.ids)))
    together = kept_gradients(model, rows)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)


def test_the_usual_loss_of_causal_models_has_no_gradients_of_single_rows(
    model: Any, rows: list[TokenRow]
):
    """A mean over all tokens of the batch: the trap that the rule on the loss is there for."""
    alone = one_row_at_a_time(model, rows)
    hooks = GradSampleHooks(model, loss_reduction="mean", strict=True)
    ids, mask, labels = collate(rows, CPU)
    model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    samples = [p.grad_sample.flatten(1) for p in trainable(model).values()]
    together = torch.cat(samples, dim=1)
    hooks.cleanup()
    ratio = together.norm(dim=1) / alone.norm(dim=1)
    assert float(ratio.min()) < 0.7
    assert float(ratio.max()) > 1.3


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_the_clipped_sum_is_that_of_a_loop_over_rows(
    model: Any, rows: list[TokenRow], at_once: int
):
    alone = one_row_at_a_time(model, rows)
    norms = alone.norm(dim=1)
    clip = float(norms.median())
    # Opacus keeps a millionth of distance to the bound, on the safe side.
    expected = (alone * (clip / (norms + 1e-6)).clamp(max=1.0)[:, None]).sum(dim=0) / 4.5
    found = step_gradient(model, rows, clip=clip, expected=4.5, at_once=at_once)
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_a_row_moves_the_sum_by_no_more_than_the_clipping_norm(model: Any, rows: list[TokenRow]):
    clip = 0.05
    whole = step_gradient(model, rows, clip=clip)
    for left_out in range(len(rows)):
        rest = [row for place, row in enumerate(rows) if place != left_out]
        change = (whole - step_gradient(model, rest, clip=clip)).norm()
        assert 0.9 * clip < float(change) <= clip


def test_the_noise_has_the_size_of_sigma_times_the_clipping_norm(model: Any, rows: list[TokenRow]):
    quiet = step_gradient(model, rows, clip=0.5, expected=4.0)
    noisy = step_gradient(model, rows, clip=0.5, expected=4.0, noise=2.0)
    noise = (noisy - quiet) * 4.0
    assert float(noise.std()) == pytest.approx(1.0, rel=0.05)
    assert abs(float(noise.mean())) < 0.05


def test_an_empty_sample_still_moves_the_adapter_by_noise(model: Any):
    moved = step_gradient(model, [], clip=0.5, expected=4.0, noise=2.0)
    assert float(moved.std()) == pytest.approx(2.0 * 0.5 / 4.0, rel=0.05)


def test_the_noise_comes_once_however_many_parts_a_sample_is_read_in(
    model: Any, rows: list[TokenRow]
):
    found = [step_gradient(model, rows, noise=1.0, clip=1.0, at_once=n) for n in (1, 2, 100)]
    for one, other in itertools.pairwise(found):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_a_row_that_is_not_finite_counts_for_nothing(model: Any, rows: list[TokenRow]):
    private = gradients(model, clip=1.0)
    spoil = private.optimizer.clip_and_accumulate

    def spoiled() -> None:
        for sample in private.optimizer.grad_samples:
            sample[0] = float("nan")
        spoil()

    private.optimizer.clip_and_accumulate = spoiled
    drawn = private.step(rows, seeded(5)(0))
    private.close()
    assert drawn.discarded >= 1
    assert bool(torch.isfinite(adapter(model)).all())


def test_an_adapter_on_the_output_projection_is_refused(tiny_model_folder):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    private = gradients(get_peft_model(base, config).train())
    with pytest.raises(PipelineFailure, match=r"no gradient for each row.*lora\.targets"):
        private.step(
            mixed_rows(3, 0, shortest=6, longest=20, median=9.0, vocabulary=258), seeded(5)(0)
        )


def test_nothing_of_the_hooks_is_left_on_a_closed_model(model: Any, rows: list[TokenRow]):
    private = gradients(model, noise=1.0, clip=1.0)
    private.step(rows, seeded(5)(0))
    private.close()
    left = {"grad_sample", "summed_grad", "_forward_counter", "_current_grad_sample"}
    assert not any(left & set(vars(p)) for p in trainable(model).values())
    assert not hasattr(model, "autograd_grad_sample_hooks")


def test_secret_numbers_are_standard_normal():
    z = SecretStep().normal(torch.zeros(20_000, dtype=torch.float64)).numpy()
    assert kstest(z, "norm").pvalue > 1e-6


def test_secret_samples_have_the_rate_that_was_asked_for():
    drawn = [len(SecretStep().included(1000, 0.1)) for _ in range(50)]
    assert np.mean(drawn) == pytest.approx(100, abs=10)
    assert SecretStep().included(1000, 1.0) == list(range(1000))


def test_no_two_steps_of_a_seeded_run_share_their_noise():
    like = torch.zeros(50)
    first, again, next_step = (seeded(3)(step).normal(like) for step in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, next_step)
