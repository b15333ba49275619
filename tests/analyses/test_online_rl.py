"""Scores of PPO records: golden values of the method's brief, and autograd as the reference."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from analyses.context import AnalysisContext, AnalysisError, Stopped
from analyses.online_rl.buffer import Samples, gae, minibatches, standardize_by_minibatch
from analyses.online_rl.diagnostics import (
    efficiency,
    monte_carlo_advantages,
    roughness,
    sign_mismatch,
)
from analyses.online_rl.ghost import capture, inner, products, scored_layers, weight_gradients
from analyses.online_rl.iif import drop_indices, keep_positive
from analyses.online_rl.influence import (
    ActionTarget,
    ReturnTarget,
    RoundInfluence,
    Scores,
    score_start,
)
from analyses.online_rl.policy import ActorCritic
from analyses.online_rl.spec import ONLINE_RL, OnlineRLRequest
from analyses.online_rl.targets import (
    last_token,
    on_clipped_side,
    policy_loss,
    return_target,
    sequence_target,
)
from analyses.run import read_request, run_analysis

STATES, ACTIONS = [0, 0, 0, 1, 1, 1, 0, 1], [0, 1, 2, 0, 1, 2, 0, 0]
ADVANTAGES = [1, -0.5, -0.6, 0.8, -0.4, -0.7, 0.9, 0.7]


class Tabular(nn.Module):
    """Softmax over a table of two states and three actions (the brief's 6.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(2, 3, bias=False, dtype=torch.float64)
        rows = torch.tensor([[0.2, -0.1, 0], [0.5, 0, -0.5]], dtype=torch.float64)
        self.table.weight.data.copy_(rows.T)

    def evaluate_actions(
        self, observations: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_prob = torch.log_softmax(self.table(torch.eye(2).double()[observations]), dim=1)
        return log_prob[:, 0], log_prob.gather(1, actions[:, None])[:, 0], log_prob.sum(dim=1)


def round_of(policy: Any, observations: Tensor, actions: Tensor, advantages: Tensor) -> Samples:
    with torch.no_grad():
        values, log_prob, _ = policy.evaluate_actions(observations, actions)
    return Samples(
        observations, actions, values, log_prob, advantages, advantages, torch.arange(len(actions))
    )


def tabular_round(extra: float | None = None) -> tuple[Tabular, Samples]:
    policy = Tabular()
    bad = extra is not None
    return policy, round_of(
        policy,
        torch.tensor(STATES + [0] * bad),
        torch.tensor(ACTIONS + [2] * bad),
        torch.tensor([*ADVANTAGES, *([extra] if bad else [])], dtype=torch.float64),
    )


def test_scores_of_the_two_state_table_are_the_briefs() -> None:
    policy, samples = tabular_round()
    scores = score_start(policy, samples, samples.advantages).score_N
    expected = [0.181594, 0.054140, 0.074294, 0.094524, 0.043753, 0.098586, 0.163435, 0.082708]
    assert scores.tolist() == pytest.approx(expected, abs=5e-7)


def test_standardised_advantages_give_the_briefs_scores() -> None:
    policy, samples = tabular_round()
    weights = standardize_by_minibatch(samples.advantages, torch.zeros(8))
    expected = [0.203684, 0.092875, 0.122547, 0.101344, 0.079386, 0.157970, 0.179721, 0.085753]
    assert score_start(policy, samples, weights).score_N.tolist() == pytest.approx(
        expected, abs=5e-7
    )


def test_leave_one_out_scores_are_the_briefs() -> None:
    policy, samples = tabular_round()
    scores = score_start(policy, samples, samples.advantages, reference="leave_one_out")
    expected = [0.127915, 0.034736, 0.048960, 0.073956, 0.032375, 0.041763, 0.122290, 0.068438]
    assert scores.score_N.tolist() == pytest.approx(expected, abs=5e-7)


def test_an_action_target_scores_records_of_its_state_alone() -> None:
    policy, samples = tabular_round()
    target = ActionTarget(torch.tensor([0]), torch.tensor([0]))
    scores = score_start(policy, samples, samples.advantages, target)
    expected = [0.557344, 0.170697, 0.223101, 0, 0, 0, 0.501610, 0]
    assert scores.score_N.tolist() == pytest.approx(expected, abs=5e-7)
    assert scores.target_value == pytest.approx(
        math.log(math.exp(0.2) / (math.exp(0.2) + math.exp(-0.1) + 1))
    )


@pytest.mark.parametrize(
    ("b", "by_buffer", "by_others", "last_by_buffer"),
    [
        (0.5, -0.035617, -0.061912, True),
        (1.0, -0.032401, -0.123824, True),
        (1.5, 0.009648, -0.185736, False),
        (2.0, 0.090529, -0.247648, False),
        (3.0, 0.368789, -0.371472, False),
    ],
)
def test_a_bad_record_protects_itself_and_leave_one_out_uncovers_it(
    b: float, by_buffer: float, by_others: float, last_by_buffer: bool
) -> None:
    policy, samples = tabular_round(b)
    buffer = score_start(policy, samples, samples.advantages)
    others = score_start(policy, samples, samples.advantages, reference="leave_one_out")
    assert float(buffer.score_N[8]) == pytest.approx(by_buffer, abs=5e-7)
    assert float(others.score_N[8]) == pytest.approx(by_others, abs=5e-7)
    assert (int(buffer.score_N.argmin()) == 8) is last_by_buffer
    assert int(others.score_N.argmin()) == 8
    protected = bool(buffer.score_N[8] > 0 > buffer.cross_term_N[8])
    assert protected is (by_buffer > 0)
    assert buffer.self_protected() >= protected


@pytest.mark.parametrize(
    ("advantage", "ratio", "slope"), [(1, 1.3, 0), (1, 0.7, -0.7), (-1, 1.3, 1.3), (-1, 0.7, 0)]
)
def test_the_clip_has_the_briefs_slopes(advantage: float, ratio: float, slope: float) -> None:
    log_prob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([float(advantage)], dtype=torch.float64)
    old = torch.zeros(1, dtype=torch.float64)
    (found,) = torch.autograd.grad(policy_loss(log_prob, old, weights, 0.2).sum(), log_prob)
    assert float(found) == pytest.approx(slope)
    assert bool(on_clipped_side(log_prob, old, weights, 0.2)) is (slope == 0)


def test_a_record_on_the_clipped_side_has_no_score() -> None:
    policy, samples = tabular_round()
    moved = samples.old_log_prob.clone()
    moved[0] -= math.log(1.3)
    scores = score_start(policy, samples._replace(old_log_prob=moved), samples.advantages)
    assert float(scores.score_N[0]) == 0
    assert scores.clipped == 1


def test_advantages_are_the_briefs() -> None:
    advantages, returns = gae([0, 0, 1], [0.5, 0.4, 0.3], [0, 0, 1], 9.0, 1.0, 0.95)
    assert advantages.tolist() == pytest.approx([0.43675, 0.565, 0.7])
    assert returns.tolist() == pytest.approx([0.93675, 0.965, 1])


def test_the_last_state_counts_where_the_round_cuts_an_episode() -> None:
    advantages, _ = gae([0.0], [0.5], [0], 2.0, 0.9, 0.95)
    assert advantages.tolist() == pytest.approx([0.9 * 2.0 - 0.5])


def test_the_sequence_target_is_the_briefs() -> None:
    log_prob = torch.tensor([[-1, -2, -0.5, 0], [-0.3, -0.7, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    advantages = torch.tensor([[0.1, -0.2, 0.8, 9], [0.4, -1.2, 9, 9]])
    assert last_token(mask).tolist() == [2, 1]
    assert float(-sequence_target(log_prob, mask, advantages).mean()) == pytest.approx(0.8)


def by_autograd(policy: nn.Module, losses: Tensor, skip: str) -> Tensor:
    named = [(name, p) for name, p in policy.named_parameters() if skip not in name]
    rows = []
    for loss in losses:
        grads = torch.autograd.grad(loss, [p for _, p in named], retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("reference", ["buffer", "leave_one_out", "holdout"])
@pytest.mark.parametrize("continuous", [False, True])
def test_scores_equal_autograd_record_by_record(reference: Any, continuous: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    policy = ActorCritic(4, 2, continuous=continuous, generator=generator)
    # The first weights make all actions alike; a policy in training has larger ones.
    nn.init.orthogonal_(policy.action_net.weight, 1.0, generator=generator)
    observations = torch.randn(32, 4, generator=generator)
    actions = (
        torch.randn(32, 2, generator=generator)
        if continuous
        else torch.randint(2, (32,), generator=generator)
    )
    samples = round_of(policy, observations, actions, torch.randn(32, generator=generator))
    held = samples.at(torch.arange(10)) if reference == "holdout" else None
    weights = standardize_by_minibatch(samples.advantages, torch.arange(32) // 8)
    scores = score_start(
        policy,
        samples,
        weights,
        ReturnTarget(held),
        reference=reference,
        ent_coef=0.01,
        chunk=7,
    )

    def gradients(part: Samples) -> Tensor:
        _, log_prob, _ = policy.evaluate_actions(part.observations, part.actions)
        return by_autograd(policy, return_target(log_prob, part.advantages), "value_net")

    _, log_prob, entropy = policy.evaluate_actions(observations, actions)
    losses = policy_loss(log_prob, samples.old_log_prob, weights, 0.2) - 0.01 * entropy
    training = by_autograd(policy, losses, "value_net")
    target = gradients(held or samples)
    if reference == "leave_one_out":
        mean = (target.sum(dim=0) - target) / (len(target) - 1)
    else:
        mean = target.mean(dim=0).expand_as(training)
    expected = -(mean * training).sum(dim=1).double()
    assert float((scores.score_N - expected).abs().max() / expected.abs().max()) < 1e-5
    if reference != "holdout":
        own = -(target * training).sum(dim=1).double() / 32
        assert torch.allclose(scores.self_term_N, own, atol=1e-6)


def test_scores_of_all_steps_equal_autograd_summed_over_them() -> None:
    policy, samples = tabular_round()
    influence = RoundInfluence(policy, samples, ReturnTarget())
    expected = torch.zeros(8, dtype=torch.float64)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    for rows in (torch.tensor([0, 2, 4, 6]), torch.tensor([1, 3, 5, 7]), torch.arange(8)):
        weights = standardize_by_minibatch(samples.advantages[rows], torch.zeros(len(rows)))
        influence.step(rows, weights)
        _, log_prob, _ = policy.evaluate_actions(samples.observations, samples.actions)
        losses = policy_loss(log_prob[rows], samples.old_log_prob[rows], weights, 0.2)
        target = by_autograd(policy, (log_prob * samples.advantages).mean()[None], "none")[0]
        expected[rows] -= by_autograd(policy, losses, "none") @ target
        optimizer.zero_grad()
        losses.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert torch.allclose(influence.scores().score_N, expected, atol=1e-12)


def test_a_convolution_is_scored_as_autograd_has_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 9, 2)
    ).double()
    x = torch.randn(6, 2, 5, 5, dtype=torch.float64)

    def forward() -> list[Tensor]:
        y = model(x)
        return [y.square().sum(), y[:, 0].sum()]

    layers = scored_layers(model)
    captured, totals = capture(layers, forward)
    rows = by_autograd(model, model(x).square().sum(dim=1), "none")
    others = by_autograd(model, model(x)[:, 0], "none")
    assert torch.allclose(products(captured[0], totals[1]), rows @ others.sum(dim=0))
    assert torch.allclose(inner(captured[0], captured[1], layers), (rows * others).sum(dim=1))


def test_gradients_of_a_lora_pair_are_the_briefs() -> None:
    x = torch.tensor([[[1.0, 0], [0, 2]]], dtype=torch.float64)
    a = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    b = nn.Linear(1, 3, bias=False, dtype=torch.float64)
    a.weight.data = torch.tensor([[1.0, -1]], dtype=torch.float64)
    b.weight.data = torch.tensor([[2.0], [1], [0]], dtype=torch.float64)
    w = torch.tensor([[1.0, 2, 3], [0, 1, -1]], dtype=torch.float64)

    def forward() -> list[Tensor]:
        y = 0.5 * b(a(x))
        return [(y * w).sum() + 0.5 * y.square().sum()]

    layers: dict[str, nn.Module] = {"a": a, "b": b}
    (captured,), _ = capture(layers, forward)
    found = {
        name: weight_gradients(one.inputs, one.gradients)[0].tolist()
        for name, one in captured.items()
        if one.inputs is not None
    }
    assert found == {"a": [[3.25, -4]], "b": [[3], [1.25], [2.5]]}


@pytest.mark.parametrize(("tokens", "width"), [(2, 9), (9, 2)])
def test_own_terms_of_sequences_are_the_same_by_gradients_and_by_gram(
    tokens: int, width: int
) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(width, width, dtype=torch.float64)
    x = torch.randn(4, tokens, width, dtype=torch.float64)
    layers: dict[str, nn.Module] = {"only": layer}
    kept: list[Tensor] = []

    def forward() -> list[Tensor]:
        y = layer(x)
        kept.extend([y.square().sum(dim=(1, 2)), y.sin().sum(dim=(1, 2))])
        return [one.sum() for one in kept]

    captured, _ = capture(layers, forward)
    y = layer(x)
    first = by_autograd(layer, y.square().sum(dim=(1, 2)), "none")
    second = by_autograd(layer, y.sin().sum(dim=(1, 2)), "none")
    assert torch.allclose(inner(captured[0], captured[1], layers), (first * second).sum(dim=1))


def test_a_layer_used_twice_is_refused() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(AnalysisError, match="used twice"):
        capture({"only": layer}, lambda: [layer(layer(torch.ones(1, 2))).sum()])


@pytest.mark.parametrize(
    ("p", "dropped"), [(0.5, [0, 1]), (1.0, [0, 1, 2, 3]), (0.125, []), (0.75, [0, 1, 2])]
)
def test_the_filter_drops_what_the_brief_says(p: float, dropped: list[int]) -> None:
    assert drop_indices([-3, -1, -0.5, -0.1, 0, 0.2, 1], p) == dropped


def test_ties_are_dropped_in_the_order_of_the_buffer() -> None:
    assert drop_indices([1, -1, -1, -1, -1], 0.5) == [1, 2]


def test_a_filter_never_empties_the_buffer() -> None:
    assert drop_indices([-1, -2], 1.0) == []
    assert keep_positive([-1, 0]) == [0, 1]
    assert keep_positive([-1, 0, 2]) == [2]


@pytest.mark.parametrize("p", [0.0, -0.1, 1.01, math.nan])
def test_a_share_outside_its_range_is_refused(p: float) -> None:
    with pytest.raises(AnalysisError, match="p lies within"):
        drop_indices([-1.0], p)


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.sampled_from([0.125, 0.25, 0.5, 1.0])
)
@settings(max_examples=60, deadline=None)
def test_what_is_dropped_scores_no_higher_than_what_is_kept(scores: list[float], p: float) -> None:
    dropped = set(drop_indices(scores, p))
    kept = [score for index, score in enumerate(scores) if index not in dropped]
    assert kept
    assert all(scores[index] < 0 for index in dropped)
    assert all(scores[index] <= min(kept) for index in dropped)


def test_saved_rounds_are_the_briefs() -> None:
    saved = efficiency([0, 1, 2, 3], [0, 2, 3, 3])
    assert (saved.average, saved.at_peak) == (pytest.approx(0.14583, abs=5e-6), 0.25)


def test_a_level_that_is_not_reached_counts_as_a_loss() -> None:
    saved = efficiency([0, 1], [0, 0.5])
    assert (saved.average, saved.at_peak) == (pytest.approx((0 + (1 - 3 / 2)) / 2), None)


def test_monte_carlo_advantages_are_differences_of_mean_returns() -> None:
    # State 0: action 0 leads to 1 then reward 1 (return 0.5), action 1 ends with 0 at once.
    found = monte_carlo_advantages(
        [0, 1, 0, 0], [0, 0, 1, 0], [0.0, 1.0, 0.0, 0.0], [0, 1, 1, 0], gamma=0.5
    )
    assert found[:3].tolist() == pytest.approx([0.25, 0.0, -0.25])
    assert sign_mismatch([1.0, 0.0, 1.0], found[:3]) == 0.5


def test_scores_that_agree_among_neighbours_are_smooth() -> None:
    places = np.repeat(np.eye(3), 10, axis=0) + 0.01 * np.arange(30)[:, None]
    smooth, rough = np.repeat([1.0, 2.0, 3.0], 10), np.tile([1.0, 3.0], 15)
    low, high = roughness(places, smooth, 5), roughness(places, rough, 5)
    assert low is not None
    assert high is not None
    assert low < 0.01 < high
    assert roughness(places, -smooth) is None


def test_minibatches_drop_the_ragged_end_and_cover_a_small_rest() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = list(minibatches(10, 4, generator))
    assert [len(block) for block in blocks] == [4, 4]
    assert len(torch.cat(blocks).unique()) == 8
    assert sorted(torch.cat(list(minibatches(3, 4, generator))).tolist()) == [0, 1, 2]


@pytest.fixture
def recorded(tmp_path: Path) -> Any:
    """A round of a small policy on numbered states, as files; and how to ask about it."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    policy = ActorCritic(5, 3, n_states=5, hidden=(8, 8), generator=generator)
    observations = torch.randint(5, (40,), generator=generator)
    actions = torch.randint(3, (40,), generator=generator)
    samples = round_of(policy, observations, actions, torch.randn(40, generator=generator))
    columns: dict[str, Any] = {
        "obs": observations.numpy(),
        "action": actions.numpy(),
        "logp_old": samples.old_log_prob.numpy(),
        "advantage": samples.advantages.numpy(),
        "reward": np.tile([0.0, 1.0], 20),
        "done": np.tile([0, 1], 20),
    }
    save_file(policy.state_dict(), tmp_path / "policy.safetensors")

    def ask(
        raw: dict[str, Any],
        replace: dict[str, Any] | None = None,
        form: str = "npz",
        **options: Any,
    ) -> dict[str, Any]:
        content = {k: v for k, v in {**columns, **(replace or {})}.items() if v is not None}
        path = tmp_path / f"buffer.{form}"
        if form == "npz":
            np.savez(path, **content)
        else:
            lines = [
                {name: np.asarray(column)[k].tolist() for name, column in content.items()}
                for k in range(len(content["obs"]))
            ]
            if form == "jsonl":
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            else:
                import pyarrow as pa
                import pyarrow.parquet as pq

                pq.write_table(pa.Table.from_pylist(lines), path)
        files = {"buffer": path, "policy": tmp_path / "policy.safetensors", "holdout": path}
        request = {"buffer": "b", "policy": "p", "ppo": {"batch_size": 8, "n_epochs": 2}, **raw}
        context = AnalysisContext(
            work=tmp_path / "work", cache_dir=tmp_path / "cache", files=files, **options
        )
        return run_analysis(ONLINE_RL, read_request(ONLINE_RL, request), context, tmp_path / "out")

    ask.policy, ask.samples = policy, samples  # type: ignore[attr-defined]
    return ask


def test_a_recorded_round_has_the_scores_of_its_policy(recorded: Any, tmp_path: Path) -> None:
    result = recorded({"p": 1.0})
    samples = recorded.samples
    weights = standardize_by_minibatch(samples.advantages, torch.arange(40) // 8)
    expected: Scores = score_start(recorded.policy, samples, weights)
    found = [record["score"] for record in result["records"]]
    assert found == pytest.approx(expected.score_N.tolist(), rel=1e-5, abs=1e-9)
    best = max(result["records"], key=lambda record: record["score"])
    assert best["rank"] == 1
    assert result["summary"]["n_negative"] == len(result["summary"]["drop_indices"])
    assert result["tables"] == ["records.parquet"]
    assert "Learning diagnosis" in (tmp_path / "out/index.html").read_text()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_every_form_of_the_buffer_gives_the_same_scores(recorded: Any, form: str) -> None:
    by_npz, other = recorded({}), recorded({}, form=form)
    for one, two in zip(by_npz["records"], other["records"], strict=True):
        assert one["score"] == pytest.approx(two["score"], rel=1e-5)


def test_all_checkpoints_start_from_the_score_at_the_snapshot(recorded: Any) -> None:
    raw = {"ppo": {"batch_size": 40, "n_epochs": 1}}
    at_start = recorded(raw)
    replayed = recorded({**raw, "checkpoints": "all"})
    assert [r["score"] for r in replayed["records"]] == pytest.approx(
        [r["score"] for r in at_start["records"]], rel=1e-5
    )
    assert "replayed" in replayed["warnings"][0]


def test_scores_over_all_checkpoints_are_reproducible(recorded: Any) -> None:
    raw = {"checkpoints": "all", "ppo": {"batch_size": 8, "n_epochs": 3, "learning_rate": 0.5}}
    first, again = recorded(raw), recorded(raw)
    assert first["records"] == again["records"]
    assert first["records"] != recorded({})["records"]


def test_an_action_target_and_a_holdout_are_read(recorded: Any) -> None:
    action = recorded({"target": {"kind": "action", "state": 3, "action": 1}})
    assert action["summary"]["target_value"] < 0
    held = recorded({"reference": "holdout", "holdout": "h"})
    assert [r["self_term"] for r in held["records"]] == [0.0] * 40


def test_listed_keeps_both_ends(recorded: Any) -> None:
    result = recorded({"listed": 4})
    assert sorted(record["rank"] for record in result["records"]) == [1, 2, 39, 40]


def test_advantages_are_computed_where_the_buffer_has_none(recorded: Any) -> None:
    with_values = {"advantage": None, "value": np.zeros(40)}
    result = recorded({}, with_values)
    # Zero values and reward 1 one step later, with the default gamma 0.99 and lambda 0.95.
    assert result["records"][0]["advantage"] == pytest.approx(0.99 * 0.95)


def test_another_snapshot_is_noticed(recorded: Any) -> None:
    result = recorded({}, {"logp_old": np.full(40, -3.0)})
    assert any("logp_old differs" in text for text in result["warnings"])


@pytest.mark.parametrize(
    ("raw", "replace", "message"),
    [
        ({}, {"obs": np.full(40, 5)}, "unknown state \\[5\\] .*0 to 4"),
        ({}, {"action": np.full(40, 3)}, "unknown action \\[3\\]"),
        ({}, {"action": np.full(40, 0.5)}, "unknown action \\[0.5\\]"),
        ({}, {"advantage": np.r_[np.zeros(39), np.nan]}, "advantage of record 39 is not a finite"),
        ({}, {"advantage": None}, "lacks value .*advantage is absent"),
        ({}, {"logp_old": None}, "lacks logp_old"),
        ({}, {"advantage": np.zeros((40, 2))}, "advantage is one number a record"),
        ({}, {"logp_old": np.zeros(3)}, "logp_old has 3 values, obs has 40"),
        ({}, {"obs": np.zeros((40, 3))}, "an observation has 3 numbers, the policy reads 5"),
        ({"minibatch_ids": [0, 1]}, {}, "2 values for 40 records"),
        ({"target": {"kind": "action", "state": 9, "action": 0}}, {}, "unknown state"),
        ({"target": {"kind": "action", "state": 0, "action": 7}}, {}, "unknown action"),
        ({"target": {"kind": "action"}}, {}, "the target is empty"),
        ({"target": {"kind": "sequence"}}, {}, "language model"),
        (
            {"target": {"kind": "action", "prompt": "a", "completion": " "}},
            {},
            "completion is empty",
        ),
        ({"p": 0}, {}, "p: .*greater than 0"),
        ({"p": 1.5}, {}, "p: .*less than or equal to 1"),
        ({"policy": None}, {}, "file of policy, or the job of a language model"),
    ],
)
def test_a_bad_round_is_refused(
    recorded: Any, raw: dict[str, Any], replace: dict[str, Any], message: str
) -> None:
    with pytest.raises(AnalysisError, match=message):
        recorded(raw, replace)


def test_an_empty_buffer_is_refused(recorded: Any) -> None:
    names = ("obs", "action", "logp_old", "advantage", "reward", "done")
    with pytest.raises(AnalysisError, match="no records"):
        recorded({}, {name: np.zeros(0) for name in names})


def test_a_file_that_is_no_buffer_is_refused(recorded: Any, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_bytes(b"\xff\xfe\x00")
    from analyses.online_rl.files import read_columns, read_tensors

    with pytest.raises(AnalysisError, match="no npz, Parquet or JSON lines"):
        read_columns(tmp_path / "wrong", "buffer")
    with pytest.raises(AnalysisError, match="no safetensors or npz"):
        read_tensors(tmp_path / "wrong")
    np.savez(tmp_path / "words.npz", weight=np.array(["a"]))
    with pytest.raises(AnalysisError, match="no safetensors or npz"):
        read_tensors(tmp_path / "words.npz")


def test_rewards_that_are_no_numbers_only_cost_the_comparison_with_returns(recorded: Any) -> None:
    assert len(recorded({}, {"reward": np.full(40, "x")})["records"]) == 40


def test_a_stop_ends_the_replay(recorded: Any) -> None:
    with pytest.raises(Stopped):
        recorded({"checkpoints": "all"}, stop=lambda: True)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"experiment": "frozen_lake", "buffer": "b"},
        {"experiment": "frozen_lake", "policy": "p"},
        {"experiment": "frozen_lake", "target": {"kind": "action", "state": 0, "action": 0}},
        {"experiment": "frozen_lake", "checkpoints": "all"},
        {"experiment": "frozen_lake", "arms": ["ppo", "ppo"]},
        {"buffer": "b", "reference": "holdout"},
        {"buffer": "b", "target": {"kind": "return", "state": 1}},
    ],
)
def test_a_request_of_parts_that_do_not_fit_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OnlineRLRequest.model_validate_json(json.dumps(raw))
