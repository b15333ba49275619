import json
from pathlib import Path

import pytest
import torch

from jobspec.cache import default_cache_dir
from jobspec.catalogue import load_catalogue
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.folders import write_folder
from workers.pipeline.models import LoadedModel, load_base, model_folder


@pytest.mark.slow
def test_the_converted_gguf_is_the_whole_model_and_still_knows_france(smollm2: LoadedModel):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"


@pytest.mark.slow
def test_the_converted_gguf_has_272_tensors_and_a_head_tied_to_the_embedding(smollm2: LoadedModel):
    tensors = smollm2.model.state_dict()
    head = tensors["lm_head.weight"]
    assert len(tensors) == 273
    assert len([name for name in tensors if name != "lm_head.weight"]) == 272
    assert head.data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()


@pytest.mark.slow
def test_a_conversion_is_made_once(smollm2: LoadedModel):
    entry = load_catalogue().find("smollm2-135m-instruct")
    assert entry is not None
    folder, _ = model_folder(entry, default_cache_dir())
    before = (Path(folder) / "model.safetensors").stat().st_mtime_ns
    model_folder(entry, default_cache_dir())
    assert (Path(folder) / "model.safetensors").stat().st_mtime_ns == before


def test_a_missing_folder_is_model_unavailable_in_words(tmp_path: Path):
    catalogue = tmp_path / "catalogue.yaml"
    catalogue.write_text(
        "models:\n  gone:\n    default: true\n    source: {kind: folder, path: /nowhere/at/all}\n"
    )
    with pytest.raises(PipelineFailure, match="base model gone cannot be loaded") as caught:
        load_base(load_catalogue(catalogue).default, tmp_path)
    assert caught.value.code == "model_unavailable"


def test_a_gguf_of_an_absent_package_says_what_to_install(tmp_path: Path):
    catalogue = tmp_path / "catalogue.yaml"
    catalogue.write_text(
        "models:\n  gone:\n    default: true\n"
        "    source: {kind: gguf, package: no_such_package, file: x.gguf, "
        f"sha256: '{'0' * 64}'}}\n"
    )
    with pytest.raises(PipelineFailure, match="pip install"):
        load_base(load_catalogue(catalogue).default, tmp_path)


def test_a_folder_that_fails_half_way_does_not_exist(tmp_path: Path):
    def fill(folder: Path) -> None:
        (folder / "a.json").write_text(json.dumps(1))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path / "target", fill)
    assert list(tmp_path.iterdir()) == []
