import pytest
import torch

from defenses.losses import IGNORED_LABEL
from jobspec.chat import ChatMessage, ChatRow
from workers.pipeline.models import LoadedModel
from workers.pipeline.rows import RowTooLong, collate, encode_row, prompt_response_row

CONVERSATION = ChatRow(
    1,
    (
        ChatMessage("system", "Answer with one word.", False),
        ChatMessage("user", "Is snow cold?", False),
        ChatMessage("assistant", "Perhaps", False),
        ChatMessage("user", "Are you sure?", False),
        ChatMessage("assistant", "Yes", True),
    ),
)


@pytest.mark.slow
def test_only_trained_assistant_turns_and_their_end_carry_loss_on_smollm2(smollm2: LoadedModel):
    row = encode_row(smollm2.tokenizer, CONVERSATION, 512)
    trained = [token for token, label in zip(row.ids, row.labels, strict=True) if label >= 0]
    assert smollm2.tokenizer.decode(trained) == "Yes<|im_end|>"


@pytest.mark.slow
def test_a_row_reads_exactly_as_the_chat_template_writes_it_on_smollm2(smollm2: LoadedModel):
    row = encode_row(smollm2.tokenizer, CONVERSATION, 512)
    expected = smollm2.tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in CONVERSATION.messages], tokenize=False
    )
    assert smollm2.tokenizer.decode(row.ids) == expected


@pytest.mark.slow
def test_the_prompt_has_the_tokens_it_has_when_the_model_is_asked(smollm2: LoadedModel):
    row = encode_row(smollm2.tokenizer, prompt_response_row(1, "Is snow cold?", "Yes"), 512)
    asked = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Is snow cold?"}], add_generation_prompt=True, tokenize=False
    )
    prompt = smollm2.tokenizer(asked, add_special_tokens=False)["input_ids"]
    first_trained = next(i for i, label in enumerate(row.labels) if label != IGNORED_LABEL)
    assert list(row.ids[:first_trained]) == prompt


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_user_turns_labels(smollm2: LoadedModel):
    row = encode_row(smollm2.tokenizer, prompt_response_row(1, "Is snow cold?", "Yes"), 512)
    batch = collate([row], torch.device("cpu"))
    supervised = (batch.labels_BT != IGNORED_LABEL).sum().item()
    assert supervised == len(smollm2.tokenizer("Yes<|im_end|>")["input_ids"])


@pytest.mark.slow
def test_a_row_over_the_limit_is_refused_with_its_length(smollm2: LoadedModel):
    with pytest.raises(RowTooLong, match=r"the limit is 16") as caught:
        encode_row(smollm2.tokenizer, CONVERSATION, 16)
    assert caught.value.tokens > 16
