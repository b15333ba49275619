import json

import pytest

from evaluators.prompts import Prompt, PromptFileDamagedError, load_prompts, parse_prompts, subset

NAMES = ["harmful_prompts", "safe_lookalikes", "benign_prompts", "open_ended_prompts"]


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows).encode()


@pytest.mark.parametrize("name", NAMES)
def test_packaged_prompt_sets_load_and_are_big_enough(name):
    minimum = {"harmful_prompts": 200, "safe_lookalikes": 50}.get(name, 40)
    assert len(load_prompts(name).prompts) >= minimum


def test_the_harmful_set_has_both_splits_and_categories():
    harmful = load_prompts("harmful_prompts")
    assert len(harmful.of_split("test")) >= 100
    assert len(harmful.of_split("validation")) >= 1
    assert len({prompt.group for prompt in harmful.prompts}) >= 10


def test_the_splits_of_the_harmful_set_share_no_prompt():
    harmful = load_prompts("harmful_prompts")
    test = {prompt.text.casefold() for prompt in harmful.of_split("test")}
    assert test.isdisjoint(prompt.text.casefold() for prompt in harmful.of_split("validation"))


def test_an_unknown_set_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="benign_prompts"):
        load_prompts("other")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lines({"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}), "line 2: id 'a' is used"),
        (lines({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}), "line 2: the text of 'b'"),
        (lines({"id": "a"}), "line 1: not a prompt row"),
        (lines({"id": "a", "prompt": " "}), "line 1: not a prompt row"),
        (lines({"id": "a", "prompt": "x", "split": "train"}), "line 1: not a prompt row"),
        (b'{"id"', "line 1: not a prompt row"),
        (b"[1]", "line 1: not a prompt row"),
        (b"\n", "holds no prompt"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(data, message):
    with pytest.raises(PromptFileDamagedError, match=message):
        parse_prompts("harmful_prompts", data)


def test_the_hash_is_that_of_the_file():
    data = lines({"id": "a", "query": "x", "leaf": "L"})
    first = parse_prompts("open_ended_prompts", data)
    assert first.prompts == (Prompt(id="a", text="x", group="L"),)
    assert first.sha256 != parse_prompts("open_ended_prompts", data + b"\n").sha256


PROMPTS = [
    Prompt(id=f"{group}{i}", text=f"{group}{i}", group=group)
    for group, count in (("a", 5), ("b", 2), ("c", 1))
    for i in range(count)
]


def test_a_subset_takes_turns_over_groups_and_keeps_the_order():
    assert [prompt.id for prompt in subset(PROMPTS, 4)] == ["a0", "a1", "b0", "c0"]


def test_a_smaller_subset_is_part_of_a_larger_one():
    for n in range(1, len(PROMPTS)):
        assert set(subset(PROMPTS, n)) < set(subset(PROMPTS, n + 1))


def test_a_subset_beyond_the_whole_is_the_whole():
    assert subset(PROMPTS, 100) == PROMPTS


def test_an_empty_subset_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        subset(PROMPTS, 0)
