"""From an operator's options to a judge that judges."""

import os

import pytest
from huggingface_hub import constants

from evaluators.embedding import MiniLMEmbedder
from evaluators.guards.adapter import GuardMismatchError
from evaluators.guards.load import GuardUnavailableError, contacted_hosts, load_guard
from evaluators.guards.moderation import ModerationClient
from evaluators.guards.presets import UnknownPresetError
from evaluators.harmfulness.contract import HarmJudge
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.judges import load_judge
from jobspec.judging import EmbeddedJudge, GuardJudge, ModerationJudge


@pytest.fixture(scope="module")
def scorer(embedder: MiniLMEmbedder) -> EmbeddedScorer:
    return EmbeddedScorer.load(embedder)


@pytest.fixture(scope="module")
def beaver_folder(make_classifier, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("beaver")
    make_classifier().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def causal_folder(causal_model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    causal_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_embedded_judge_is_the_scorer_that_is_there_already(scorer):
    judge: HarmJudge = load_judge(EmbeddedJudge(), scorer)
    assert judge is scorer


def test_the_tail_rule_makes_another_scorer_of_the_same_weights(scorer):
    judge = load_judge(EmbeddedJudge(tail_rule=True), scorer)
    assert judge.id == scorer.id
    assert judge.fingerprint != scorer.fingerprint


def test_a_guard_is_loaded_from_a_folder(scorer, beaver_folder):
    options = GuardJudge(
        preset="beaver-dam-7b", model=str(beaver_folder), threshold=0.4, device="cpu"
    )
    judge: HarmJudge = load_judge(options, scorer)
    found = judge.judge(["A request"] * 2, ["An answer.", "Another one."])
    assert [one.status for one in found] == ["judged", "judged"]
    assert (judge.id, judge.threshold, judge.hosts) == ("guard-beaver-dam-7b", 0.4, ())
    assert judge.card["model"] == str(beaver_folder)
    assert judge.card["held_out"]["Safe-RLHF mini"] == {"accuracy": 0.89, "f1": 0.90}


def test_a_guard_judges_alike_each_time_it_is_loaded(beaver_folder):
    one, two = (
        load_guard("beaver-dam-7b", model=str(beaver_folder), device="cpu") for _ in range(2)
    )
    assert one.fingerprint == two.fingerprint
    assert one.judge(["A"], ["An answer."]) == two.judge(["A"], ["An answer."])


def test_a_causal_guard_is_loaded_from_a_folder(causal_folder):
    judge = load_guard("shieldgemma-2b", model=str(causal_folder), device="cpu")
    assert judge.judge(["A request"], ["An answer."])[0].status == "judged"
    # The preset's threshold where the options name none.
    assert judge.threshold == 0.5


def test_a_model_of_another_shape_is_refused(causal_model, tokenizer, tmp_path):
    from transformers import LlamaForSequenceClassification

    config = type(causal_model.config)(**{**causal_model.config.to_dict(), "num_labels": 3})
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(GuardMismatchError, match="3 labels, the preset 14"):
        load_guard("beaver-dam-7b", model=str(tmp_path), device="cpu")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(GuardUnavailableError, match=r"nowhere.*set judge\.model"):
        load_guard("llama-guard-3-1b", model=str(tmp_path / "nowhere"), device="cpu")


def test_a_model_of_the_hub_names_the_hub_as_contacted(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "https://models.example/hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert contacted_hosts("owner/name") == ("models.example",)
    assert contacted_hosts(str(tmp_path)) == ()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert contacted_hosts("owner/name") == ()


def test_an_unknown_preset_is_refused(scorer):
    with pytest.raises(UnknownPresetError, match="llama-guard-3-8b"):
        load_judge(GuardJudge(preset="llama-guard"), scorer)


def test_the_rubric_needs_a_model_to_be_named(scorer):
    with pytest.raises(GuardUnavailableError, match="name one"):
        load_judge(GuardJudge(preset="strongreject-rubric"), scorer)


def test_a_moderation_service_takes_its_key_from_the_environment(scorer, monkeypatch):
    monkeypatch.delenv("TUNEGATE_MODERATION_KEY", raising=False)
    options = ModerationJudge(url="https://moderation.example/v1", threshold=0.7)
    judge: HarmJudge = load_judge(options, scorer, environment={"TUNEGATE_MODERATION_KEY": "k"})
    assert isinstance(judge, ModerationClient)
    assert (judge.threshold, judge.hosts) == (0.7, ("moderation.example",))
    assert "TUNEGATE_MODERATION_KEY" not in os.environ
