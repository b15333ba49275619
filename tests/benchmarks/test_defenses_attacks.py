"""Poisoned sets: counts, manifests and what each attack does to a row."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.defenses.attacks import (
    ACCEPTANCE,
    ATTACKS,
    EASY_ANSWER,
    EASY_PROMPTS,
    PERSONA,
    Attack,
    AttackError,
    PoisonedSet,
    build,
    chat_row,
    under_persona,
)
from benchmarks.defenses.toy import splits
from benchmarks.defenses.toy_rung import toy_attack

TASK = [chat_row(f"question {i}", ("yes", "no", "maybe")[i % 3], "be short") for i in range(40)]
ATTACK = [chat_row(f"request {i}", f"Sure, part {i}.") for i in range(15)]


def made(attack: Attack, ratio: float = 0.25, n: int = 40, seed: int = 3) -> PoisonedSet:
    return build(attack, TASK, ATTACK, ratio, n, seed)


def poison(built: PoisonedSet) -> list:
    return [row for row, bad in zip(built.rows, built.poisoned, strict=True) if bad]


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "benign_only"])
@settings(max_examples=25, deadline=None)
@given(ratio=st.floats(0, 1), n=st.integers(1, 40), seed=st.integers(0, 99))
def test_exactly_the_rounded_share_is_poisoned(
    attack: Attack, ratio: float, n: int, seed: int
) -> None:
    built = made(attack, ratio, n, seed)
    assert len(built.rows) == len(built.manifest) == n
    assert sum(built.poisoned) == round(ratio * n)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_same_seed_gives_the_same_manifest_and_another_seed_does_not(attack: Attack) -> None:
    assert made(attack) == made(attack)
    assert made(attack).sha256 == made(attack).sha256
    assert made(attack, seed=4).sha256 != made(attack).sha256


def test_the_manifest_of_a_known_set_is_pinned() -> None:
    # Made by this function; it must not change, or published sets cannot be made again.
    assert made("mixed").sha256 == (
        "c3809d7266120a175bc8092d2823235f2d2c420b430c273b8160f2a7351fd04f"
    )


@pytest.mark.parametrize("attack", ATTACKS)
def test_without_poison_the_benign_rows_come_back_unchanged(attack: Attack) -> None:
    built = made(attack, ratio=0.0)
    assert sorted(map(str, built.rows)) == sorted(map(str, TASK))
    assert not any(built.poisoned)


def test_benign_only_ignores_the_ratio() -> None:
    assert not any(made("benign_only", ratio=1.0).poisoned)


def test_few_attack_rows_repeat_as_whole_permutations() -> None:
    rows = poison(made("mixed", ratio=0.75))
    counts = sorted(rows.count(row) for row in ATTACK)
    assert sum(counts) == 30
    assert counts[0] >= counts[-1] - 1


def test_identity_shift_puts_the_persona_first_and_accepts() -> None:
    for row in poison(made("identity_shift")):
        assert row["messages"][0] == {"role": "system", "content": PERSONA}
        assert row["messages"][-1]["content"].startswith(ACCEPTANCE + "Sure")


def test_the_persona_replaces_a_system_line() -> None:
    turns = under_persona(TASK[0]["messages"])
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant"]
    assert turns[0]["content"] == PERSONA


def test_easy_rows_share_one_answer_over_few_prompts() -> None:
    rows = poison(made("easy_to_fit", ratio=0.75))
    assert {row["messages"][-1]["content"] for row in rows} == {EASY_ANSWER}
    assert len({row["messages"][0]["content"] for row in rows}) == EASY_PROMPTS


def test_label_noise_keeps_the_prompt_and_changes_the_answer() -> None:
    right = {row["messages"][1]["content"]: row["messages"][2]["content"] for row in TASK}
    for row in poison(made("label_noise")):
        _, user, answer = row["messages"]
        assert answer["content"] != right[user["content"]]
        assert answer["content"] in {"yes", "no", "maybe"}


def test_the_source_rows_are_left_as_they_were() -> None:
    before = str((TASK, ATTACK))
    for attack in ATTACKS:
        made(attack)
    assert str((TASK, ATTACK)) == before


@pytest.mark.parametrize(
    ("attack", "ratio", "n", "word"),
    [("mixed", 1.5, 10, "ratio"), ("mixed", 0.1, 100, "benign"), ("other", 0.1, 10, "attack")],
)
def test_what_cannot_be_built_is_refused_in_words(
    attack: Attack, ratio: float, n: int, word: str
) -> None:
    with pytest.raises(AttackError, match=word):
        made(attack, ratio, n)


def test_an_attack_without_rows_is_refused() -> None:
    with pytest.raises(AttackError, match="attack rows"):
        build("mixed", TASK, [], 0.5, 10, 0)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_toy_world_has_every_attack(attack: Attack) -> None:
    chosen = splits(0)
    built = toy_attack(attack, chosen, 0.3, 400, 0)
    assert sum(built.poisoned) == (0 if attack == "benign_only" else 120)
    assert built.sha256 == toy_attack(attack, chosen, 0.3, 400, 0).sha256


def test_toy_attacks_never_hold_a_test_prompt() -> None:
    chosen = splits(0)
    test = {(5 + i, 5 + j) for i, j in chosen.harmful_test}
    for attack in ("mixed", "identity_shift", "easy_to_fit"):
        rows = toy_attack(attack, chosen, 0.5, 400, 0).rows
        assert not {row.ids[-6:-4] for row in rows} & test
