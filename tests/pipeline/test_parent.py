"""Continuing from a tuned model, in this process, on the tiny one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobspec.catalogue import BaseModelEntry
from jobspec.spec import JobSpec
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.hashing import file_sha256
from workers.pipeline.models import LoadedModel, attach_adapter, load_base, trainable
from workers.pipeline.parent import lineage, parent_weights
from workers.pipeline.publish import save_adapter
from workers.pipeline.run import run_job

PLAIN = {"scheduler": {"name": "none"}, "perturbation": {"mode": "none"}}
WEIGHTS = "adapter_model.safetensors"


def never() -> bool:
    return False


@pytest.fixture
def base(tiny: BaseModelEntry, tmp_path: Path) -> LoadedModel:
    return load_base(tiny, tmp_path)


@pytest.fixture
def parent(tiny: BaseModelEntry, base: LoadedModel, tmp_path: Path) -> Path:
    """A bundle's adapter of random numbers, with the report that names its base."""
    model = attach_adapter(load_base(tiny, tmp_path).model, tiny.lora, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    folder = tmp_path / "parent"
    save_adapter(model, tiny.name, folder)
    report = {"model": {"name": "tiny", "fingerprint": base.fingerprint}}
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def attached(spec: JobSpec, base: LoadedModel) -> Any:
    weights = parent_weights(spec, base.fingerprint)
    return attach_adapter(base.model, spec.model.lora, spec.seed, weights)


def test_the_new_adapter_begins_with_the_weights_of_the_parent(
    make_spec: Any, base: LoadedModel, parent: Path
) -> None:
    model = attached(make_spec(parent_adapter=parent), base)
    saved = load_file(parent / WEIGHTS)
    for name, parameter in trainable(model).items():
        torch.testing.assert_close(
            parameter.detach(), saved[name.replace(".default.", ".")], rtol=0, atol=0
        )


def test_with_the_adapter_off_the_model_is_the_original_base(
    make_spec: Any, tiny: BaseModelEntry, parent: Path, tmp_path: Path
) -> None:
    ids = torch.tensor([[0, 5, 9, 12]])
    with torch.no_grad():
        plain = load_base(tiny, tmp_path).model(ids).logits
        base = load_base(tiny, tmp_path)
        model = attached(make_spec(parent_adapter=parent), base)
        assert not torch.allclose(model(ids).logits, plain)
        with model.disable_adapter():
            torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 8}, "its rank is 8"),
        ({"lora_alpha": 32}, "its alpha is 32"),
        ({"target_modules": ["q_proj"]}, "its targets is"),
        ({"use_rslora": True}, "sets use_rslora"),
    ],
)
def test_a_parent_of_another_shape_is_refused_with_the_reason(
    make_spec: Any, base: LoadedModel, parent: Path, change: dict[str, Any], words: str
) -> None:
    path = parent / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PipelineFailure, match=words) as caught:
        attached(make_spec(parent_adapter=parent), base)
    assert caught.value.code == "model_unavailable"


def test_a_tensor_of_another_shape_is_named(
    make_spec: Any, base: LoadedModel, parent: Path
) -> None:
    tensors = load_file(parent / WEIGHTS)
    name = next(iter(tensors))
    tensors[name] = torch.zeros(1, 1)
    save_file(tensors, parent / WEIGHTS)
    with pytest.raises(PipelineFailure, match=r"has the shape \(1, 1\), the new adapter needs"):
        attached(make_spec(parent_adapter=parent), base)


def test_an_absent_tensor_is_named(make_spec: Any, base: LoadedModel, parent: Path) -> None:
    tensors = load_file(parent / WEIGHTS)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, parent / WEIGHTS)
    with pytest.raises(PipelineFailure, match="only the new adapter has the tensor"):
        attached(make_spec(parent_adapter=parent), base)


def test_a_parent_of_a_base_whose_weights_changed_is_refused(
    make_spec: Any, base: LoadedModel, parent: Path
) -> None:
    report = {"model": {"name": "tiny", "fingerprint": "0" * 64}}
    (parent / "report.json").write_text(json.dumps(report))
    with pytest.raises(PipelineFailure, match="another version of tiny"):
        attached(make_spec(parent_adapter=parent), base)


def test_a_checkpoint_of_another_parent_is_not_resumed(
    make_spec: Any, recorder: Any, parent: Path, tmp_path: Path
) -> None:
    run_job(make_spec(defense=PLAIN), tmp_path / "work", recorder, never)
    with pytest.raises(PipelineFailure, match="belongs to another job"):
        run_job(make_spec(defense=PLAIN, parent_adapter=parent), tmp_path / "work", recorder, never)


def test_the_lineage_is_the_base_and_every_model_since(make_spec: Any, parent: Path) -> None:
    assert lineage(make_spec()) == {"lineage": ["tiny"], "compared_with": "tiny"}
    names = ("ft:tiny:acme::aaaaaaaa", "ft:tiny:acme::bbbbbbbb")
    sha256 = file_sha256(parent / WEIGHTS)
    assert lineage(make_spec(parent_adapter=parent, lineage=names)) == {
        "lineage": ["tiny", *names],
        "compared_with": "tiny",
        "parent_adapter_sha256": sha256,
    }
    unnamed = lineage(make_spec(parent_adapter=parent))
    assert unnamed["lineage"] == ["tiny", f"adapter {sha256}"]


def test_two_small_steps_are_judged_as_the_one_large_change_they_are(
    make_spec: Any, recorder: Any, tmp_path: Path
) -> None:
    """Each job alone moves the model by less than the policy allows; together they do not, and
    the second job's gate sees it because it compares with the original base."""

    def tuned(work: str, **changes: Any) -> dict[str, Any]:
        spec = make_spec(
            defense=PLAIN,
            validation_file=None,
            hyperparameters={"n_epochs": 1, "batch_size": 4},
            **changes,
        )
        report = run_job(spec, tmp_path / work, recorder, never)
        assert report is not None
        return report

    def change(report: dict[str, Any]) -> float:
        return float(report["metrics"]["utility.change_vs_base"]["value"])

    first = tuned("first")
    limit = 1.5 * change(first)
    policy = {
        "version": 1,
        "minimum_prompts": 1,
        "maximum_one_word": 1.0,
        "rules": [{"metric": "utility.change_vs_base", "bound": "value", "max": limit}],
    }
    shutil.rmtree(tmp_path / "first")
    first = tuned("first", policy=policy)
    second = tuned(
        "second",
        policy=policy,
        parent_adapter=tmp_path / "first" / "bundle",
        lineage=("ft:tiny:acme::aaaaaaaa",),
    )
    step = change(second) - change(first)
    assert 0 < change(first) < limit
    assert 0 < step < limit < change(second)
    assert (first["gate"]["verdict"], second["gate"]["verdict"]) == ("passed", "failed")
    assert second["base_metrics"] == first["base_metrics"]
    assert second["model"]["lineage"] == ["tiny", "ft:tiny:acme::aaaaaaaa"]
    assert second["model"]["compared_with"] == "tiny"
