import subprocess
import sys
from pathlib import Path

import pytest

from defenses.bds.scheduler import ScalarScheduler
from defenses.registry import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    UnknownDefenseError,
    available_defenses,
    resolve_defense,
)


def test_bds_resolves_to_its_scheduler() -> None:
    assert resolve_defense("bds") is ScalarScheduler


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_name_resolves(name: str) -> None:
    assert callable(resolve_defense(name))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownDefenseError, match="bds, joint, post_hoc"):
        resolve_defense("nothing")


def test_listing_the_names_does_not_import_torch() -> None:
    code = (
        "import sys; from defenses.registry import available_defenses; available_defenses(); "
        "print('torch' in sys.modules)"
    )
    root = Path(sys.modules["defenses"].__path__[0]).parent
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


@pytest.fixture
def installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution on the import path that offers two defences."""
    metadata = tmp_path / "other_defence-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-defence\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\nfractions = fractions:Fraction\nbds = fractions:Fraction\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed_package")
def test_an_installed_package_adds_a_defence() -> None:
    from fractions import Fraction

    assert "fractions" in available_defenses()
    assert resolve_defense("fractions") is Fraction


@pytest.mark.usefixtures("installed_package")
def test_an_installed_package_can_not_take_over_a_built_in_name() -> None:
    assert resolve_defense("bds") is ScalarScheduler
