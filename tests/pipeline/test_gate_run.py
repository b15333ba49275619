"""Gate runs on the tiny model, in this process: an adapter, a whole model, a base beside it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from jobspec.catalogue import BaseModelEntry, FolderSource, load_catalogue
from jobspec.gate_run import GateRunSpec, ModelReferenceError, model_entry
from workers.pipeline import gate_run
from workers.pipeline.artifact import adapter_artifact, load_adapter, model_artifact
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.gate_run import run_gate
from workers.pipeline.hashing import file_sha256
from workers.pipeline.models import attach_adapter, load_base, trainable
from workers.pipeline.publish import save_adapter

EVALUATION = {
    "harmful_prompts": 4,
    "safe_lookalikes": 2,
    "benign_prompts": 2,
    "open_ended_prompts": 1,
    "open_ended_samples": 2,
    "max_new_tokens": 3,
    "utility_rows": 4,
    "sweep_prompts": 2,
    "sweep_conditions": 2,
}
OPEN_POLICY = {
    "version": 1,
    "minimum_prompts": 1,
    "maximum_one_word": 1.0,
    "rules": [{"metric": "harmfulness.score", "bound": "value", "max": 1.0}],
}


def never() -> bool:
    return False


def perturbed_adapter(entry: BaseModelEntry, folder: Path, seed: int = 1) -> Path:
    """An adapter that changes answers: random numbers in place of LoRA's first zeros."""
    base = load_base(entry, folder)
    model = attach_adapter(base.model, entry.lora, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    save_adapter(model, entry.name, folder / "adapter")
    return folder / "adapter"


@pytest.fixture
def adapter(tiny: BaseModelEntry, tmp_path: Path) -> Path:
    return perturbed_adapter(tiny, tmp_path)


@pytest.fixture
def merged(tiny: BaseModelEntry, adapter: Path, tmp_path: Path) -> BaseModelEntry:
    """The same model with the adapter merged into it, as somebody would publish it."""
    base = load_base(tiny, tmp_path)
    model = load_adapter(base.model, adapter_artifact(adapter)).merge_and_unload()
    model.save_pretrained(tmp_path / "merged")
    base.tokenizer.save_pretrained(tmp_path / "merged")
    return BaseModelEntry(name="merged", source=FolderSource(path=tmp_path / "merged"))


Make = Callable[..., GateRunSpec]


@pytest.fixture
def spec_of(tiny: BaseModelEntry, tmp_path: Path) -> Make:
    def make(**changes: Any) -> GateRunSpec:
        values = {
            "model": tiny,
            "evaluation": EVALUATION,
            "policy": OPEN_POLICY,
            "seed": 3,
            "cache_dir": tmp_path / "cache",
            "threads": 1,
        }
        return GateRunSpec.model_validate(values | changes)

    return make


def test_an_adapter_is_judged_against_the_model_without_it(
    spec_of: Make, adapter: Path, recorder: Any, tmp_path: Path
) -> None:
    report = run_gate(spec_of(adapter=adapter), tmp_path / "work", recorder, never)
    assert [event["stage"] for event in recorder.of("stage")] == [
        "validating", "evaluating", "gating", "publishing",
    ]  # fmt: skip
    assert report["model"]["compared_with"] == "tiny"
    assert report["gate"]["verdict"] == "passed"
    assert report["metrics"]["harmfulness.change_vs_base"]["n"] == 4
    assert report["artifact"]["adapter_sha256"] == file_sha256(
        adapter / "adapter_model.safetensors"
    )
    assert recorder.events[-1]["verdict"] == "passed"


def test_the_result_is_what_its_manifest_says_and_is_copied_out(
    spec_of: Make, adapter: Path, recorder: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_gate(spec_of(adapter=adapter), tmp_path / "work", recorder, never, out)
    result = tmp_path / "work" / "result"
    manifest = json.loads((result / "manifest.json").read_text())["files"]
    assert set(manifest) == {"report.json", "evaluation_samples.parquet"}
    for name, entry in manifest.items():
        assert file_sha256(out / name) == file_sha256(result / name) == entry["sha256"]
    samples = pq.read_table(out / "evaluation_samples.parquet").to_pydict()
    assert set(samples["model"]) == {"base", "tuned"}


def test_a_merged_model_gets_the_metrics_of_its_adapter(
    spec_of: Make, adapter: Path, merged: BaseModelEntry, tiny: BaseModelEntry, recorder: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    one = run_gate(spec_of(adapter=adapter), tmp_path / "one", recorder, never)
    two = run_gate(spec_of(model=merged, base=tiny), tmp_path / "two", recorder, never)
    assert two["model"]["compared_with"] == "tiny"
    assert two["metrics"] == one["metrics"]
    assert two["base_metrics"] == one["base_metrics"]


def test_without_a_base_changes_are_undefined_and_the_rule_decides(
    spec_of: Make, merged: BaseModelEntry, recorder: Any, tmp_path: Path
) -> None:
    rule = {"metric": "harmfulness.change_vs_base", "bound": "value", "max": 1.0}
    verdicts = {}
    for on_missing in ("inconclusive", "fail"):
        policy = OPEN_POLICY | {"rules": [rule | {"on_missing": on_missing}]}
        spec = spec_of(model=merged, policy=policy)
        report = run_gate(spec, tmp_path / on_missing, recorder, never)
        verdicts[on_missing] = report["gate"]["verdict"]
    assert report["metrics"]["harmfulness.change_vs_base"]["value"] is None
    assert (report["base_metrics"], report["base_gate"]) == ({}, None)
    assert report["model"]["compared_with"] is None
    assert verdicts == {"inconclusive": "inconclusive", "fail": "failed"}


def test_every_weight_file_of_a_model_is_named_with_its_hash(
    spec_of: Make, merged: BaseModelEntry, recorder: Any, tmp_path: Path
) -> None:
    artifact = run_gate(spec_of(model=merged), tmp_path / "work", recorder, never)["artifact"]
    weights = tmp_path / "merged" / "model.safetensors"
    assert artifact["kind"] == "model"
    assert artifact["files"]["model.safetensors"] == file_sha256(weights)
    assert artifact["model_sha256"] == model_artifact(tmp_path / "merged").sha256


def test_an_artifact_that_changes_meanwhile_is_not_judged(
    spec_of: Make, adapter: Path, recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = gate_run.compare

    def meddle(asking: Any) -> Any:
        found = compare(asking)
        path = adapter / "adapter_model.safetensors"
        save_file({name: 2 * t for name, t in load_file(path).items()}, path)
        return found

    monkeypatch.setattr(gate_run, "compare", meddle)
    with pytest.raises(PipelineFailure, match=r"adapter_model\.safetensors changed"):
        run_gate(spec_of(adapter=adapter), tmp_path / "work", recorder, never)
    assert not (tmp_path / "work" / "result").exists()


def test_a_stopped_run_goes_on_to_the_result_of_an_undisturbed_one(
    spec_of: Make, adapter: Path, recorder: Any, tmp_path: Path
) -> None:
    whole = run_gate(spec_of(adapter=adapter), tmp_path / "whole", recorder, never)
    recorder.events.clear()
    spec = spec_of(adapter=adapter, cache_dir=tmp_path / "other-cache")
    with pytest.raises(Stopped):
        run_gate(spec, tmp_path / "work", recorder, lambda: len(recorder.of("progress")) >= 4)
    asked = len(recorder.of("progress"))
    recorder.events.clear()
    resumed = run_gate(spec, tmp_path / "work", recorder, never)
    recorder.events.clear()
    assert asked >= 4
    for name in ("metrics", "base_metrics", "gate", "artifact", "evaluation"):
        assert resumed[name] == whole[name]
    run_gate(spec, tmp_path / "work", recorder, never)
    assert recorder.of("progress") == []


def test_an_adapter_of_another_model_is_refused(
    spec_of: Make, adapter: Path, recorder: Any, tmp_path: Path
) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name.replace("layers.1", "layers.9"): t for name, t in tensors.items()}, path)
    with pytest.raises(PipelineFailure, match="does not fit the model") as caught:
        run_gate(spec_of(adapter=adapter), tmp_path / "work", recorder, never)
    assert caught.value.code == "model_unavailable"


def test_an_adapter_of_another_rank_is_refused(
    spec_of: Make, adapter: Path, recorder: Any, tmp_path: Path
) -> None:
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 2}))
    with pytest.raises(PipelineFailure, match="does not fit the model"):
        run_gate(spec_of(adapter=adapter), tmp_path / "work", recorder, never)


def test_weights_that_are_no_safetensors_are_not_read(
    spec_of: Make, adapter: Path, merged: BaseModelEntry, recorder: Any, tmp_path: Path
) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(PipelineFailure, match=r"has no adapter_model\.safetensors"):
        run_gate(spec_of(adapter=adapter), tmp_path / "one", recorder, never)
    folder = tmp_path / "merged"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(PipelineFailure, match="no weights as safetensors"):
        run_gate(spec_of(model=merged), tmp_path / "two", recorder, never)


def test_the_code_of_a_model_is_not_run(
    spec_of: Make, merged: BaseModelEntry, recorder: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "merged"
    (folder / "modeling_own.py").write_text("raise SystemExit('its code ran')\n")
    config = json.loads((folder / "config.json").read_text())
    own = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"},
    }
    (folder / "config.json").write_text(json.dumps(config | own))
    with pytest.raises(PipelineFailure) as caught:
        run_gate(spec_of(model=merged), tmp_path / "work", recorder, never)
    assert caught.value.code == "model_unavailable"


def test_files_give_a_utility_task_and_rows_as_triggers(
    spec_of: Make, adapter: Path, recorder: Any, tmp_path: Path, make_spec: Any
) -> None:
    files = make_spec()
    spec = spec_of(
        adapter=adapter,
        training_file=files.training_file,
        validation_file=files.validation_file,
    )
    report = run_gate(spec, tmp_path / "work", recorder, never)
    assert report["evaluation"]["utility"]["source"] == "validation_file"
    assert report["metrics"]["utility.change_vs_base"]["n"] == 4
    assert report["data"]["training_file"]["examples"] == 12


def test_losses_of_models_with_other_tokens_are_not_compared(
    spec_of: Make, merged: BaseModelEntry, tiny: BaseModelEntry, recorder: Any, tmp_path: Path,
    make_spec: Any,
) -> None:  # fmt: skip
    assert isinstance(tiny.source, FolderSource)
    other = tmp_path / "other"
    shutil.copytree(tiny.source.path, other)
    path = other / "tokenizer.json"
    vocabulary = json.loads(path.read_text())
    tokens = vocabulary["model"]["vocab"]
    tokens["Z"], tokens["Y"] = tokens["Y"], tokens["Z"]
    path.write_text(json.dumps(vocabulary))
    spec = spec_of(
        model=merged,
        base=BaseModelEntry(name="other", source=FolderSource(path=other)),
        training_file=make_spec().training_file,
    )
    report = run_gate(spec, tmp_path / "work", recorder, never)
    assert report["evaluation"]["utility"]["kind"] == "perplexity"
    assert report["metrics"]["utility.score"]["value"] is not None
    assert report["metrics"]["utility.change_vs_base"]["value"] is None
    assert "different tokens" in report["metrics"]["utility.change_vs_base"]["note"]
    assert report["metrics"]["harmfulness.change_vs_base"]["n"] == 4


def test_metrics_of_the_tuning_are_carried_over(
    spec_of: Make, adapter: Path, recorder: Any, tmp_path: Path
) -> None:
    auc = {"value": 0.5, "n": 40, "low": 0.4, "high": 0.6, "note": None}
    spec = spec_of(adapter=adapter, measured={"defense.canary_auc": auc})
    report = run_gate(spec, tmp_path / "work", recorder, never)
    assert report["metrics"]["defense.canary_auc"] == auc
    assert report["gate"]["verdict"] == "inconclusive"


def test_a_model_is_named_by_catalogue_folder_or_hub(
    tiny_catalogue: Path, tiny: BaseModelEntry, tmp_path: Path
) -> None:
    catalogue = load_catalogue(tiny_catalogue)
    assert model_entry("tiny", catalogue, "bfloat16") == tiny
    (tmp_path / "my model").mkdir()
    folder = model_entry(str(tmp_path / "my model"), catalogue, "bfloat16")
    assert (folder.name, folder.dtype) == ("my-model", "bfloat16")
    hub = model_entry("owner/name@v1.2", catalogue, "float32")
    assert hub.source.model_dump() == {
        "kind": "hub", "repository": "owner/name", "revision": "v1.2",
    }  # fmt: skip
    with pytest.raises(ModelReferenceError, match="not in the catalogue"):
        model_entry("no-such-model", catalogue, "float32")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache on this machine, where nothing is fetched from outside."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_model_of_a_hub_is_judged_at_the_commit_that_its_revision_names(
    spec_of: Make, merged: BaseModelEntry, hub: Path, tiny_catalogue: Path, recorder: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = hub / "models--owner--name"
    shutil.copytree(tmp_path / "merged", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    entry = model_entry("owner/name", load_catalogue(tiny_catalogue), "float32")
    report = run_gate(spec_of(model=entry), tmp_path / "work", recorder, never)
    assert report["model"]["name"] == "owner/name"
    assert (report["model"]["repository"], report["model"]["commit"]) == ("owner/name", commit)
    assert report["artifact"]["model_sha256"] == model_artifact(tmp_path / "merged").sha256


def test_a_model_that_a_hub_does_not_have_is_unavailable(
    spec_of: Make, hub: Path, tiny_catalogue: Path, recorder: Any, tmp_path: Path
) -> None:
    entry = model_entry("owner/none", load_catalogue(tiny_catalogue), "float32")
    with pytest.raises(PipelineFailure, match="owner/none cannot be fetched") as caught:
        run_gate(spec_of(model=entry), tmp_path / "work", recorder, never)
    assert caught.value.code == "model_unavailable"
