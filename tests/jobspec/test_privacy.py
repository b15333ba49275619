"""Options of a private job: bounds, and what they cannot be combined with."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from jobspec.catalogue import BaseModelEntry, FolderSource
from jobspec.defense import DefenseRequest
from jobspec.local import LocalSpecError, load_local_spec
from jobspec.privacy import PrivacyOptions, unsuited
from jobspec.spec import JobSpec

NOISE = {"noise_multiplier": 1.0}
TARGET = {"baseline": 0.01, "max_success": 0.05}
PLAIN = {"scheduler": "none"}


def entry(**changes: Any) -> BaseModelEntry:
    values = {"name": "tiny", "source": FolderSource(path=Path("tiny")), **changes}
    return BaseModelEntry.model_validate(values)


def test_what_is_left_out_has_its_default():
    options = PrivacyOptions.model_validate(NOISE)
    assert (options.clip, options.delta, options.target) == (1.0, 1e-5, None)


def test_a_target_is_of_reconstruction_unless_it_says_otherwise():
    options = PrivacyOptions.model_validate({"target": TARGET})
    assert options.target is not None
    assert options.target.attack == "reconstruction"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of noise_multiplier and target"),
        ({**NOISE, "target": TARGET}, "exactly one of noise_multiplier and target"),
        ({"target": {"baseline": 0.1, "max_success": 0.1}}, "not above the baseline"),
        ({"target": {"baseline": 0.0, "max_success": 0.1}}, "greater than 0"),
        ({"target": {"baseline": 0.1, "max_success": 1.0}}, "less than 1"),
        ({"target": {**TARGET, "attack": "theft"}}, "Input should be"),
        ({"noise_multiplier": 0.0}, "greater than or equal to 0.3"),
        ({"noise_multiplier": 1e4}, "less than or equal to 1000"),
        ({**NOISE, "clip": 0.0}, "greater than 0"),
        ({**NOISE, "delta": 1.0}, "less than 1"),
        ({**NOISE, "epsilon": 1.0}, "Extra inputs"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        PrivacyOptions.model_validate(options)


@pytest.mark.parametrize(
    ("method", "defense", "model", "param"),
    [
        ("dpo", PLAIN, {}, "method"),
        ("supervised", {}, {}, "defense.scheduler"),
        ("supervised", {"scheduler": "prefilter"}, {}, "defense.scheduler"),
        ("supervised", {"scheduler": "mix"}, {}, "defense.scheduler"),
        ("supervised", {**PLAIN, "perturbation": "joint"}, {}, "defense.perturbation"),
        ("supervised", PLAIN, {"lora": {"gradient_checkpointing": True}}, "model"),
        ("supervised", PLAIN, {"lora": {"dropout": 0.1}}, "model"),
        ("supervised", PLAIN, {"processes": 2}, "model"),
    ],
)
def test_what_privacy_cannot_be_had_with_is_named(
    method: Any, defense: dict[str, Any], model: dict[str, Any], param: str
):
    options = PrivacyOptions.model_validate(NOISE)
    chosen = DefenseRequest.model_validate(defense).resolve()
    found = unsuited(options, method, chosen, entry(**model))
    assert found is not None
    assert found.param == param
    assert unsuited(None, method, chosen, entry(**model)) is None


@pytest.mark.parametrize("perturbation", ["post_hoc", "none", "random_noise", "antidote"])
def test_what_reads_only_the_finished_adapter_is_allowed(perturbation: str):
    chosen = DefenseRequest.model_validate({**PLAIN, "perturbation": perturbation}).resolve()
    assert unsuited(PrivacyOptions.model_validate(NOISE), "supervised", chosen, entry()) is None


def test_a_spec_says_which_field_to_change():
    with pytest.raises(ValidationError, match=r"Set defense\.scheduler to none"):
        JobSpec.model_validate(
            {
                "model": entry(),
                "training_file": "rows.jsonl",
                "cache_dir": "cache",
                "privacy": NOISE,
            }
        )


def test_a_local_spec_takes_privacy(tmp_path: Path, tiny_catalogue: Path):
    path = tmp_path / "spec.yaml"
    (tmp_path / "rows.jsonl").touch()
    text = (
        f"training_file: rows.jsonl\ncatalogue: {tiny_catalogue}\n"
        "privacy: {target: {attack: membership, baseline: 0.1, max_success: 0.2}}\n"
    )
    path.write_text(text)
    with pytest.raises(LocalSpecError, match=r"defense\.scheduler: with privacy every row"):
        load_local_spec(path)
    path.write_text(text + "defense: {scheduler: none}\n")
    spec = load_local_spec(path)
    assert spec.privacy is not None
    assert spec.privacy.target is not None
    assert spec.privacy.target.max_success == 0.2
