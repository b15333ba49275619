import subprocess
import sys

import pytest

from evaluators import registry


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_every_built_in_name_resolves(name):
    assert callable(registry.resolve(name))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(registry.UnknownEvaluatorError, match=r"diversity\.intra"):
        registry.resolve("astrology")


def test_an_installed_package_can_add_an_evaluator(tmp_path, monkeypatch):
    info = tmp_path / "other_evaluators-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-evaluators\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tunegate.evaluators]\nother.measure = other_evaluators:measure\n"
        "diversity.intra = other_evaluators:measure\n"
    )
    (tmp_path / "other_evaluators.py").write_text("def measure():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.resolve("other.measure")() == 42
    assert "other.measure" in registry.names()
    assert registry.resolve("diversity.intra").__module__ == "evaluators.diversity.intra"


def test_importing_the_registry_imports_nothing_heavy():
    code = (
        "import sys, evaluators.registry; "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
