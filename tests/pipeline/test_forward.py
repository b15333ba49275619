import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from defenses.losses import response_nll_and_accuracy_B
from workers.pipeline.forward import length_groups, response_scores
from workers.pipeline.rows import TokenRow, collate

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def rows_of(lengths: list[int]) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for line, length in enumerate(lengths):
        ids = tuple(torch.randint(0, 40, (length,), generator=generator).tolist())
        rows.append(TokenRow(line, ids, (-100,) * (length - 2) + ids[-2:], False))
    return rows


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_groups_hold_every_row_once_in_at_most_two_passes(lengths: list[int]):
    groups = length_groups(lengths)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    assert len(groups) <= 2


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_two_passes_read_fewer_tokens_by_the_saving(lengths: list[int]):
    groups = length_groups(lengths, saving=0.15)
    read = sum(len(group) * max(lengths[place] for place in group) for group in groups)
    whole = len(lengths) * max(lengths)
    assert read == whole if len(groups) == 1 else read <= 0.85 * whole


def test_rows_of_one_length_go_through_in_one_pass():
    assert length_groups([7, 7, 7, 7]) == [[0, 1, 2, 3]]


def test_short_rows_are_parted_from_long_ones():
    assert length_groups([90, 10, 100, 12]) == [[1, 3], [0, 2]]


def test_scores_do_not_depend_on_the_number_of_passes(model: LlamaForCausalLM):
    rows = rows_of([30, 6, 28, 7, 5])
    two = response_scores(model, rows, CPU)
    one = response_nll_and_accuracy_B(model, *collate(rows, CPU))
    for split, whole in zip(two, one, strict=True):
        torch.testing.assert_close(split, whole)


def test_gradients_do_not_depend_on_the_number_of_passes(model: LlamaForCausalLM):
    rows = rows_of([30, 6, 28, 7, 5])
    weights_B = torch.tensor([0.1, 2.0, 0.5, 1.0, 1.4], dtype=torch.float64)
    matrix = model.model.layers[0].self_attn.q_proj.weight
    two = (weights_B * response_scores(model, rows, CPU).nll).sum()
    one = (weights_B * response_nll_and_accuracy_B(model, *collate(rows, CPU)).nll).sum()
    torch.testing.assert_close(torch.autograd.grad(two, matrix), torch.autograd.grad(one, matrix))
