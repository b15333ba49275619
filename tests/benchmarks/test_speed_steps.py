import json
from pathlib import Path

import pytest
import torch

from benchmarks.measure import median_cpu_seconds, publish, result
from benchmarks.steps import Steps
from benchmarks.workload import mixed_rows, multiplications
from jobspec.defense import PlainOptions, SchedulerOptions

VOCABULARY = 258


@pytest.fixture
def two_models(tiny_model_folder: Path) -> tuple[Steps, Steps]:
    return Steps(str(tiny_model_folder), 20), Steps(str(tiny_model_folder), 20)


def short_rows(count: int, seed: int) -> list:
    return mixed_rows(count, seed, shortest=8, longest=40, median=16.0, vocabulary=VOCABULARY)


def test_the_straightforward_loop_and_the_products_step_change_the_adapter_alike(
    two_models: tuple[Steps, Steps],
):
    alignment, user = short_rows(4, 1), short_rows(4, 2)
    here, there = two_models
    for steps in two_models:
        # AdamW's first step is the gradient's sign, which rounding turns where it is nearly 0.
        steps.optimizer = torch.optim.SGD(list(steps.parameters.values()), lr=1.0)
    here.tune(here.method(SchedulerOptions()), alignment, user, [3, 5, 7, 9])
    there.straightforward(there.method(SchedulerOptions()), alignment, user, [3, 5, 7, 9])
    for name, parameter in here.parameters.items():
        torch.testing.assert_close(parameter, there.parameters[name], rtol=0, atol=1e-5)


def test_the_straightforward_loop_moves_the_logits_alike(two_models: tuple[Steps, Steps]):
    alignment, user = short_rows(4, 1), short_rows(4, 2)
    here, there = two_models
    product, described = here.method(SchedulerOptions()), there.method(SchedulerOptions())
    here.tune(product, alignment, user, [3, 5, 7, 9])
    there.straightforward(described, alignment, user, [3, 5, 7, 9])
    torch.testing.assert_close(product.logits(), described.logits(), rtol=0, atol=1e-6)


def test_a_joint_step_changes_the_adapter(tiny_model_folder: Path):
    steps = Steps(str(tiny_model_folder), 20)
    before = {name: parameter.detach().clone() for name, parameter in steps.parameters.items()}
    steps.tune_jointly(steps.method(PlainOptions()), [], short_rows(2, 1), [0, 1], short_rows(2, 2))
    assert any(not torch.equal(before[name], p) for name, p in steps.parameters.items())


def test_mixed_rows_stay_within_their_bounds():
    rows = mixed_rows(200, 0)
    lengths = [len(row.ids) for row in rows]
    shares = [sum(label != -100 for label in row.labels) / len(row.ids) for row in rows]
    assert 24 <= min(lengths) < 40
    assert 200 < max(lengths) <= 256
    assert all(0.05 < share < 0.45 for share in shares)


def test_projecting_every_position_costs_more(tiny_model_folder: Path):
    model = Steps(str(tiny_model_folder), 20).model
    assert multiplications(model, 100, 100) > multiplications(model, 100, 25)


def test_every_round_takes_every_way_in_turn():
    taken: list[str] = []
    ways = {"one": lambda: taken.append("one"), "two": lambda: taken.append("two")}
    median_cpu_seconds(ways, 2, warm=False)
    assert taken == ["one", "two", "one", "two"]


@pytest.mark.parametrize(
    ("ratio", "better", "met"),
    [(1.1, "lower", True), (1.11, "lower", False), (1.1, "higher", True), (1.0, "higher", False)],
)
def test_a_result_says_whether_its_target_is_met(ratio: float, better: str, met: bool):
    assert result("a / b", ratio, 1.1, "1.0: none", better=better)["met"] is met


def test_results_are_written_and_printed_with_their_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = result("a / b", 1.5, 1.1, "1.0: the least that is possible")
    publish(tmp_path, "speed", [line])
    assert json.loads((tmp_path / "speed.json").read_text()) == [line]
    printed = capsys.readouterr().out
    assert "a / b: 1.500 (target <= 1.1)  MISSED" in printed
    assert "limit 1.0: the least that is possible" in printed
