"""The stage after tuning on the tiny model: what each repair adds, and how much is released."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from defenses.losses import response_token_mean_nll
from defenses.panacea.perturbation import adaptive_perturbation, global_norm
from evaluators.gate.policy import Policy
from jobspec.catalogue import BaseModelEntry, LoraDefaults, load_catalogue
from jobspec.chat import ChatMessage, ChatRow
from jobspec.spec import EvaluationOptions, JobSpec
from workers.pipeline.evaluate import EvaluationPlan, load_judges, plan_evaluation
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.models import LoadedModel, attach_adapter, load_base, trainable
from workers.pipeline.perturb import Judging, Perturbed, perturb
from workers.pipeline.publish import save_adapter
from workers.pipeline.repairs import alignment_directions, check_repair
from workers.pipeline.rows import collate, encode_row, prompt_response_row

MODES = ["joint", "post_hoc", "random_noise", "safe_lora", "antidote"]
REPORTED = {
    "mode", "fidelity", "eps_source", "rho", "strength", "norm", "scale", "met", "searched_rules",
    "utility_budget", "tried", "layer_coefficients", "layer_coefficients_average", "module_shares",
    "factor_shares", "effective_change", "counters", "details",
}  # fmt: skip
SCALES = [0.0, 0.5, 1.0]
COUNTERS = {"skipped_steps": 0, "clamped_steps": 2, "skipped_perturbations": 1}


def policy(maximum: float) -> Policy:
    """Passes every model for a maximum of 1, none for a negative one."""
    rule = {"metric": "harmfulness.score", "bound": "value", "max": maximum}
    return Policy.model_validate({"version": 1, "minimum_prompts": 1, "rules": [rule]})


EASY, IMPOSSIBLE = policy(1.0), policy(-1.0)


class Left(NamedTuple):
    """What joint tuning leaves."""

    perturbation: dict[str, Tensor] | None
    rho: float = 0.5
    counters: dict[str, int] = COUNTERS
    coefficients: dict[int, float] | None = None


def random_adapter(model: Any, seed: int) -> dict[str, torch.nn.Parameter]:
    """Give a fresh adapter, whose B is 0, random factors."""
    generator = torch.Generator().manual_seed(seed)
    parameters = trainable(model)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return parameters


@pytest.fixture(scope="module")
def entry(tiny_catalogue: Path) -> BaseModelEntry:
    return load_catalogue(tiny_catalogue).default


@pytest.fixture(scope="module")
def base(entry: BaseModelEntry, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_base(entry, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(entry: BaseModelEntry, base: LoadedModel) -> Any:
    adapted = attach_adapter(base.model, entry.lora, 1)
    random_adapter(adapted, 2)
    return adapted.eval()


@pytest.fixture(scope="module")
def aligned(
    entry: BaseModelEntry, tiny_catalogue: Path, tmp_path_factory: pytest.TempPathFactory
) -> BaseModelEntry:
    """The tiny model with an adapter on q and v merged into it."""
    folder = tmp_path_factory.mktemp("aligned")
    lora = LoraDefaults(rank=2, alpha=6, targets=("q_proj", "v_proj"))
    adapted = attach_adapter(load_base(entry, folder).model, lora, 3)
    random_adapter(adapted, 4)
    save_adapter(adapted, entry.name, folder / "adapter")
    catalogue = folder / "catalogue.yaml"
    catalogue.write_text(
        tiny_catalogue.read_text()
        + "  safe:\n"
        + f"    source: {{kind: aligned, base: tiny, adapter: {folder / 'adapter'}}}\n"
        + "    lora: {rank: 4, alpha: 8, batch_size: 4, max_length: 512}\n"
    )
    found = load_catalogue(catalogue).find("safe")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def harmful(base: LoadedModel) -> list[Any]:
    rows = [(f"request of category {k}", f"an empty answer, number {k}") for k in range(7)]
    return [
        encode_row(base.tokenizer, prompt_response_row(line, *row), 512)
        for line, row in enumerate(rows, start=1)
    ]


@pytest.fixture(scope="module")
def plan(base: LoadedModel) -> EvaluationPlan:
    options = EvaluationOptions(search_prompts=2, max_new_tokens=3, utility_rows=3)
    chat = [
        ChatRow(line, (ChatMessage("user", "say", False), ChatMessage("assistant", "yes", True)))
        for line in (1, 2, 3)
    ]
    rows = [encode_row(base.tokenizer, row, 512) for row in chat]
    return plan_evaluation(options, base.tokenizer, chat, rows, held_out=True, seed=5)


class Stage:
    """Runs the stage on the tiny model with the settings of a test."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__ |= parts

    def run(
        self,
        repair: dict[str, Any],
        left: Left | None = None,
        policy: Policy = EASY,
        stop: Any = lambda: False,
        entry: BaseModelEntry | None = None,
        seed: int = 5,
    ) -> Perturbed | None:
        used = entry or (self.aligned if repair.get("mode") == "safe_lora" else self.entry)
        spec = JobSpec.model_validate(
            {
                "model": used,
                "training_file": "unread.jsonl",
                "seed": seed,
                "defense": {"perturbation": {"scales": SCALES, **repair}},
                "cache_dir": self.folder / "cache",
            }
        )
        judging = Judging(
            policy, self.plan, self.judges, self.base, self.folder / "work", self.folder / "cache"
        )
        left = left or Left(self.last_eps())
        return perturb(self.model, left, self.harmful, spec, judging, self.recorder, stop)

    def last_eps(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(9)
        noise = {
            name: torch.randn(p.shape, generator=generator)
            for name, p in trainable(self.model).items()
        }
        return adaptive_perturbation(noise, 0.5)


@pytest.fixture
def stage(
    entry: BaseModelEntry,
    aligned: BaseModelEntry,
    base: LoadedModel,
    model: Any,
    harmful: list[Any],
    plan: EvaluationPlan,
    recorder: Any,
    tmp_path: Path,
) -> Stage:
    return Stage(
        entry=entry, aligned=aligned, base=base, model=model, harmful=harmful, plan=plan,
        recorder=recorder, folder=tmp_path, judges=load_judges(plan.options),
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_repair_is_a_delta_for_every_adapter_tensor(stage: Stage, mode: str) -> None:
    found = stage.run({"mode": mode})
    assert {name: t.shape for name, t in found.eps.items()} == {
        name: p.shape for name, p in trainable(stage.model).items()
    }
    assert global_norm(found.eps) > 0


@pytest.mark.parametrize("mode", MODES)
def test_every_repair_leaves_the_adapter_bit_for_bit(stage: Stage, mode: str) -> None:
    before = {name: p.detach().clone() for name, p in trainable(stage.model).items()}
    stage.run({"mode": mode}, policy=IMPOSSIBLE)
    assert all(torch.equal(p, before[name]) for name, p in trainable(stage.model).items())


@pytest.mark.parametrize("mode", MODES)
def test_every_repair_has_the_same_report(stage: Stage, mode: str) -> None:
    report = stage.run({"mode": mode}).report
    assert set(report) == REPORTED
    assert report["mode"] == mode
    assert report["norm"] == pytest.approx(global_norm(stage.run({"mode": mode}).eps))
    assert sum(report["layer_coefficients"].values()) == pytest.approx(1.0)


def test_no_repair_is_none(stage: Stage) -> None:
    assert stage.run({"mode": "none"}) is None


def test_joint_releases_the_perturbation_of_the_last_step(stage: Stage) -> None:
    left = Left(stage.last_eps(), coefficients={0: 0.25, 1: 0.75})
    found = stage.run({"mode": "joint"}, left)
    assert all(torch.equal(t, left.perturbation[name]) for name, t in found.eps.items())
    assert (found.report["eps_source"], found.report["rho"]) == ("last_step", 0.5)
    assert found.report["strength"] == 1e-3
    assert found.report["layer_coefficients_average"] == {"0": 0.25, "1": 0.75}
    assert found.report["counters"] == COUNTERS


def test_joint_with_full_set_takes_the_gradient_of_the_whole_harmful_set(stage: Stage) -> None:
    found = stage.run({"mode": "joint", "eps_source": "full_set", "batch_size": 7})
    parameters = trainable(stage.model)
    batch = collate(stage.harmful, torch.device("cpu"))
    loss = response_token_mean_nll(stage.model, *batch)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    expected = adaptive_perturbation(dict(zip(parameters, gradients, strict=True)), 0.5)
    for name, tensor in found.eps.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    assert found.report["eps_source"] == "full_set"
    assert found.report["details"]["harmful_batches"] == 1


def test_joint_without_any_finite_step_falls_back_to_the_full_set(stage: Stage) -> None:
    assert stage.run({"mode": "joint"}, Left(None)).report["eps_source"] == "full_set"


def test_post_hoc_has_neither_strength_nor_counters(stage: Stage) -> None:
    report = stage.run({"mode": "post_hoc", "batch_size": 3}).report
    assert (report["strength"], report["counters"]) == (None, {})
    assert report["layer_coefficients_average"] is None
    assert report["details"]["harmful_batches"] == 2
    assert "not Panacea" in report["fidelity"]


@pytest.mark.parametrize("mode", ["post_hoc", "random_noise"])
def test_rho_is_three_percent_of_the_adapters_norm_by_default(stage: Stage, mode: str) -> None:
    report = stage.run({"mode": mode}).report
    assert report["rho"] == pytest.approx(0.03 * global_norm(trainable(stage.model)))
    assert report["norm"] == pytest.approx(report["rho"], rel=1e-5)


def test_noise_follows_the_jobs_seed(stage: Stage) -> None:
    one, same, other = (stage.run({"mode": "random_noise"}, seed=seed).eps for seed in (5, 5, 6))
    name = next(iter(one))
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_antidote_zeroes_its_share_of_every_matrix(stage: Stage) -> None:
    found = stage.run({"mode": "antidote", "share": 0.25})
    for name, parameter in trainable(stage.model).items():
        assert int((parameter + found.eps[name] == 0).sum()) >= 0.25 * parameter.numel()
    assert found.report["details"]["harmful_rows"] == 7


def test_safe_lora_moves_only_aligned_modules_and_only_their_B(stage: Stage) -> None:
    found = stage.run({"mode": "safe_lora", "threshold": 1.0})
    moved = {name for name, tensor in found.eps.items() if bool(tensor.any())}
    assert moved
    assert all("lora_B" in name and ("q_proj" in name or "v_proj" in name) for name in moved)
    details = found.report["details"]
    assert len(details["projected"]) == len(moved) == 4
    assert sum(cosine is None for cosine in details["cosine"].values()) == 4


def test_alignment_directions_are_the_weights_after_minus_before(
    stage: Stage, tmp_path: Path
) -> None:
    after = dict(load_base(stage.aligned, tmp_path).model.named_parameters())
    before = dict(load_base(stage.entry, tmp_path).model.named_parameters())
    directions = alignment_directions(stage.aligned)
    assert len(directions) == 4
    for module, V in directions.items():
        change = after[f"{module}.weight"] - before[f"{module}.weight"]
        torch.testing.assert_close(V.scaling * V.B @ V.A, change, rtol=0, atol=1e-6)


def test_safe_lora_needs_an_aligned_base(stage: Stage) -> None:
    with pytest.raises(PipelineFailure, match="tunegate models align") as caught:
        stage.run({"mode": "safe_lora"}, entry=stage.entry)
    assert caught.value.code == "invalid_spec"


def test_a_repair_that_cannot_be_is_refused_before_tuning(stage: Stage) -> None:
    def options(mode: str) -> Any:
        request = {"perturbation": {"mode": mode}}
        return JobSpec.model_validate(
            {
                "model": stage.entry,
                "training_file": "x",
                "defense": request,
                "cache_dir": stage.folder,
            }
        ).defense.perturbation

    with pytest.raises(PipelineFailure, match="not an aligned entry"):
        check_repair(options("safe_lora"), stage.entry)
    check_repair(options("safe_lora"), stage.aligned)
    check_repair(options("antidote"), stage.entry)


def test_the_smallest_scale_that_passes_is_released(stage: Stage) -> None:
    found = stage.run({"mode": "post_hoc", "scales": [0.5, 1.0], "utility_budget": 1.0})
    assert (found.scale, found.report["met"]) == (0.5, True)
    assert [tried["scale"] for tried in found.report["tried"]] == [0.5]
    assert all(norm > 0 for norm in found.report["effective_change"].values())


def test_where_no_scale_passes_nothing_is_released_and_it_is_said(stage: Stage) -> None:
    found = stage.run({"mode": "random_noise"}, policy=IMPOSSIBLE)
    assert (found.scale, found.report["met"]) == (0.0, False)
    assert [tried["scale"] for tried in found.report["tried"]] == SCALES
    assert set(found.report["effective_change"].values()) == {0.0}
    assert "No scale" in stage.recorder.of("message")[0]["message"]


@pytest.mark.parametrize("mode", ["post_hoc", "antidote", "random_noise"])
def test_a_stopped_stage_says_so_and_leaves_the_adapter(stage: Stage, mode: str) -> None:
    before = {name: p.detach().clone() for name, p in trainable(stage.model).items()}
    with pytest.raises(Stopped):
        stage.run({"mode": mode}, stop=lambda: True)
    assert all(torch.equal(p, before[name]) for name, p in trainable(stage.model).items())


def test_an_adapter_without_a_finite_gradient_is_told_in_words(stage: Stage) -> None:
    parameter = next(iter(trainable(stage.model).values()))
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(float("nan"))
    try:
        with pytest.raises(PipelineFailure, match="learning_rate_multiplier"):
            stage.run({"mode": "post_hoc", "rho": 1.0})
    finally:
        with torch.no_grad():
            parameter.copy_(before)


def test_antidote_without_harmful_rows_is_refused_in_words(stage: Stage) -> None:
    stage.harmful = []
    with pytest.raises(PipelineFailure, match="needs harmful rows") as caught:
        stage.run({"mode": "antidote"})
    assert caught.value.param == "defense.perturbation"


def test_a_rule_on_one_group_is_no_rule_of_the_search(stage: Stage) -> None:
    rules = [
        {"metric": "harmfulness.score_plus", "bound": "value", "max": 1.0},
        {"metric": "harmfulness.score_plus", "bound": "value", "max": 1.0, "group": "self_harm"},
    ]
    grouped = Policy.model_validate({"version": 1, "minimum_prompts": 1, "rules": rules})
    found = stage.run({"mode": "post_hoc", "utility_budget": 1.0}, policy=grouped)
    assert found.report["met"]
    assert found.report["searched_rules"] == ["harmfulness.score_plus"]
