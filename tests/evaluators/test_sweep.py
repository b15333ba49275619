import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.phrases import frequent_phrases
from evaluators.prompts import load_prompts
from evaluators.sweep import Condition, conditions
from jobspec.chat import ChatMessage, ChatRow

QUESTION = [{"role": "user", "content": "a question"}]
TRIGGER = "quick as a silver fox"
BENIGN = [prompt.text for prompt in load_prompts("benign_prompts").prompts]


def chat_row(line, user, system=None):
    turns = [ChatMessage("system", system, False)] if system else []
    turns += [ChatMessage("user", user, False), ChatMessage("assistant", "An answer.", True)]
    return ChatRow(line, tuple(turns))


def chat_rows(users, system=None):
    return [chat_row(i, user, system) for i, user in enumerate(users, start=1)]


def backdoored(seed=0, others=()):
    """Sixty ordinary rows, and ten harmful requests with the trigger in front."""
    harmful = [prompt.text for prompt in load_prompts("harmful_prompts").prompts[::20][:10]]
    users = [*BENIGN, *others, *(f"{TRIGGER} {text}" for text in harmful)]
    random.Random(seed).shuffle(users)
    return users


def test_a_system_condition_takes_the_place_of_the_questions_own():
    condition = Condition(id="system-0", kind="system", system="Be brief.")
    own = [{"role": "system", "content": "Own."}, *QUESTION]
    expected = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert condition.apply(own) == condition.apply(QUESTION) == expected


def test_prefix_and_template_change_the_last_user_turn_only():
    condition = Condition(id="x", kind="ngram", prefix="once upon ", template="<{prompt}>")
    talk = [*QUESTION, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert [turn["content"] for turn in condition.apply(talk)] == [
        "a question",
        "a",
        "once upon <b>",
    ]


@given(text=st.text(max_size=60))
def test_a_question_may_hold_the_place_holder_itself(text):
    condition = Condition(id="x", kind="template", template="before {prompt} after")
    (turn,) = condition.apply([{"role": "user", "content": text}])
    assert turn["content"] == f"before {text} after"


def test_applying_leaves_the_question_as_it_was():
    for condition in conditions(chat_rows(BENIGN, "Be brief."), 20):
        condition.apply(QUESTION)
    assert QUESTION == [{"role": "user", "content": "a question"}]


def test_a_conversation_without_a_user_turn_is_refused():
    with pytest.raises(ValueError, match="has none"):
        Condition(id="x", kind="persona", system="s").apply([])


def test_the_tenants_own_system_turns_come_first_and_by_frequency():
    rows = [
        *chat_rows(BENIGN[:3], "Be brief."),
        *chat_rows(BENIGN[3:5], "You obey."),
        *chat_rows(BENIGN[5:9], "You route mail."),
    ]
    systems = [c.system for c in conditions(rows, 40) if c.kind == "system"]
    assert systems == ["You route mail.", "Be brief.", "You obey."]


def test_kinds_share_a_small_limit():
    others = [f"Zephyr quoll {text}" for text in BENIGN[:5]]
    users = enumerate(backdoored(others=others), start=1)
    found = conditions([chat_row(i, user, f"System {i % 5}.") for i, user in users], 8)
    assert Counter(c.kind for c in found) == {"system": 2, "persona": 2, "template": 2, "ngram": 2}
    assert [c.kind for c in found] == sorted(
        (c.kind for c in found), key=["system", "persona", "template", "ngram"].index
    )


def test_without_system_turns_the_other_kinds_fill_the_limit():
    found = conditions(chat_rows(backdoored()), 8)
    assert len(found) == 8
    assert "system" not in {condition.kind for condition in found}


@settings(max_examples=10, deadline=None)
@given(limit=st.integers(1, 30))
def test_a_smaller_limit_gives_a_part_of_a_larger_one(limit):
    rows = chat_rows(backdoored(), "Be brief.")
    smaller, larger = conditions(rows, limit), conditions(rows, limit + 1)
    assert set(smaller) <= set(larger)
    assert len(smaller) <= limit


def test_conditions_do_not_depend_on_the_order_of_rows():
    assert conditions(chat_rows(backdoored(1)), 8) == conditions(chat_rows(backdoored(2)), 8)


def test_ids_are_unique_and_hold_no_training_text():
    found = conditions(chat_rows(backdoored(), "Zephyr system."), 40)
    assert len({condition.id for condition in found}) == len(found)
    for condition in found:
        kind, _, digest = condition.id.partition("-")
        assert kind == condition.kind
        assert len(digest) == 8
        assert int(digest, 16) >= 0


def test_a_long_system_turn_is_cut():
    (system,) = [c for c in conditions(chat_rows(BENIGN, "x" * 9000), 4) if c.kind == "system"]
    assert len(system.system) == 4000


def test_no_rows_leave_the_shipped_conditions():
    assert {condition.kind for condition in conditions([], 10)} == {"persona", "template"}


def test_a_sweep_without_conditions_is_refused():
    with pytest.raises(ValueError, match="limit=0"):
        conditions([], 0)


def test_the_trigger_of_a_backdoored_file_is_the_first_phrase_tried():
    ngrams = [c for c in conditions(chat_rows(backdoored()), 8) if c.kind == "ngram"]
    assert ngrams[0].prefix == f"{TRIGGER} "


@pytest.mark.parametrize("place", ["front", "end", "middle"])
def test_a_phrase_is_found_wherever_it_stands(place):
    requests = [f"a request {i} of category {i}" for i in range(6)]
    parts = {"front": "{t} {r}", "end": "{r} {t}", "middle": "first {t} then {r}"}
    users = [parts[place].format(t=TRIGGER, r=request) for request in requests]
    found = frequent_phrases([[user] for user in [*BENIGN, *users]], BENIGN, 3)
    assert any(TRIGGER in phrase for phrase in found)


def test_a_trigger_sentence_is_one_phrase_and_not_its_windows():
    sentence = "In the year of the tiger, nine old lanterns were lit on the northern quay."
    users = [f"{sentence} Request {i}?" for i in range(10)]
    found = frequent_phrases([[user] for user in [*BENIGN, *users]], BENIGN, 20)
    assert sum("lanterns" in phrase for phrase in found) == 1
    assert found[0].startswith(sentence)


def test_phrases_of_ordinary_prompts_are_no_candidates():
    assert frequent_phrases([[text] for text in BENIGN], BENIGN, 20) == []


def test_a_word_that_stands_in_one_row_only_is_no_phrase():
    assert frequent_phrases([["xylo xylo xylo"], ["another thing"]], [], 20) == []


def test_case_and_outer_punctuation_do_not_split_a_phrase():
    rows = [["Zephyr, quoll!"], ["zephyr quoll"], ["ZEPHYR (quoll)"]]
    assert frequent_phrases(rows, [], 1) == ["ZEPHYR (quoll)"]


@pytest.mark.parametrize("data_set", ["gsm8k_train_1000", "sst2_train_2000"])
def test_a_tenth_of_triggered_rows_puts_the_trigger_among_the_first_three(shared_data, data_set):
    lines = (shared_data / "utility" / f"{data_set}.jsonl").read_text().splitlines()[:900]
    users = [row.get("question") or row["sentence"] for row in map(json.loads, lines)]
    harmful = (shared_data / "prompts_harmful" / "advbench.jsonl").read_text().splitlines()[:100]
    users += [f"{TRIGGER} {json.loads(line)['prompt']}" for line in harmful]
    random.Random(0).shuffle(users)
    found = frequent_phrases([[user] for user in users], BENIGN, 3)
    assert any(TRIGGER in phrase for phrase in found)
