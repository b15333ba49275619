import pytest
import torch
from torch import Tensor
from torch.nn import functional

from defenses import cross_entropy
from defenses.cross_entropy import token_nll_M


def tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and the weight of each token in the loss."""
    generator = torch.Generator().manual_seed(4)
    logits = 5 * torch.randn(23, 37, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 37, (23,), generator=generator)
    return logits.to(dtype), targets, torch.rand(23, generator=generator, dtype=torch.float64)


@pytest.fixture(params=[1, 100, 2**22], ids=["row by row", "with a remainder", "in one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("chunk")
def test_values_equal_those_of_torch() -> None:
    logits, targets, _ = tokens(torch.float64)
    reference = functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(token_nll_M(logits, targets), reference)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_gradients_equal_those_of_torch(dtype: torch.dtype, tolerance: float) -> None:
    logits, targets, weights = tokens(dtype)
    leaf = logits.clone().requires_grad_()
    reference = functional.cross_entropy(leaf.double(), targets, reduction="none")
    (expected,) = torch.autograd.grad((weights * reference).sum(), [leaf])
    (gradient,) = torch.autograd.grad((weights * token_nll_M(leaf * 1, targets)).sum(), [leaf])
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


def test_half_precision_logits_give_float32_losses() -> None:
    logits, targets, _ = tokens(torch.bfloat16)
    losses = token_nll_M(logits, targets)
    reference = functional.cross_entropy(logits.float(), targets, reduction="none")
    torch.testing.assert_close(losses, reference)


def test_very_large_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, 0.0], [-1e4, 0.0]]).requires_grad_()
    losses = token_nll_M(logits * 1, torch.tensor([1, 0]))
    torch.testing.assert_close(losses.detach(), torch.tensor([1e4, 1e4]))
    (gradient,) = torch.autograd.grad(losses.sum(), [logits])
    torch.testing.assert_close(gradient, torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))


def test_a_second_backward_pass_is_refused_instead_of_wrong() -> None:
    logits, targets, _ = tokens(torch.float32)
    leaf = logits.clone().requires_grad_()
    loss = token_nll_M(leaf * 1, targets).sum()
    torch.autograd.grad(loss, [leaf], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, [leaf])
