import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from defenses.baselines.constrained import (
    ConstrainedMethod,
    ReferenceMismatchError,
    betas_BT,
    response_positions_BT,
    token_weights,
)
from defenses.method import MethodContext, MethodError, StepLosses, TokenLosses
from jobspec.defense import ConstrainedOptions

SUPERVISED_BT = torch.tensor(
    [
        [False, True, True, True, False, True, True, True],
        [True, True, False, False, False, False, False, False],
        [False, False, False, True, True, True, False, False],
    ]
)
LENGTHS = [6, 2, 3]


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def reference() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [-torch.rand(n, generator=generator, dtype=torch.float64) * 3 for n in LENGTHS]


def nll_BT(seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    nll = torch.rand(SUPERVISED_BT.shape, generator=generator, dtype=torch.float64) * 3
    return nll * SUPERVISED_BT


def make(known: list[Tensor] | None = None, **changes: float) -> ConstrainedMethod:
    known = reference() if known is None else known
    context = MethodContext(3, 0, 10, 2, {}, seed=0, reference=known)
    return ConstrainedMethod(context, ConstrainedOptions(**changes))


def losses(nll: Tensor, rows: list[int], processes: int = 1) -> StepLosses:
    supervised = SUPERVISED_BT[rows]
    user_B = nll[rows].sum(dim=1) / supervised.sum(dim=1).clamp(min=1)
    return StepLosses(
        user_B=user_B,
        alignment_B=torch.empty(0),
        row_ids_B=torch.tensor(rows, dtype=torch.int64),
        step_ids=torch.arange(3),
        user_count=3,
        alignment_count=0,
        step=0,
        epoch=0,
        processes=processes,
        tokens=TokenLosses(nll[rows], supervised),
    )


@pytest.mark.parametrize(
    ("beta", "ratio", "weight"),
    [
        (2.0, 0.0, 1.0),
        (2.0, 1.0, 0.23840584404423537),
        (2.0, -1.0, 1.7615941559557649),
        (0.5, 1.0, 0.7550813375962908),
        (0.1, 1.0, 0.95004162504212),
    ],
)
def test_token_weights_are_those_of_the_method_brief(
    beta: float, ratio: float, weight: float
) -> None:
    """Golden values computed in float64 for the brief on harmful fine-tuning."""
    assert float(token_weights(f64([ratio]), beta, 1e-3)) == pytest.approx(weight, abs=1e-15)


@given(st.floats(-50, 50), st.floats(-50, 50), st.floats(0.01, 20))
def test_a_token_weighs_less_the_further_the_model_is_ahead(
    a: float, b: float, beta: float
) -> None:
    low, high = sorted((a, b))
    weights = token_weights(f64([low, high]), beta, 1e-3)
    assert 1e-3 <= weights[1] <= weights[0] <= 2.0


def test_a_token_that_the_reference_excludes_weighs_the_floor() -> None:
    assert float(token_weights(f64([float("inf")]), 2.0, 0.05)) == 0.05


def test_positions_count_supervised_tokens_of_the_row_only() -> None:
    assert response_positions_BT(SUPERVISED_BT).tolist() == [
        [0, 1, 2, 3, 0, 4, 5, 6],
        [1, 2, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 2, 3, 0, 0],
    ]


def test_beta_follows_the_response_position() -> None:
    betas = betas_BT(torch.arange(1, 8)[None], ConstrainedOptions())
    assert betas.tolist() == [[0.5, 2.0, 2.0, 2.0, 2.0, 0.1, 0.1]]


def test_the_objective_is_the_mean_over_rows_of_weighted_token_means() -> None:
    nll, known = nll_BT(), reference()
    expected = []
    for row, length in enumerate(LENGTHS):
        own = nll[row][SUPERVISED_BT[row]]
        betas = [0.5, 2.0, 2.0, 2.0, 2.0, 0.1][:length]
        weights = [
            max(1e-3, 2 * (1 - float(torch.sigmoid(beta * (-loss - log_p)))))
            for beta, loss, log_p in zip(betas, own, known[row], strict=True)
        ]
        expected.append(sum(w * float(x) for w, x in zip(weights, own, strict=True)) / length)
    actual = float(make().objective(losses(nll, [0, 1, 2])))
    assert actual == pytest.approx(sum(expected) / 3, rel=1e-12)


def test_at_the_reference_it_is_plain_tuning() -> None:
    nll = nll_BT()
    known = [-nll[row][SUPERVISED_BT[row]] for row in range(3)]
    step = losses(nll, [0, 1, 2])
    assert float(make(known).objective(step)) == pytest.approx(float(step.user_B.mean()))


def test_its_gradient_is_that_of_the_papers_softplus_objective() -> None:
    nll = nll_BT().requires_grad_()
    (actual,) = torch.autograd.grad(make(floor=0.0).objective(losses(nll, [0, 1, 2])), [nll])
    known = torch.zeros_like(nll)
    known[SUPERVISED_BT] = torch.cat(reference())
    beta = betas_BT(response_positions_BT(SUPERVISED_BT), ConstrainedOptions())
    paper_BT = 2 / beta * torch.nn.functional.softplus(beta * (known + nll))
    paper_B = torch.where(SUPERVISED_BT, paper_BT, 0.0).sum(1) / SUPERVISED_BT.sum(1)
    (expected,) = torch.autograd.grad(paper_B.mean(), [nll])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_what_stands_outside_the_mask_changes_nothing() -> None:
    spoiled = torch.where(SUPERVISED_BT, nll_BT(), torch.nan).requires_grad_()
    objective = make().objective(losses(spoiled, [0, 1, 2]))
    (gradient,) = torch.autograd.grad(objective, [spoiled])
    assert float(objective.detach()) == float(make().objective(losses(nll_BT(), [0, 1, 2])))
    assert not bool(gradient[~SUPERVISED_BT].any())


def test_the_order_of_the_rows_does_not_matter() -> None:
    nll, method = nll_BT(), make()
    forward = float(method.objective(losses(nll, [0, 1, 2])))
    assert float(method.objective(losses(nll, [2, 0, 1]))) == pytest.approx(forward, rel=1e-14)


def test_the_shares_of_two_processes_add_up_to_the_objective_of_one() -> None:
    nll, method = nll_BT(), make()
    whole = float(method.objective(losses(nll, [0, 1, 2])))
    shares = [float(method.objective(losses(nll, rows, 2))) for rows in ([0, 2], [1])]
    assert sum(shares) == pytest.approx(whole, rel=1e-14)


def test_a_process_without_rows_has_a_share_of_zero() -> None:
    assert float(make().objective(losses(nll_BT(), [], 2))) == 0.0


def test_a_row_with_another_number_of_reference_tokens_is_named() -> None:
    known = reference()
    known[1] = known[1][:1]
    with pytest.raises(ReferenceMismatchError, match="row 1 has 2 supervised tokens and 1"):
        make(known).objective(losses(nll_BT(), [0, 1, 2]))


def test_it_refuses_to_start_without_the_reference() -> None:
    with pytest.raises(ReferenceMismatchError, match="all 3 rows and got 0"):
        make([])


def test_it_refuses_losses_of_whole_rows() -> None:
    with pytest.raises(MethodError, match="single tokens"):
        make().objective(losses(nll_BT(), [0])._replace(tokens=None))
