import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from defenses.baselines.lisa import LisaMethod, phase_of, proximal_term, total_steps
from defenses.method import MethodContext, MethodError, StepLosses, StepRecord
from jobspec.defense import LisaOptions

NOTHING = torch.empty(0, dtype=torch.float64)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def options(**changes: float) -> LisaOptions:
    return LisaOptions(**{"alignment_steps": 2, "user_steps": 3, "warmup_share": 0.0, **changes})


def make(w: Tensor, chosen: LisaOptions, user_steps: int = 9) -> LisaMethod:
    return LisaMethod(MethodContext(9, 0, user_steps, 3, {"w": w}, seed=0), chosen)


def losses(method: LisaMethod, step: int, rows: Tensor, *, processes: int = 1) -> StepLosses:
    ids = torch.arange(len(rows))
    user, alignment = (rows, NOTHING) if method.reads(step) == "user" else (NOTHING, rows)
    count = len(rows) * processes
    return StepLosses(user, alignment, ids, ids, count, count, step, 0, processes)


def record(step: int) -> StepRecord:
    return StepRecord(NOTHING, NOTHING, NOTHING, NOTHING, step, 0)


def descend(method: LisaMethod, w: Tensor, steps: range, *, skip: tuple[int, ...] = ()) -> None:
    """Gradient steps on f = |w - 1|^2 / 2 (alignment) and g = |w + 1|^2 / 2 (user)."""
    for step in steps:
        target = 1.0 if method.reads(step) == "alignment" else -1.0
        loss = method.objective(losses(method, step, (w - target).square().sum()[None] / 2))
        (gradient,) = torch.autograd.grad(loss, [w])
        if step in skip:
            continue
        with torch.no_grad():
            w -= 0.3 * gradient
        method.learn(record(step))


def exact_minimum(target: float, w_switch: float, rho: float) -> float:
    """Of (w - target)^2 / 2 plus the pull, a quadratic: one Newton step from 0."""
    w = f64(0.0).requires_grad_()
    value = (w - target).square().sum() / 2 + proximal_term({"w": w}, {"w": f64(w_switch)}, rho)
    (slope,) = torch.autograd.grad(value, [w], create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), [w])
    return float((-slope / curvature).detach())


def test_exact_alternation_settles_where_the_method_brief_computed_it() -> None:
    """Golden: f = (w - 1)^2 / 2, g = (w + 1)^2 / 2, rho = 1 settle at 1/3 and -1/3 (float64,
    computed for the brief on harmful fine-tuning)."""
    w_alignment = w_user = 0.0
    for _ in range(60):
        w_alignment = exact_minimum(1.0, w_user, rho=1.0)
        w_user = exact_minimum(-1.0, w_alignment, rho=1.0)
    assert (w_alignment, w_user) == pytest.approx((1 / 3, -1 / 3), abs=1e-12)


def test_the_method_itself_settles_at_the_same_two_points() -> None:
    w = f64(0.0).requires_grad_()
    long = options(alignment_steps=40, user_steps=40)
    method = make(w, long, user_steps=400)
    descend(method, w, range(total_steps(400, long) - 1))
    assert float(method.w_switch["w"]) == pytest.approx(1 / 3, abs=1e-4)
    assert float(w.detach()) == pytest.approx(-1 / 3, abs=1e-4)


def test_the_pull_is_half_rho_times_the_squared_distance_over_all_tensors() -> None:
    moved: Mapping[str, Tensor] = {"a": f64(1.0, 2.0), "b": f64(3.0)}
    anchor = {"a": f64(0.0, 0.0), "b": f64(1.0)}
    assert float(proximal_term(moved, anchor, 4.0)) == 2.0 * (1.0 + 4.0 + 4.0)


def test_alignment_steps_come_first_and_the_phases_take_turns() -> None:
    method = make(f64(0.0), options())
    read = [method.reads(step)[0] for step in range(12)]
    assert "".join(read) == "aauuuaauuuaa"


@given(
    st.integers(min_value=1, max_value=200),
    st.integers(min_value=1, max_value=9),
    st.integers(min_value=1, max_value=9),
)
def test_the_total_is_where_the_last_user_step_was_taken(n: int, K1: int, K2: int) -> None:
    chosen = options(alignment_steps=K1, user_steps=K2)
    last = total_steps(n, chosen)
    read = [phase_of(step, chosen).reads for step in range(last)]
    assert read.count("user") == n
    assert read[-1] == "user"


def test_a_run_without_user_steps_has_no_step() -> None:
    assert total_steps(0, options()) == 0


def test_the_pull_starts_after_the_warm_up() -> None:
    """15 steps in all, so a share of 0.2 leaves out steps 0 to 3."""
    assert total_steps(9, options()) == 15
    method = make(f64(0.0).requires_grad_(), options(warmup_share=0.2), user_steps=9)
    pulled = []
    for step in range(5):
        method.phase, method.w_switch = phase_of(step, method.options).number, {"w": f64(1.0)}
        pulled.append(float(method.objective(losses(method, step, f64(0.0))).detach()))
    assert pulled == [0.0, 0.0, 0.0, 0.0, 0.5]


def test_without_a_pull_it_alternates_plain_means() -> None:
    w = f64(0.0).requires_grad_()
    method = make(w, options(proximal=0.0, alignment_coefficient=2.0))
    assert float(method.objective(losses(method, 0, f64(1.0, 3.0)))) == 4.0
    assert float(method.objective(losses(method, 2, f64(1.0, 3.0)))) == 2.0


def test_the_anchor_is_the_last_state_of_the_other_phase() -> None:
    w = f64(0.0).requires_grad_()
    method = make(w, options())
    descend(method, w, range(2))
    after_alignment = w.detach().clone()
    descend(method, w, range(2, 4))
    assert torch.equal(method.w_switch["w"], after_alignment)
    assert not torch.equal(w.detach(), after_alignment)


def test_a_skipped_last_step_of_a_phase_does_not_lose_the_switch() -> None:
    w = f64(0.0).requires_grad_()
    method = make(w, options())
    descend(method, w, range(2), skip=(1,))
    before_user = w.detach().clone()
    descend(method, w, range(2, 4))
    assert (method.phase, method.w_switch["w"].tolist()) == (1, before_user.tolist())


@pytest.mark.parametrize("stopped", [0, 1, 2, 4, 5, 7])
def test_a_resumed_run_ends_in_the_same_weights_bit_for_bit(stopped: int) -> None:
    whole = f64(0.2, -0.7).requires_grad_()
    descend(make(whole, options()), whole, range(12))

    w = f64(0.2, -0.7).requires_grad_()
    first = make(w, options())
    descend(first, w, range(stopped))
    saved, weights = first.state(), w.detach().clone()

    fresh = f64(0.2, -0.7).requires_grad_()
    second = make(fresh, options())
    with torch.no_grad():
        fresh.copy_(weights)
    second.load_state(saved)
    descend(second, fresh, range(stopped, 12))
    assert torch.equal(fresh, whole)


def test_a_saved_state_does_not_change_with_the_run() -> None:
    w = f64(0.0).requires_grad_()
    method = make(w, options())
    saved = method.state()
    descend(method, w, range(4))
    assert float(saved["w_switch/w"]) == 0.0


def test_the_state_of_another_adapter_is_refused() -> None:
    state = make(f64(0.0, 0.0), options()).state()
    with pytest.raises(MethodError, match="this adapter"):
        make(f64(0.0), options()).load_state(state)


@pytest.mark.parametrize("step", [1, 3])
def test_the_shares_of_two_processes_add_up_to_the_objective_of_one(step: int) -> None:
    w = f64(0.0).requires_grad_()
    method = make(w, options())
    method.phase, method.w_switch = phase_of(step, method.options).number, {"w": f64(2.0)}
    rows = f64(1.0, 2.0, 6.0, 3.0)
    whole = float(method.objective(losses(method, step, rows)).detach())
    shares = [
        float(method.objective(losses(method, step, rows[part::2], processes=2)).detach())
        for part in (0, 1)
    ]
    assert math.fsum(shares) == pytest.approx(whole, rel=1e-12)


def test_a_process_without_rows_still_adds_its_share_of_the_pull() -> None:
    w = f64(0.0).requires_grad_()
    method = make(w, options())
    method.phase, method.w_switch = 1, {"w": f64(2.0)}
    share = losses(method, 3, NOTHING, processes=2)
    assert float(method.objective(share).detach()) == 1.0
