import copy

import torch

from evaluators.generation import Decoding, generate

TALK = [{"role": "user", "content": "The quick brown fox."}]
GREEDY = Decoding(max_new_tokens=6)


def rendered(tokenizer):
    return tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)


def test_a_text_is_asked_as_it_is(model, tokenizer):
    assert generate(model, tokenizer, [rendered(tokenizer)], GREEDY) == generate(
        model, tokenizer, [TALK], GREEDY
    )


def test_texts_and_conversations_may_be_asked_together(model, tokenizer):
    text = "### Instruction:\nhello\n\n### Response:\n"
    together = generate(model, tokenizer, [text, TALK, text], GREEDY, batch_size=3)
    alone = [generate(model, tokenizer, [asked], GREEDY)[0] for asked in (text, TALK, text)]
    assert together == alone


def test_a_text_needs_no_chat_template(model, tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    asked = [rendered(tokenizer)]
    assert generate(model, plain, asked, GREEDY) == generate(model, tokenizer, asked, GREEDY)


def test_a_text_gets_the_special_tokens_of_its_tokenizer(model, tokenizer):
    from tokenizers import processors

    opening = copy.deepcopy(tokenizer)
    opening.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    ((found,),) = generate(model, opening, ["hello"], Decoding(max_new_tokens=1))
    ids = opening("hello")["input_ids"]
    assert ids[0] == 0
    with torch.no_grad():
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    assert found.text == tokenizer.decode([token], skip_special_tokens=True)
