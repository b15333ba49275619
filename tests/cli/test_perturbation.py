"""`tunegate perturbation`: a bundle on disk is enough, no service and no base model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

LAYER = "base_model.model.model.layers.{k}.self_attn.q_proj.lora_{f}.default.weight"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Two layers; eps is the unit matrix, twice as large in layer 1."""
    folder = tmp_path / "bundle"
    (folder / "perturbation").mkdir(parents=True)
    eps = {LAYER.format(k=k, f=f): (k + 1.0) * torch.eye(2) for k in (0, 1) for f in "AB"}
    before = {name: torch.full((2, 2), 3.0) for name in eps}
    save_file(
        eps, folder / "perturbation" / "eps.safetensors", {"mode": "post_hoc", "scale": "0.5"}
    )
    save_file(before, folder / "perturbation" / "adapter_before.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4, "r": 2}))
    return folder


def test_the_coefficients_of_a_bundle_are_shown(cli: Any, bundle: Path) -> None:
    done = cli.run("perturbation", "show", str(bundle))
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["0", "0.2"] in [row[:2] for row in rows]
    assert ["1", "0.8"] in [row[:2] for row in rows]
    assert "share by factor: A 50.0%, B 50.0%" in done.stdout
    assert "released at scale 0.5" in done.stdout


def test_the_coefficients_are_json_on_request(cli: Any, bundle: Path) -> None:
    shown = json.loads(cli.run("perturbation", "show", str(bundle), "--json").stdout)
    assert [layer["coefficient"] for layer in shown["by_layer"]] == pytest.approx([0.2, 0.8])
    assert (shown["mode"], shown["scale"]) == ("post_hoc", 0.5)


def test_a_rescaled_adapter_comes_with_a_warning(cli: Any, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = cli.run("perturbation", "rescale", str(bundle), "--scale", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "The gate judged the adapter of the bundle, not this one" in done.stderr
    tensors = load_file(out / "adapter_model.safetensors")
    saved = tensors[LAYER.format(k=0, f="A").replace(".default", "")]
    assert torch.equal(saved, torch.full((2, 2), 3.0) + 2 * torch.eye(2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "/no/such/bundle"], "no such folder"),
        (["rescale", "BUNDLE", "--scale", "-1", "--out", "OUT"], "scale"),
        (["rescale", "BUNDLE", "--scale", "1", "--out", "BUNDLE"], "exists already"),
    ],
)
def test_bad_input_ends_with_3_and_without_a_traceback(
    cli: Any, bundle: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    places = {"BUNDLE": str(bundle), "OUT": str(tmp_path / "out")}
    done = cli.run("perturbation", *[places.get(word, word) for word in arguments])
    assert done.returncode == 3
    assert words in done.stderr
    assert "Traceback" not in done.stderr
