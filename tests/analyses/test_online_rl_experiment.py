"""Influence-based filtering on FrozenLake against PPO and random filtering."""

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from analyses.context import AnalysisContext, AnalysisError, Stopped
from analyses.online_rl import tasks
from analyses.online_rl.buffer import Samples, standardize_by_minibatch
from analyses.online_rl.iif import InfluenceFilter
from analyses.online_rl.influence import ActionTarget, ReturnTarget, score_start
from analyses.online_rl.ppo import PPO
from analyses.online_rl.spec import ONLINE_RL, PPOSettings
from analyses.run import read_request, run_analysis

pytest.importorskip("gymnasium", reason="the tasks need gymnasium (extra `rl`)")

SMALL = PPOSettings(n_steps=256, n_epochs=2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices are slower on several threads, and sums then differ between machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ask(folder: Path, raw: dict[str, Any], **options: Any) -> dict[str, Any]:
    context = AnalysisContext(work=folder / "work", cache_dir=folder / "cache", **options)
    return run_analysis(ONLINE_RL, read_request(ONLINE_RL, raw), context, folder / "out")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The kind's own example, with its settings of the paper: 11 rounds, 2 seeds, 3 arms."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("experiment")
    return ask(folder, ONLINE_RL.example), folder


def arm(result: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in result["arms"] if one["name"] == name)
    return found


def test_filtering_reaches_half_of_the_return_earlier_for_each_seed(
    compared: tuple[dict[str, Any], Path],
) -> None:
    # The brief's 6.9: rounds 8 and 7 with filtering, 13 and 11 without, for its two seeds.
    filtered, standard = arm(compared[0], "iif"), arm(compared[0], "ppo")
    for with_filter, without in zip(filtered["first_half"], standard["first_half"], strict=True):
        assert with_filter is not None
        assert with_filter <= 9
        assert without is None or with_filter < without
    assert filtered["lowest"][9] > 0.5
    assert filtered["returns"][9] > standard["returns"][9] + 0.1
    assert filtered["saved_rounds"] > 0.1


def test_random_filtering_of_as_many_records_is_worse_than_none(
    compared: tuple[dict[str, Any], Path],
) -> None:
    random, standard = arm(compared[0], "random"), arm(compared[0], "ppo")
    assert random["returns"][9] < standard["returns"][9]
    assert random["dropped"] == pytest.approx(arm(compared[0], "iif")["dropped"], abs=0.05)


def test_an_experiment_leaves_tables_and_pictures(compared: tuple[dict[str, Any], Path]) -> None:
    result, folder = compared
    rounds = pq.read_table(folder / "out/rounds.parquet")
    assert rounds.num_rows == 3 * 2 * 11
    assert pq.read_table(folder / "out/records.parquet").num_rows == 2048
    assert len(result["records"]) == 2048
    page = (folder / "out/index.html").read_text()
    for title in ("Return by round", "Scores over the rounds", "Learning diagnosis"):
        assert title in page
    assert any("2 seed(s)" in text for text in result["warnings"])


def test_dropped_advantages_have_the_wrong_sign_more_often_early_on(
    compared: tuple[dict[str, Any], Path],
) -> None:
    rows = [
        row
        for row in pq.read_table(compared[1] / "out/rounds.parquet").to_pylist()
        if row["arm"] == "iif" and row["round"] <= 5
    ]
    dropped = np.mean([row["sign_mismatch_dropped"] for row in rows])
    assert dropped > np.mean([row["sign_mismatch_kept"] for row in rows])


RAW = {
    "experiment": "frozen_lake",
    "seeds": 2,
    "rounds": 2,
    "p": 1.0,
    "arms": ["ppo", "iif_leave_one_out", "random_all"],
    "ppo": SMALL.model_dump(mode="json"),
}


def test_the_same_seed_gives_the_same_result(tmp_path: Path) -> None:
    one, two = ask(tmp_path / "a", RAW, seed=5), ask(tmp_path / "b", RAW, seed=5)
    assert one == two
    assert one["arms"] != ask(tmp_path / "c", RAW, seed=6)["arms"]


def test_a_stopped_experiment_goes_on_where_it_was(tmp_path: Path) -> None:
    calls = iter(range(100))
    with pytest.raises(Stopped):
        ask(tmp_path, RAW, stop=lambda: next(calls) >= 5)
    kept = sorted((tmp_path / "work").glob("*.json"))
    assert len(kept) == 2
    times = [path.stat().st_mtime_ns for path in kept]
    resumed = ask(tmp_path, RAW)
    assert [path.stat().st_mtime_ns for path in kept] == times
    assert resumed == ask(tmp_path / "whole", RAW)


def test_progress_counts_the_rounds_of_all_runs(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    ask(tmp_path, RAW, progress=lambda _what, done, total: seen.append((done, total)))
    assert seen == [(k, 12) for k in range(12)]


def test_other_tasks_run(tmp_path: Path) -> None:
    raw = {**RAW, "experiment": "cart_pole", "seeds": 1, "rounds": 1, "arms": ["iif"]}
    result = ask(tmp_path, raw)
    assert result["arms"][0]["returns"][0] > 5
    assert pq.read_table(tmp_path / "out/records.parquet").num_rows == 256


def test_a_missing_gymnasium_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name == "gymnasium":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(AnalysisError, match=r"tunegate\[rl\]"):
        ask(tmp_path, RAW)


def test_the_filter_leaves_the_buffer_as_it_was_and_can_be_taken_off() -> None:
    ppo = PPO(tasks.make("frozen_lake"), SMALL, seed=0)
    own = ppo.train
    chosen = InfluenceFilter(ppo, 1.0, seed=0)
    buffer = ppo.collect_rollouts()
    ppo.train()
    assert ppo.rollout_buffer is buffer
    assert len(buffer) == 256
    done = chosen.rounds[0]
    assert done.dropped == tuple((done.scores.score_N < 0).nonzero().flatten().tolist())
    chosen.detach()
    assert ppo.train == own


def test_an_update_on_kept_records_differs_only_by_the_dropped_ones() -> None:
    def trained(p: float | None) -> torch.Tensor:
        ppo = PPO(tasks.make("frozen_lake"), SMALL, seed=0)
        if p is not None:
            InfluenceFilter(ppo, p, seed=0)
        ppo.learn(256)
        return torch.nn.utils.parameters_to_vector(ppo.policy.parameters()).detach()

    assert torch.equal(trained(0.5), trained(0.5))
    assert not torch.equal(trained(0.5), trained(None))


def test_a_filter_names_the_parameters_that_it_cannot_score() -> None:
    ppo = PPO(tasks.make("frozen_lake"), SMALL, seed=0)
    assert InfluenceFilter(ppo, 0.5, seed=0).unscored == []
    ppo.policy.register_parameter("other", torch.nn.Parameter(torch.zeros(1)))
    assert InfluenceFilter(ppo, 0.5, seed=0).unscored == ["other"]


def test_rounds_below_the_noise_floor_are_not_filtered() -> None:
    ppo = PPO(tasks.make("frozen_lake"), SMALL, seed=0)
    chosen = InfluenceFilter(ppo, 1.0, seed=0, noise_floor=0.99)
    ppo.collect_rollouts()
    ppo.train()
    # All actions alike in all states: gradients of the log-probabilities nearly vanish.
    with torch.no_grad():
        ppo.policy.mlp_extractor.policy_net[0].weight.zero_()  # type: ignore[union-attr]
        ppo.policy.action_net.weight.zero_()
        ppo.policy.action_net.bias.copy_(torch.tensor([9.0, 0, 0, 0]))
    ppo.collect_rollouts()
    ppo.train()
    last = chosen.rounds[-1]
    assert last.dropped == ()
    assert last.warning is not None
    assert "noise floor" in last.warning


def test_the_exact_return_is_that_of_a_long_sample() -> None:
    ppo = PPO(tasks.make("frozen_lake"), SMALL, seed=1)
    with torch.no_grad():
        ppo.policy.action_net.bias.copy_(torch.tensor([0.0, 1.0, 1.0, 0.0]))
    exact = tasks.return_of(ppo.policy, "frozen_lake", 0)
    ppo.settings = PPOSettings(n_steps=8000)
    ppo.collect_rollouts()
    sampled = ppo.rewards_T.sum() / ppo.dones_T.sum()
    assert exact == pytest.approx(sampled, abs=0.03)


@pytest.fixture(scope="module")
def half_trained() -> PPO:
    """FrozenLake after 12 rounds, and a buffer of the policy."""
    torch.set_num_threads(1)
    ppo = PPO(tasks.make("frozen_lake"), PPOSettings(), seed=0)
    ppo.learn(12 * 2048)
    ppo.collect_rollouts()
    return ppo


def test_an_action_is_explained_by_its_own_success_and_its_rivals_failure(
    half_trained: PPO,
) -> None:
    # The brief's 6.10: true of the 50 highest of 2048 records.
    assert half_trained.rollout_buffer is not None
    samples = half_trained.rollout_buffer.samples
    target = ActionTarget(torch.tensor([14]), torch.tensor([2]))
    scores = score_start(half_trained.policy, samples, samples.advantages, target)
    top = scores.score_N.argsort(descending=True)[:50]
    same = samples.actions[top] == 2
    assert bool((same == (samples.advantages[top] > 0)).all())


@pytest.mark.parametrize(("state", "action"), [(4, 2), (10, 2)])
@pytest.mark.parametrize(("size", "rank"), [(3.0, 0), (10.0, 0), (30.0, 0), (100.0, 2047)])
def test_a_step_into_a_hole_with_a_wrong_advantage_is_found_by_the_other_records(
    half_trained: PPO, state: int, action: int, size: float, rank: int
) -> None:
    # The brief's 6.3: at 100 standard deviations the buffer calls the bad record the best.
    assert half_trained.rollout_buffer is not None
    samples: Samples = half_trained.rollout_buffer.samples
    place = int(((samples.observations == state) & (samples.actions == action)).nonzero()[0])
    advantages = samples.advantages.clone()
    advantages[place] = size * advantages.std()
    bad = samples._replace(advantages=advantages)
    weights = standardize_by_minibatch(advantages, torch.arange(2048) // 64)

    def rank_by(reference: Any, held: Samples | None = None) -> int:
        score_N = score_start(
            half_trained.policy, bad, weights, ReturnTarget(held), reference=reference
        ).score_N
        return int((score_N < score_N[place]).sum())

    found = (rank_by("buffer"), rank_by("leave_one_out"), rank_by("holdout", samples))
    assert found == (rank, 0, 0)


def test_work_of_another_request_is_not_taken_over(tmp_path: Path) -> None:
    ask(tmp_path, {**RAW, "rounds": 1})
    files = len(list((tmp_path / "work").glob("*.json")))
    ask(tmp_path, RAW)
    assert len(list((tmp_path / "work").glob("*.json"))) == 2 * files
    for path in (tmp_path / "work").glob("*.json"):
        json.loads(path.read_text())


def test_rounds_without_any_reward_are_warned_of(tmp_path: Path) -> None:
    small = {**RAW, "ppo": {**RAW["ppo"], "n_steps": 16, "batch_size": 16}, "arms": ["iif"]}
    result = ask(tmp_path, small)
    assert any("no reward at all" in text for text in result["warnings"])
