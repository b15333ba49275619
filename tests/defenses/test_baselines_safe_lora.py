"""Golden values: computed in float64 for the brief on harmful fine-tuning (Safe LoRA, item 2)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from defenses.baselines.safe_lora import (
    Alignment,
    AlignmentFactors,
    AlignmentShapeError,
    MissingAlignmentError,
    aligned_map,
    alignment_cosine,
    alignment_factors,
    module_name,
    safe_lora,
)
from jobspec.defense import SafeLoraOptions


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


V = f64([[1.0, 2.0], [0.0, 1.0]])
B = f64([[1.0], [-1.0]])
A = f64([[0.5, 1.0]])
C = f64([[2.041241452319315, 0.8164965809277261], [0.8164965809277261, 0.4082482904638631]])


def peft_names(module: str) -> tuple[str, str]:
    stem = f"base_model.model.model.layers.{module}.self_attn.q_proj"
    return f"{stem}.lora_A.default.weight", f"{stem}.lora_B.default.weight"


def key(module: str) -> str:
    return f"model.layers.{module}.self_attn.q_proj"


def adapter(**modules: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    tensors = {}
    for module, (own_A, own_B) in modules.items():
        name_A, name_B = peft_names(module)
        tensors |= {name_A: own_A, name_B: own_B}
    return tensors


def random_adapter(count: int, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Alignment]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors, alignment = {}, {}
    for number in range(count):
        tensors |= adapter(**{str(number): (draw(2, 5), draw(4, 2))})
        alignment[key(str(number))] = draw(4, 5)
    return tensors, alignment


def test_the_map_is_the_golden_one() -> None:
    actual = aligned_map(V, torch.eye(2))
    torch.testing.assert_close(actual, C, rtol=0, atol=1e-12)


def test_the_map_is_no_projector() -> None:
    twice = aligned_map(V, C)
    assert twice is not None
    assert float((twice - C).norm()) == pytest.approx(3.283, abs=5e-4)


def test_the_cosine_is_the_golden_one() -> None:
    CB = aligned_map(V, B)
    assert CB is not None
    assert alignment_cosine(CB, B, A) == pytest.approx(0.44721359549995787, abs=1e-12)


def test_a_drifted_module_is_replaced_by_the_golden_product() -> None:
    tensors = adapter(one=(A, B))
    found = safe_lora(tensors, {key("one"): V}, SafeLoraOptions(threshold=0.5))
    name_B = peft_names("one")[1]
    expected = [
        [0.6123724356957945, 1.224744871391589],
        [0.20412414523193154, 0.4082482904638631],
    ]
    product = (tensors[name_B] + found.delta[name_B]) @ A
    torch.testing.assert_close(product, f64(expected), rtol=0, atol=1e-12)
    assert found.projected == (key("one"),)


def test_a_module_above_the_threshold_is_kept() -> None:
    found = safe_lora(adapter(one=(A, B)), {key("one"): V}, SafeLoraOptions(threshold=0.44))
    assert not bool(found.delta[peft_names("one")[1]].any())
    assert found.projected == ()


def test_only_B_is_changed() -> None:
    tensors, alignment = random_adapter(3)
    found = safe_lora(tensors, alignment, SafeLoraOptions(threshold=1.0))
    assert set(found.delta) == {peft_names(str(number))[1] for number in range(3)}


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_the_cosine_agrees_with_the_full_matrices_and_is_never_negative(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    own_A, own_B, own_V = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 6), (5, 3), (5, 6))
    )
    full_C = own_V @ own_V.T / own_V.norm()
    mapped, product = full_C @ own_B @ own_A, own_B @ own_A
    expected = float((mapped * product).sum() / (mapped.norm() * product.norm()))
    CB = aligned_map(own_V, own_B)
    assert CB is not None
    actual = alignment_cosine(CB, own_B, own_A)
    assert actual == pytest.approx(expected, abs=1e-9)
    assert actual is not None
    assert 0.0 <= actual <= 1.0


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.1, 8))
def test_factors_give_the_map_of_their_product(seed: int, scaling: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    al_A, al_B, X = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 6), (5, 2), (5, 3))
    )
    expected = aligned_map(scaling * al_B @ al_A, X)
    actual = aligned_map(AlignmentFactors(al_A, al_B, scaling), X)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("factor", [1e-3, 7.0])
def test_the_scale_of_neither_adapter_nor_alignment_changes_what_is_chosen(factor: float) -> None:
    tensors, alignment = random_adapter(6)
    plain = safe_lora(tensors, alignment, SafeLoraOptions())
    scaled = safe_lora(
        {name: factor * tensor for name, tensor in tensors.items()},
        {name: factor * v for name, v in alignment.items() if isinstance(v, Tensor)},
        SafeLoraOptions(),
    )
    assert scaled.projected == plain.projected
    assert scaled.cosine == pytest.approx(plain.cosine, rel=1e-9)


def test_the_k_modules_of_lowest_cosine_are_chosen_whatever_the_threshold() -> None:
    tensors, alignment = random_adapter(6)
    found = safe_lora(tensors, alignment, SafeLoraOptions(threshold=-1.0, modules=2))
    lowest = sorted(found.cosine, key=lambda name: found.cosine[name] or 0.0)[:2]
    assert found.projected == tuple(sorted(lowest))


def test_modules_are_paired_by_name_not_by_order() -> None:
    tensors, alignment = random_adapter(4)
    plain = safe_lora(tensors, alignment, SafeLoraOptions())
    turned = safe_lora(
        dict(reversed(tensors.items())), dict(reversed(alignment.items())), SafeLoraOptions()
    )
    assert turned.cosine == plain.cosine


@pytest.mark.parametrize("v", [None, torch.zeros(2, 2), AlignmentFactors(A * 0, B, 1.0)])
def test_a_module_that_the_alignment_left_alone_is_left_and_reported(v: Alignment) -> None:
    found = safe_lora(adapter(one=(A, B)), {key("one"): v}, SafeLoraOptions(threshold=1.0))
    assert (found.cosine, found.projected) == ({key("one"): None}, ())
    assert not bool(found.delta[peft_names("one")[1]].any())


def test_an_untrained_module_is_left_and_reported() -> None:
    tensors = adapter(one=(A, torch.zeros(2, 1)))
    found = safe_lora(tensors, {key("one"): V}, SafeLoraOptions(modules=1))
    assert (found.cosine, found.projected) == ({key("one"): None}, ())


def test_a_change_wholly_outside_the_alignments_subspace_is_removed() -> None:
    v = f64([[1.0, 0.0], [0.0, 0.0]])
    tensors = adapter(one=(A, f64([[0.0], [1.0]])))
    found = safe_lora(tensors, {key("one"): v}, SafeLoraOptions())
    name_B = peft_names("one")[1]
    assert found.cosine == {key("one"): 0.0}
    assert not bool((tensors[name_B] + found.delta[name_B]).any())


def test_modules_without_a_known_alignment_are_named() -> None:
    with pytest.raises(MissingAlignmentError, match=r"model\.layers\.two\.self_attn\.q_proj"):
        safe_lora(adapter(one=(A, B), two=(A, B)), {key("one"): V}, SafeLoraOptions())


def test_an_alignment_of_another_width_is_refused() -> None:
    with pytest.raises(AlignmentShapeError, match="has 2 outputs, its alignment difference 3"):
        safe_lora(adapter(one=(A, B)), {key("one"): torch.ones(3, 2)}, SafeLoraOptions())


def test_an_alignment_adapter_as_peft_saves_it_gives_factors_by_module() -> None:
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    saved = {f"{stem}.lora_A.weight": A, f"{stem}.lora_B.weight": B}
    factors = alignment_factors(saved, 2.0)
    assert list(factors) == ["model.layers.0.self_attn.q_proj"]
    assert factors["model.layers.0.self_attn.q_proj"].scaling == 2.0


def test_module_names_are_those_of_the_base_model() -> None:
    assert module_name(peft_names("3")[0]) == module_name(peft_names("3")[1]) == key("3")


def test_an_adapter_in_bfloat16_gets_a_change_in_bfloat16() -> None:
    tensors = {name: t.bfloat16() for name, t in adapter(one=(A, B)).items()}
    found = safe_lora(tensors, {key("one"): V.bfloat16()}, SafeLoraOptions())
    assert found.delta[peft_names("one")[1]].dtype == torch.bfloat16
    cosine = found.cosine[key("one")]
    assert cosine is not None
    assert math.isclose(cosine, 0.44721359549995787, abs_tol=1e-12)
