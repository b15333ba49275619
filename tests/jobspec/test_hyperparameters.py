from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from jobspec.catalogue import load_catalogue
from jobspec.hyperparameters import (
    DpoHyperparameters,
    Hyperparameters,
    ResolvedDpoHyperparameters,
    ResolvedHyperparameters,
    resolve,
)
from jobspec.local import LocalSpecError, load_local_spec
from jobspec.spec import JobSpec


@pytest.fixture
def make_spec(tiny_catalogue: Path, tmp_path: Path):
    def make(**changes: Any) -> JobSpec:
        values: dict[str, Any] = {
            "model": load_catalogue(tiny_catalogue).default,
            "training_file": tmp_path / "rows.jsonl",
            "cache_dir": tmp_path,
        }
        return JobSpec.model_validate(values | changes)

    return make


def test_auto_is_the_catalogues_batch_size_300_rows_and_the_base_models_rate():
    assert resolve(Hyperparameters(), 100, 8) == ResolvedHyperparameters(
        n_epochs=3, batch_size=8, learning_rate_multiplier=1.0
    )


def test_auto_of_dpo_is_the_papers_beta_and_a_fifth_of_the_rate():
    assert resolve(DpoHyperparameters(), 100, 8) == ResolvedDpoHyperparameters(
        n_epochs=3, batch_size=8, learning_rate_multiplier=0.2, beta=0.1
    )


def test_numbers_that_are_given_are_kept():
    asked = DpoHyperparameters(n_epochs=1, batch_size=2, learning_rate_multiplier=3.0, beta=0.5)
    assert resolve(asked, 100, 8).model_dump() == asked.model_dump()


def test_a_batch_is_never_larger_than_the_file():
    assert resolve(Hyperparameters(batch_size=64), 12, 8).batch_size == 12


@pytest.mark.parametrize("beta", [0, -0.1, 2.1, float("nan"), "high", None])
def test_beta_is_above_0_and_at_most_2(beta: Any):
    with pytest.raises(ValidationError):
        DpoHyperparameters(beta=beta)


def test_a_dpo_spec_has_a_beta_also_where_none_is_given(make_spec):
    for hyperparameters in ({}, {"n_epochs": 2}, Hyperparameters(n_epochs=2)):
        spec = make_spec(method="dpo", hyperparameters=hyperparameters)
        assert isinstance(spec.hyperparameters, DpoHyperparameters)
        assert spec.hyperparameters.beta == "auto"
    assert isinstance(make_spec(method="dpo").hyperparameters, DpoHyperparameters)


def test_a_spec_is_supervised_without_a_method(make_spec):
    spec = make_spec()
    assert (spec.method, type(spec.hyperparameters)) == ("supervised", Hyperparameters)


def test_a_spec_survives_its_json_file(make_spec):
    for spec in (make_spec(), make_spec(method="dpo", hyperparameters={"beta": 0.3})):
        assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_beta_without_dpo_is_refused(make_spec):
    with pytest.raises(ValidationError, match="beta is not a hyper-parameter of"):
        make_spec(hyperparameters={"beta": 0.1})


def test_an_unknown_hyperparameter_of_dpo_is_refused(make_spec):
    with pytest.raises(ValidationError, match="warmup"):
        make_spec(method="dpo", hyperparameters={"warmup": 3})


def test_constrained_sft_is_refused_for_dpo(make_spec):
    with pytest.raises(ValidationError, match="constrained_sft is of supervised tuning"):
        make_spec(method="dpo", defense={"scheduler": {"name": "constrained_sft"}})


LOCAL = """
training_file: rows.jsonl
catalogue: {catalogue}
method: dpo
hyperparameters: {{n_epochs: 1, beta: {beta}}}
defense: {{scheduler: {scheduler}}}
"""


@pytest.fixture
def local_file(tiny_catalogue: Path, tmp_path: Path):
    def write(beta: Any = 0.2, scheduler: str = "bds") -> Path:
        (tmp_path / "rows.jsonl").write_text("")
        path = tmp_path / "job.yaml"
        path.write_text(LOCAL.format(catalogue=tiny_catalogue, beta=beta, scheduler=scheduler))
        return path

    return write


def test_a_local_file_can_ask_for_dpo(local_file):
    spec = load_local_spec(local_file())
    assert spec.method == "dpo"
    assert spec.hyperparameters == DpoHyperparameters(n_epochs=1, beta=0.2)


def test_a_fault_of_a_local_dpo_file_is_told_with_its_field(local_file):
    with pytest.raises(LocalSpecError, match=r"hyperparameters\.dpo\.beta"):
        load_local_spec(local_file(beta=3))
    with pytest.raises(LocalSpecError, match=r"defense\.scheduler: .*constrained_sft"):
        load_local_spec(local_file(scheduler="constrained_sft"))


def test_a_fault_inside_the_chosen_defense_is_told_with_its_field(local_file):
    with pytest.raises(LocalSpecError, match=r": defense\.scheduler\.learning_rate: .*less than"):
        load_local_spec(local_file(scheduler="{name: bds, learning_rate: 9}"))
