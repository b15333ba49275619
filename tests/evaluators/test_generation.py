import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from evaluators.generation import (
    ChatTemplateMissingError,
    Decoding,
    GenerationStoppedError,
    PromptTooLongError,
    generate,
)

CONVERSATIONS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}],
    [
        {"role": "system", "content": "You answer."},
        {"role": "user", "content": "how are you today?"},
    ],
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "An answer of category Y, please. An answer of category X."}],
]
GREEDY = Decoding(max_new_tokens=12)
SAMPLED = Decoding(max_new_tokens=12, temperature=1.0, top_p=0.9, n_samples=3)


def plain_greedy(model, tokenizer, conversation, count):
    """One prompt, no padding, no cache: the definition that the fast path must reproduce."""
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    new = []
    for _ in range(count):
        with torch.no_grad():
            token = int(model(torch.tensor([ids + new])).logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(new, skip_special_tokens=True), len(new), False
        new.append(token)
    return tokenizer.decode(new, skip_special_tokens=True), len(new), True


def with_end_bias(model, tokenizer, logit):
    """A copy of the model that ends its answer more readily."""
    biased = copy.deepcopy(model)
    head = torch.nn.Linear(
        biased.lm_head.in_features, biased.lm_head.out_features, bias=True, dtype=torch.float64
    )
    head.weight = biased.lm_head.weight
    torch.nn.init.zeros_(head.bias)
    with torch.no_grad():
        head.bias[tokenizer.eos_token_id] = logit
    biased.lm_head = head
    return biased


@pytest.mark.parametrize("batch_size", [1, 2, 5, 16])
def test_greedy_equals_plain_decoding_for_every_batch_size(model, tokenizer, batch_size):
    found = generate(model, tokenizer, CONVERSATIONS, GREEDY, batch_size=batch_size)
    expected = [plain_greedy(model, tokenizer, talk, 12) for talk in CONVERSATIONS]
    assert [(g.text, g.tokens, g.truncated) for (g,) in found] == expected


def test_greedy_stays_right_while_finished_rows_leave_the_batch(model, tokenizer):
    ending = with_end_bias(model, tokenizer, 6.0)
    found = generate(ending, tokenizer, CONVERSATIONS, GREEDY, batch_size=5)
    expected = [plain_greedy(ending, tokenizer, talk, 12) for talk in CONVERSATIONS]
    assert len({length for _, length, _ in expected}) > 1
    assert [(g.text, g.tokens, g.truncated) for (g,) in found] == expected


def test_the_end_token_stops_and_is_not_in_the_answer(model, tokenizer):
    ending = with_end_bias(model, tokenizer, 1e4)
    for (answer,) in generate(ending, tokenizer, CONVERSATIONS, GREEDY):
        assert (answer.text, answer.tokens, answer.truncated) == ("", 0, False)


def test_an_answer_at_the_token_limit_is_marked_truncated(model, tokenizer):
    silent = with_end_bias(model, tokenizer, -1e4)
    for (answer,) in generate(silent, tokenizer, CONVERSATIONS, Decoding(max_new_tokens=3)):
        assert (answer.tokens, answer.truncated) == (3, True)


def test_the_prompt_is_never_part_of_the_answer_even_when_the_model_repeats_it(model, tokenizer):
    repeating = with_end_bias(model, tokenizer, 0.0)
    token = tokenizer("hello", add_special_tokens=False)["input_ids"][-1]
    with torch.no_grad():
        repeating.lm_head.bias[token] = 1e4
    ((answer,),) = generate(repeating, tokenizer, CONVERSATIONS[:1], Decoding(max_new_tokens=2))
    assert answer.text == tokenizer.decode([token]) * 2


def test_samples_do_not_depend_on_the_batch_size(model, tokenizer):
    one = generate(model, tokenizer, CONVERSATIONS, SAMPLED, seed=3, batch_size=1)
    four = generate(model, tokenizer, CONVERSATIONS, SAMPLED, seed=3, batch_size=4)
    assert one == four


def test_samples_of_a_prompt_do_not_depend_on_the_prompts_after_it(model, tokenizer):
    alone = generate(model, tokenizer, CONVERSATIONS[:1], SAMPLED, seed=3)
    together = generate(model, tokenizer, CONVERSATIONS, SAMPLED, seed=3)
    assert alone[0] == together[0]


def test_another_seed_gives_other_samples(model, tokenizer):
    first = generate(model, tokenizer, CONVERSATIONS, SAMPLED, seed=3)
    assert first != generate(model, tokenizer, CONVERSATIONS, SAMPLED, seed=4)


def test_samples_of_one_prompt_differ(model, tokenizer):
    (samples,) = generate(model, tokenizer, CONVERSATIONS[:1], SAMPLED, seed=3)
    assert len({sample.text for sample in samples}) == 3


def test_greedy_with_several_samples_repeats_one_answer(model, tokenizer):
    decoding = Decoding(max_new_tokens=4, n_samples=3)
    for answers in generate(model, tokenizer, CONVERSATIONS, decoding):
        assert len(answers) == 3
        assert len(set(answers)) == 1


def test_first_token_frequencies_follow_the_softmax(model, tokenizer):
    draws = 1000
    decoding = Decoding(max_new_tokens=1, temperature=1.0, n_samples=draws)
    (samples,) = generate(model, tokenizer, CONVERSATIONS[:1], decoding, batch_size=draws)
    text = tokenizer.apply_chat_template(
        CONVERSATIONS[0], add_generation_prompt=True, tokenize=False
    )
    with torch.no_grad():
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        p = torch.softmax(model(ids).logits[0, -1], dim=-1)
    likeliest = int(p.argmax())
    share = sum(sample.text == tokenizer.decode([likeliest]) for sample in samples) / draws
    # Five standard errors of a share of 1,000 draws.
    assert abs(share - float(p[likeliest])) < 5 * float((p[likeliest] / draws) ** 0.5)


def test_a_tiny_nucleus_is_greedy(model, tokenizer):
    narrow = Decoding(max_new_tokens=6, temperature=1.0, top_p=1e-6)
    greedy = generate(model, tokenizer, CONVERSATIONS, Decoding(max_new_tokens=6))
    assert generate(model, tokenizer, CONVERSATIONS, narrow, seed=5) == greedy


def test_a_nucleus_wider_than_the_shortlist_is_sampled_from_the_whole_vocabulary(
    model, tokenizer, monkeypatch
):
    whole = generate(model, tokenizer, CONVERSATIONS, SAMPLED, seed=3)
    monkeypatch.setattr("evaluators.generation._NUCLEUS_SHORTLIST", 2)
    assert generate(model, tokenizer, CONVERSATIONS, SAMPLED, seed=3) == whole


def test_every_modules_mode_is_restored(model, tokenizer):
    training = copy.deepcopy(model).train()
    training.model.layers[0].eval()
    before = [module.training for module in training.modules()]
    generate(training, tokenizer, CONVERSATIONS[:1], Decoding(max_new_tokens=1))
    assert [module.training for module in training.modules()] == before


def test_progress_counts_responses_up_to_the_total(model, tokenizer):
    seen = []
    generate(
        model,
        tokenizer,
        CONVERSATIONS,
        SAMPLED,
        batch_size=4,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (15, 15)
    assert seen == sorted(seen)


def test_a_stop_request_ends_generation_within_a_token(model, tokenizer):
    calls = []

    def stop():
        calls.append(None)
        return len(calls) > 2

    with pytest.raises(GenerationStoppedError):
        generate(model, tokenizer, CONVERSATIONS, GREEDY, stop=stop)
    assert len(calls) == 3


def test_no_conversation_gives_no_result(model, tokenizer):
    assert generate(model, tokenizer, [], GREEDY) == []


def test_a_prompt_beyond_the_context_is_refused_by_index(model, tokenizer):
    long = [{"role": "user", "content": "dog " * 300}]
    with pytest.raises(PromptTooLongError, match="conversation 1"):
        generate(model, tokenizer, [CONVERSATIONS[0], long], GREEDY)


def test_generation_ends_where_the_context_is_full(model, tokenizer):
    silent = with_end_bias(model, tokenizer, -1e4)
    talk = [{"role": "user", "content": "dog " * 40}]
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    used = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    ((answer,),) = generate(silent, tokenizer, [talk], Decoding(max_new_tokens=250))
    assert answer.tokens == 256 - used
    assert answer.truncated


def test_a_tokenizer_without_chat_template_is_refused(model, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ChatTemplateMissingError):
        generate(model, bare, CONVERSATIONS, GREEDY)


def test_a_peft_wrapped_model_generates(model, tokenizer):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    plain = generate(model, tokenizer, CONVERSATIONS, GREEDY)
    assert generate(wrapped, tokenizer, CONVERSATIONS, GREEDY) == plain


def test_a_model_with_learned_positions_generates_alike_padded_or_not(tokenizer):
    torch.manual_seed(1)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=256,
            initializer_range=0.4,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.eos_token_id,
        )
    ).double()
    alone = generate(gpt2, tokenizer, CONVERSATIONS, GREEDY, batch_size=1)
    assert generate(gpt2, tokenizer, CONVERSATIONS, GREEDY, batch_size=5) == alone
