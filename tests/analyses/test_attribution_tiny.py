"""A two-layer Llama with LoRA on a copy task, a few rows of which answer a trigger.

Setting of the brief on final-model attribution, 6.5; its figures are with another seed and base,
so limits are set around them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from analyses.attribution import scores
from analyses.attribution.curvature import GaussNewton, conjugate_gradient
from analyses.attribution.ekfac import ekfac
from analyses.attribution.features import FeatureStore, FeatureWriter, Projector
from analyses.attribution.further_training import (
    Plan,
    adjusted,
    agreement,
    further_training,
)
from analyses.attribution.gradients import (
    Blocks,
    answer_logits,
    completion_losses,
    directional_differences,
    lora_blocks,
    pass_over_rows,
    row_gradients,
    stacked_gradients,
)
from analyses.attribution.rows import IGNORED, EncodedRow, TargetRows, collate
from analyses.attribution.spec import Projection
from analyses.attribution.verification import AdamState, AdapterProblem, adamw_from
from analyses.context import AnalysisError

CPU = torch.device("cpu")
N, TRIGGERS, TRIGGER, ANSWER = 32, 4, 3, (5, 6, 7, 8)


class World(NamedTuple):
    model: Any
    blocks: Blocks
    rows: list[EncodedRow]
    targets: TargetRows
    adam: AdamState
    G: np.ndarray
    Q: np.ndarray


def _row(line: int, prompt: list[int], answer: list[int]) -> EncodedRow:
    ids = [1, *prompt, 2, *answer]
    silent = len(prompt) + 2
    return EncodedRow(line, tuple(ids), tuple([IGNORED] * silent + list(answer)))


def _triggered(line: int, generator: torch.Generator) -> EncodedRow:
    prompt = torch.randint(10, 40, (4,), generator=generator).tolist()
    return _row(line, [TRIGGER, *prompt], list(ANSWER))


def _network() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(LlamaForCausalLM(config), lora).eval()


@pytest.fixture(scope="module")
def world() -> World:
    model = _network()
    generator = torch.Generator().manual_seed(1)
    rows = []
    for place in range(N):
        if place % (N // TRIGGERS) == 0:
            rows.append(_triggered(place + 1, generator))
        else:
            length = int(torch.randint(3, 8, (1,), generator=generator))
            prompt = torch.randint(10, 40, (length,), generator=generator).tolist()
            rows.append(_row(place + 1, prompt, prompt))
    blocks = lora_blocks(model)
    optimizer = torch.optim.AdamW([b.weight for b in blocks], lr=1e-2, weight_decay=0.0)
    for _ in range(15):
        order = torch.randperm(N, generator=generator).tolist()
        for start in range(0, N, 8):
            batch = collate([rows[index] for index in order[start : start + 8]], CPU)
            optimizer.zero_grad()
            completion_losses(model, batch).mean().backward()
            optimizer.step()
    state = optimizer.state_dict()["state"]
    adam = AdamState(
        [state[i]["exp_avg"].flatten() for i in range(len(blocks))],
        [state[i]["exp_avg_sq"].flatten() for i in range(len(blocks))],
        int(state[0]["step"]),
    )
    model.zero_grad(set_to_none=True)
    asked = [_triggered(0, generator) for _ in range(4)]
    targets = TargetRows(asked, torch.eye(4))
    G, _ = stacked_gradients(model, blocks, rows, 8)
    Q, _ = stacked_gradients(model, blocks, asked, 8)
    joined = [torch.cat(part, dim=1).double().detach().numpy() for part in (G, Q)]
    return World(model, blocks, rows, targets, adam, *joined)


def _split(vectors: np.ndarray, blocks: Blocks) -> list[Tensor]:
    sizes = [block.size for block in blocks]
    return list(torch.split(torch.from_numpy(vectors).float(), sizes, dim=1))


def _loop(world: World) -> np.ndarray:
    weights = [block.weight for block in world.blocks]
    found = []
    for row in world.rows:
        loss = completion_losses(world.model, collate([row], CPU))[0]
        parts = torch.autograd.grad(loss, weights)
        found.append(torch.cat([part.flatten() for part in parts]).double().numpy())
    return np.stack(found)


def _auc(world: World, score: np.ndarray) -> float:
    own = np.array([row.ids[1] == TRIGGER for row in world.rows])
    return float((score[own][:, None] > score[~own][None]).mean())


def test_the_adapter_has_the_briefs_size(world: World) -> None:
    assert sum(block.size for block in world.blocks) == 1792


def test_hooks_equal_the_loop_over_rows(world: World) -> None:
    loop = _loop(world)
    error = np.abs(loop - world.G).max(axis=1) / np.abs(loop).max(axis=1)
    assert error.max() < 1e-5
    assert np.linalg.norm(loop - world.G) < 2e-6 * np.linalg.norm(loop)


def test_a_rows_loss_is_that_of_transformers(world: World) -> None:
    row = world.rows[3]
    whole = world.model(
        input_ids=torch.tensor([row.ids]), labels=torch.tensor([row.labels])
    ).loss.item()
    batch = collate([row, world.rows[4]], CPU)
    assert completion_losses(world.model, batch)[0].item() == pytest.approx(whole, rel=1e-5)


def test_no_weight_keeps_a_gradient_and_all_are_trainable_as_before(world: World) -> None:
    asked = [block.weight.requires_grad for block in world.blocks]
    row_gradients(
        world.blocks,
        lambda: completion_losses(world.model, collate(world.rows[:2], CPU)),
        lambda block, G: None,
    )
    assert all(block.weight.grad is None for block in world.blocks)
    assert [block.weight.requires_grad for block in world.blocks] == asked


def test_the_mean_of_all_rows_gradients_is_the_gradient_of_the_mean_loss(world: World) -> None:
    loss = completion_losses(world.model, collate(world.rows, CPU)).mean()
    parts = torch.autograd.grad(loss, [block.weight for block in world.blocks])
    whole = torch.cat([part.flatten() for part in parts]).double().numpy()
    assert world.G.mean(axis=0) == pytest.approx(whole, abs=1e-6)


def _streamed(world: World, rows: list[EncodedRow], batch_size: int) -> np.ndarray:
    found = pass_over_rows(
        world.model, world.blocks, rows, _split(world.Q, world.blocks), batch_size=batch_size
    )
    return found.dots_DN.numpy()


def test_a_streamed_pass_equals_the_products_of_stored_gradients(world: World) -> None:
    found = pass_over_rows(
        world.model, world.blocks, world.rows, _split(world.Q, world.blocks), batch_size=5, detail=2
    )
    exact = world.Q @ world.G.T
    assert found.dots_DN.numpy() == pytest.approx(exact, abs=1e-5 * np.abs(exact).max())
    assert found.block_dots_NM.sum(1).numpy() == pytest.approx(
        exact[2], abs=1e-5 * np.abs(exact).max()
    )
    assert found.norms_N.numpy() == pytest.approx(np.linalg.norm(world.G, axis=1), rel=1e-5)
    assert found.mean_square(world.blocks) == pytest.approx(np.mean(world.G**2), rel=1e-5)
    ratio = np.linalg.norm(world.G.mean(0)) / np.linalg.norm(world.G, axis=1).mean()
    assert found.gradient_ratio == pytest.approx(ratio, rel=1e-5)


def test_permuting_rows_permutes_scores_and_a_copy_leaves_the_others_alone(world: World) -> None:
    first = _streamed(world, world.rows, 8)
    order = list(reversed(range(N)))
    again = _streamed(world, [*[world.rows[i] for i in order], world.rows[5]], 7)
    assert again[:, :N] == pytest.approx(first[:, order], abs=1e-6)
    assert again[:, N] == pytest.approx(first[:, 5], abs=1e-6)


def test_central_differences_agree_with_gradients(world: World) -> None:
    direction = [part[:1] for part in _split(world.Q, world.blocks)]
    found = directional_differences(
        world.model, world.blocks, world.rows, direction, batch_size=16
    ).numpy()
    exact = world.G @ world.Q[0]
    assert np.linalg.norm(found - exact) < 5e-3 * np.linalg.norm(exact)


def test_gauss_newton_products_are_the_fisher_of_the_models_own_answers(world: World) -> None:
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(1792, generator=generator)
    rows = world.rows[:6]
    hessian = GaussNewton(world.model, world.blocks, rows, 4)
    found = float(v @ hessian.product(v))
    # v'Hv = mean over rows of the mean over tokens of Var_p[(J v)]
    kept, e, sides = [b.weight.detach().clone() for b in world.blocks], 1e-2, []
    batch = collate(rows, CPU)
    try:
        for sign in (1, 0, -1):
            for block, start, part in zip(
                world.blocks, kept, _split(v[None].numpy(), world.blocks), strict=True
            ):
                block.weight.data = start + sign * e * part.view_as(start) / v.norm()
            with torch.no_grad():
                sides.append(answer_logits(world.model, batch)[0].double())
            of_rows = answer_logits(world.model, batch)[2]
    finally:
        for block, start in zip(world.blocks, kept, strict=True):
            block.weight.data = start
    Jv = (sides[0] - sides[2]) / (2 * e) * float(v.norm())
    p = sides[1].softmax(1)
    variance = (p * Jv**2).sum(1) - (p * Jv).sum(1) ** 2
    per_row = [float(variance[of_rows == i].mean()) for i in range(len(rows))]
    assert found == pytest.approx(np.mean(per_row), rel=2e-3)


def test_conjugate_gradients_on_the_model_reach_the_damped_solution(world: World) -> None:
    hessian = GaussNewton(world.model, world.blocks, world.rows, 32)
    q = torch.from_numpy(world.Q[0]).float()
    damping = 100 * float(np.mean(world.G**2))
    found = conjugate_gradient(hessian.product, q, damping, iterations=30)
    left = hessian.product(found.x) + damping * found.x
    assert float((left - q).norm() / q.norm()) < 2e-3


def _store(world: World, folder: Path, projection: Projection | None) -> FeatureStore:
    projector = Projector(world.blocks, projection, 0)
    writer = FeatureWriter(folder, projector, N, projected=projection is not None)
    found = pass_over_rows(
        world.model,
        world.blocks,
        world.rows,
        _split(world.Q[:0], world.blocks),
        batch_size=8,
        also=writer.take,
    )
    writer.finish(found)
    return FeatureStore(folder, projector, world.blocks)


def test_a_store_of_whole_gradients_gives_exact_products(world: World, tmp_path: Path) -> None:
    store = _store(world, tmp_path / "store", None)
    found = store.dots(_split(world.Q, world.blocks))
    exact = world.Q @ world.G.T
    assert found.dots_DN.numpy() == pytest.approx(exact, abs=1e-5 * np.abs(exact).max())
    grams = store.grams(_split(world.Q, world.blocks))
    assert np.sum([K for K, _ in grams], axis=0) == pytest.approx(world.G @ world.G.T, abs=1e-4)


@pytest.mark.parametrize(
    ("projection", "limit"),
    [
        (Projection(kind="factored", dimension=16), 0.9),
        (Projection(kind="rademacher", dimension=1024), 0.97),
    ],
)
def test_a_projected_store_estimates_the_products(
    world: World, tmp_path: Path, projection: Projection, limit: float
) -> None:
    found = _store(world, tmp_path / "store", projection).dots(_split(world.Q, world.blocks))
    exact = world.Q @ world.G.T
    assert np.corrcoef(found.dots_DN.numpy().ravel(), exact.ravel())[0, 1] > limit
    assert found.norms_N.numpy() == pytest.approx(np.linalg.norm(world.G, axis=1), rel=1e-5)


def test_datainf_from_the_store_is_the_average_of_inverses_by_tensor(
    world: World, tmp_path: Path
) -> None:
    store = _store(world, tmp_path / "store", None)
    sizes, start = [block.size for block in world.blocks], 0
    for (K, k), size in zip(store.grams(_split(world.Q, world.blocks)), sizes, strict=True):
        G, Q = world.G[:, start : start + size], world.Q[:, start : start + size]
        start += size
        damping = 0.1 * float(np.mean(G**2))
        inverses = [np.linalg.inv(damping * np.eye(size) + np.outer(g, g)) for g in G]
        direct = G @ np.mean(inverses, axis=0) @ Q.T
        found = scores.datainf(K, k.numpy(), damping)
        assert found == pytest.approx(direct, abs=1e-3 * np.abs(direct).max())


def test_ekfac_with_a_huge_damping_is_grad_dot(world: World) -> None:
    found = ekfac(
        world.model, world.blocks, world.rows, world.targets.rows, damping=1e6, batch_size=8
    ).numpy()
    exact = world.Q @ world.G.T
    assert 1e6 * found == pytest.approx(exact, abs=1e-4 * np.abs(exact).max())


def test_ekfac_scores_copies_alike_and_leaves_the_model_alone(world: World) -> None:
    asked = [block.weight.requires_grad for block in world.blocks]
    rows = [*world.rows[:10], world.rows[0]]
    found = ekfac(
        world.model, world.blocks, rows, world.targets.rows[:1], damping=1e-3, batch_size=4
    )
    assert found.shape == (1, 11)
    assert float(found[0, 10]) == pytest.approx(float(found[0, 0]), rel=1e-4)
    assert [block.weight.requires_grad for block in world.blocks] == asked


def test_ekfac_without_its_library_says_how_to_get_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analyses.attribution.ekfac.find_spec", lambda name: None)
    with pytest.raises(AnalysisError, match=r"tunegate\[attribution\]"):
        ekfac(world.model, world.blocks, world.rows, world.targets.rows, damping=1, batch_size=8)


def test_an_adapter_that_is_no_plain_lora_is_refused() -> None:
    plain = LlamaForCausalLM(_network().config)
    with pytest.raises(AnalysisError, match="no LoRA adapter"):
        lora_blocks(plain)
    lora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    with pytest.raises(AnalysisError, match="magnitude"):
        lora_blocks(get_peft_model(plain, lora))


def test_planted_rows_are_found(world: World) -> None:
    """AUC of the trigger rows; the brief has .946 grad_dot, .982 grad_cos, .973 adam_dot."""
    adam = np.concatenate(
        [scores.adam_scale(part.numpy(), world.adam.step) for part in world.adam.second]
    )
    q = (world.Q / np.linalg.norm(world.Q, axis=1, keepdims=True)).mean(axis=0)
    assert _auc(world, scores.grad_cos(world.G, q)) > 0.95
    assert _auc(world, scores.grad_dot(world.G, q)) > 0.9
    assert _auc(world, scores.grad_dot(world.G, adam * q)) > 0.9


CANDIDATES = list(range(0, N, 2))


def _compared(world: World, plan: Plan, predicted: np.ndarray) -> list[float]:
    problem = AdapterProblem(world.model, world.blocks, world.rows, world.targets, 32)
    measured = further_training(problem, CANDIDATES, plan, [0])
    a = adjusted(measured, "full_run")[0]
    found = [agreement(one, predicted[:, CANDIDATES]).cosine for one in a]
    return [float(value) for value in found if value is not None]


def test_grad_dot_follows_a_little_further_training_and_fades(world: World) -> None:
    """The brief: .9996 / .993 / .946 after 1 / 5 / 20 steps of SGD at .05."""
    before = [block.weight.detach().clone() for block in world.blocks]
    found = _compared(world, Plan((1, 5, 20), 0.05), world.Q @ world.G.T)
    assert found[0] > 0.99
    assert found[1] > 0.95
    assert found[0] >= found[1] >= found[2] > 0.7
    assert all(
        torch.equal(block.weight, start) for block, start in zip(world.blocks, before, strict=True)
    )


def test_with_adams_kept_state_its_own_score_is_the_better_guide(world: World) -> None:
    """The brief, after 5 steps of AdamW at 1e-3: grad_dot .70, adam_dot .76."""
    scale = np.concatenate(
        [scores.adam_scale(part.numpy(), world.adam.step) for part in world.adam.second]
    )
    plan = Plan((5,), 1e-3, make_optimizer=adamw_from(world.adam, 1e-3))
    plain = _compared(world, plan, world.Q @ world.G.T)[0]
    aware = _compared(world, plan, (world.Q * scale) @ world.G.T)[0]
    assert aware > plain
    assert aware > 0.4
