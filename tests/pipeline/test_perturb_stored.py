"""A bundle's perturbation after the job: shown, rescaled, undone."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from defenses.panacea.layers import effective_change_norms
from defenses.panacea.perturbation import (
    adaptive_perturbation,
    apply_perturbation,
    global_norm,
    perturbed_parameters,
)
from jobspec.catalogue import BaseModelEntry, load_catalogue
from workers.pipeline.entry import EXIT_DONE, EXIT_FAILED, guarded
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.hashing import file_sha256
from workers.pipeline.models import attach_adapter, load_base, trainable
from workers.pipeline.perturb import Perturbed
from workers.pipeline.publish import publish, save_adapter, save_perturbation
from workers.pipeline.stored_perturbation import describe_perturbation, rescale_perturbation

RELEASED = 0.5


class Made(NamedTuple):
    """A bundle and what it was made of."""

    folder: Path
    entry: BaseModelEntry
    before: dict[str, Tensor]
    eps: dict[str, Tensor]


def make_bundle(entry: BaseModelEntry, work: Path) -> Made:
    base = load_base(entry, work / "cache")
    model = attach_adapter(base.model, entry.lora, 1)
    parameters = trainable(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in parameters.values():
            p.copy_(0.05 * torch.randn(p.shape, generator=generator))
    noise = {n: torch.randn(p.shape, generator=generator) for n, p in parameters.items()}
    eps = adaptive_perturbation(noise, 0.4)
    account = {
        "mode": "joint",
        "fidelity": "the paper's",
        "rho": 0.4,
        "layer_coefficients_average": {"0": 0.25, "1": 0.75},
    }
    perturbed = Perturbed(eps, RELEASED, {0: 0.25, 1: 0.75}, account)
    save_perturbation(model, perturbed, work / "perturbation")
    with apply_perturbation(parameters, eps, RELEASED):
        sha256 = save_adapter(model, entry.name, work / "adapter")
    report = {"defense": {"perturbation": account}}
    publish(
        work / "bundle", work / "adapter", sha256, base.tokenizer, report, None,
        pa.table({}), work / "perturbation",
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in parameters.items()}
    return Made(work / "bundle", entry, before, eps)


@pytest.fixture(scope="module")
def made(tiny_catalogue: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_bundle(load_catalogue(tiny_catalogue).default, tmp_path_factory.mktemp("made"))


@pytest.fixture
def bundle(made: Made, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    copy = tmp_path / "bundle"
    for source in made.folder.rglob("*"):
        if source.is_file():
            target = copy / source.relative_to(made.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return copy


def test_the_bundle_names_every_file_of_the_perturbation(made: Made) -> None:
    manifest = json.loads((made.folder / "manifest.json").read_text())["files"]
    stored = {name for name in manifest if name.startswith("perturbation/")}
    assert stored == {
        "perturbation/eps.safetensors",
        "perturbation/adapter_before.safetensors",
        "perturbation/layers.svg",
    }


def test_scale_zero_undoes_the_perturbation_bit_for_bit(made: Made, tmp_path: Path) -> None:
    rescale_perturbation(made.folder, 0.0, tmp_path / "out")
    undone = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(undone) == len(made.before)
    for name, tensor in made.before.items():
        assert torch.equal(undone[name.replace(".default.", ".")], tensor)


def test_any_scale_is_the_adapter_before_plus_scale_times_eps(made: Made, tmp_path: Path) -> None:
    rescale_perturbation(made.folder, 0.75, tmp_path / "out")
    rescaled = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for name, tensor in perturbed_parameters(made.before, made.eps, 0.75).items():
        assert torch.equal(rescaled[name.replace(".default.", ".")], tensor)


def test_the_released_scale_gives_the_judged_adapter_again(made: Made, tmp_path: Path) -> None:
    about = rescale_perturbation(made.folder, RELEASED, tmp_path / "out")
    judged = file_sha256(made.folder / "adapter_model.safetensors")
    assert about["adapter_sha256"] == about["judged_adapter_sha256"] == judged
    assert (about["judged"], about["warning"]) == (True, None)


def test_another_scale_says_that_the_gate_never_judged_it(made: Made, tmp_path: Path) -> None:
    about = rescale_perturbation(made.folder, 1.0, tmp_path / "out")
    assert about["judged"] is False
    assert "not this one" in about["warning"]
    assert json.loads((tmp_path / "out" / "rescaled.json").read_text()) == about


def test_peft_loads_a_rescaled_adapter(made: Made, tmp_path: Path) -> None:
    rescale_perturbation(made.folder, 0.25, tmp_path / "out")
    base = load_base(made.entry, tmp_path / "cache")
    loaded = dict(PeftModel.from_pretrained(base.model, tmp_path / "out").named_parameters())
    for name, tensor in perturbed_parameters(made.before, made.eps, 0.25).items():
        assert torch.equal(loaded[name], tensor)


def test_what_is_shown_agrees_with_the_tensors(made: Made) -> None:
    shown = describe_perturbation(made.folder)
    assert (shown["mode"], shown["scale"], shown["rho"]) == ("joint", RELEASED, 0.4)
    assert shown["norm"] == pytest.approx(global_norm(made.eps))
    assert shown["adapter_norm"] == pytest.approx(global_norm(made.before))
    assert [layer["layer"] for layer in shown["by_layer"]] == [0, 1]
    assert [layer["average"] for layer in shown["by_layer"]] == [0.25, 0.75]
    assert sum(layer["coefficient"] for layer in shown["by_layer"]) == pytest.approx(1.0)
    changes = effective_change_norms(made.before, made.eps, 8 / 4)
    total = sum(layer["effective_change"] ** 2 for layer in shown["by_layer"])
    assert total == pytest.approx(sum(norm**2 for norm in changes.values()))


def test_a_bundle_without_its_report_can_still_be_shown(bundle: Path) -> None:
    (bundle / "report.json").unlink()
    shown = describe_perturbation(bundle)
    assert (shown["mode"], shown["scale"], shown["rho"]) == ("joint", RELEASED, None)
    assert [layer["average"] for layer in shown["by_layer"]] == [None, None]


@pytest.mark.parametrize("scale", [-0.1, float("nan"), float("inf")])
def test_a_scale_that_means_nothing_is_refused(made: Made, tmp_path: Path, scale: float) -> None:
    with pytest.raises(PipelineFailure, match="finite number of at least 0"):
        rescale_perturbation(made.folder, scale, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_never_overwritten(made: Made, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(PipelineFailure, match="exists already"):
        rescale_perturbation(made.folder, 1.0, tmp_path / "out")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineFailure, match="no such folder"):
        describe_perturbation(tmp_path / "gone")


def test_a_bundle_without_a_perturbation_is_told_in_words(bundle: Path) -> None:
    (bundle / "perturbation" / "eps.safetensors").unlink()
    with pytest.raises(PipelineFailure, match="holds no perturbation") as caught:
        describe_perturbation(bundle)
    assert caught.value.code == "invalid_spec"


def test_tensors_that_do_not_belong_together_are_refused(bundle: Path, tmp_path: Path) -> None:
    path = bundle / "perturbation" / "eps.safetensors"
    eps = load_file(path)
    name = sorted(eps)[0]
    save_file(eps | {name: torch.zeros(3)}, path)
    with pytest.raises(PipelineFailure, match="do not belong together") as caught:
        rescale_perturbation(bundle, 1.0, tmp_path / "out")
    assert name in caught.value.message


def test_a_broken_file_is_told_in_words(bundle: Path) -> None:
    (bundle / "perturbation" / "eps.safetensors").write_bytes(b"broken")
    with pytest.raises(PipelineFailure, match="cannot be read"):
        describe_perturbation(bundle)


def test_a_refusal_ends_the_process_with_the_code_of_a_failure(recorder: Any, made: Made) -> None:
    assert guarded(lambda: describe_perturbation(made.folder), recorder) == EXIT_DONE
    code = guarded(lambda: describe_perturbation(made.folder / "no"), recorder)
    assert code == EXIT_FAILED
    assert recorder.of("failure")[0]["code"] == "invalid_spec"
