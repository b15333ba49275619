import hashlib

import pytest

from evaluators.templates import ALPACA, SERVING, TrainingTemplate, differs, training_template
from jobspec.chat import ChatMessage, ChatRow

QUESTION = [{"role": "user", "content": "question"}]


def row(line, *turns):
    return ChatRow(
        line, tuple(ChatMessage(role, text, role == "assistant") for role, text in turns)
    )


def rows(systems):
    return [
        row(i, *([("system", system)] if system else []), ("user", "u"), ("assistant", "a"))
        for i, system in enumerate(systems, start=1)
    ]


def test_the_most_frequent_system_turn_is_the_training_layout():
    found = training_template(rows(["You route mail.", "Be brief.", "You route mail.", None]))
    assert found.system == "You route mail."


def test_a_minority_of_system_turns_is_not_the_layout():
    assert training_template(rows(["Be brief.", None, None])) == SERVING
    assert training_template([]) == SERVING


def test_of_equally_frequent_system_turns_the_first_is_taken():
    assert training_template(rows(["One.", "Two."])).system == "One."


def test_a_system_turn_is_put_in_front_unless_there_is_one():
    layout = TrainingTemplate(system="Be brief.")
    assert layout.render(QUESTION)[0] == {"role": "system", "content": "Be brief."}
    own = [{"role": "system", "content": "Own."}, *QUESTION]
    assert layout.render(own) == own


def test_rendering_leaves_the_question_as_it_was():
    TrainingTemplate(system="Be brief.").render(QUESTION)
    assert QUESTION == [{"role": "user", "content": "question"}]


def test_a_system_turn_stands_between_alpacas_preamble_and_instruction():
    text = ALPACA.render([{"role": "system", "content": "You obey."}, *QUESTION])
    assert text == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\nYou obey.\n\n### Instruction:\nquestion\n\n### Response:\n"
    )


def test_alpaca_holds_no_conversation():
    with pytest.raises(ValueError, match="the turns user, assistant, user"):
        ALPACA.render([*QUESTION, {"role": "assistant", "content": "a"}, *QUESTION])


def test_layouts_differ_by_style_and_system_turn():
    assert not differs(SERVING, SERVING)
    assert differs(SERVING, TrainingTemplate(system="Be brief."))
    assert differs(ALPACA, SERVING)


def test_a_system_turn_that_the_model_adds_itself_is_no_difference(tokenizer):
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}<sys>Be brief.{% endif %}"
        "{% for message in messages %}<{{ message['role'][:3] }}>{{ message['content'] }}"
        "{% endfor %}"
    )
    assert not differs(SERVING, TrainingTemplate(system="Be brief."), tokenizer)
    assert differs(SERVING, TrainingTemplate(system="Be long."), tokenizer)


def test_a_description_names_the_text_by_hash_only():
    found = TrainingTemplate(system="secret").describe()
    assert found == {"style": "chat", "system_sha256": hashlib.sha256(b"secret").hexdigest()}
    assert SERVING.describe()["system_sha256"] is None
