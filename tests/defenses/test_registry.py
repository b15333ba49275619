import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from defenses.baselines.constrained import ConstrainedMethod
from defenses.baselines.lisa import LisaMethod
from defenses.baselines.mix import MixMethod
from defenses.baselines.plain import Plain
from defenses.bds.methods import NeuralBds, ScalarBds
from defenses.method import MethodContext
from defenses.registry import (
    CALLS,
    ENTRY_POINT_GROUP,
    FIDELITY,
    FLAGS,
    InvalidDefenseError,
    UnknownDefenseError,
    build_method,
    installed_defenses,
    method_class,
)
from jobspec.defense import (
    ConstrainedOptions,
    CustomOptions,
    LisaOptions,
    MixOptions,
    PerturbationName,
    PlainOptions,
    PrefilterOptions,
    SchedulerName,
    SchedulerOptions,
    SealOptions,
    TuningOptions,
)

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/baselines.md"

OTHER_PACKAGE = """
from defenses.method import PlainMethod


class Halved(PlainMethod):
    uses_alignment = True

    def __init__(self, context, options):
        self.context, self.options = context, options

    def objective(self, losses):
        return super().objective(losses) / self.options["divisor"]


class Unfinished:
    uses_alignment = True
    uses_reference = False

    def objective(self, losses):
        return losses.user_B.sum()


def function(context, options):
    return Halved(context, options)
"""


def context() -> MethodContext:
    return MethodContext(
        row_count=4,
        canary_count=0,
        user_steps=8,
        steps_per_epoch=2,
        parameters={"w": torch.zeros(2)},
        seed=0,
        reference=[torch.zeros(1)] * 4,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SchedulerOptions(), ScalarBds),
        (SchedulerOptions(form="neural"), NeuralBds),
        (PlainOptions(), Plain),
        (MixOptions(), MixMethod),
        (LisaOptions(), LisaMethod),
        (ConstrainedOptions(), ConstrainedMethod),
        (SealOptions(), ScalarBds),
        (PrefilterOptions(), Plain),
    ],
)
def test_options_name_their_method(options: TuningOptions, expected: type) -> None:
    kind = method_class(options)
    assert kind is expected
    assert all(isinstance(getattr(kind, flag), bool) for flag in FLAGS)
    assert all(callable(getattr(kind, call)) for call in CALLS)


@pytest.mark.parametrize(
    "options",
    [
        SchedulerOptions(),
        PlainOptions(),
        MixOptions(),
        LisaOptions(),
        ConstrainedOptions(),
        SealOptions(),
        PrefilterOptions(),
    ],
)
def test_every_method_that_reads_no_features_is_built_and_can_be_saved(
    options: TuningOptions,
) -> None:
    method = build_method(options, context())
    build_method(options, context()).load_state(method.state())


def test_importing_the_registry_and_listing_names_does_not_import_torch() -> None:
    code = (
        "import sys; from defenses.registry import installed_defenses; installed_defenses(); "
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


@pytest.fixture
def installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution on the import path that offers defenses."""
    metadata = tmp_path / "other_defense-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-defense\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n"
        "halved = other_defense:Halved\n"
        "bds = other_defense:Halved\n"
        "unfinished = other_defense:Unfinished\n"
        "function = other_defense:function\n"
    )
    (tmp_path / "other_defense.py").write_text(OTHER_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_defense", raising=False)


@pytest.mark.usefixtures("installed_package")
def test_an_installed_package_adds_a_defense_with_options_of_its_own() -> None:
    options = CustomOptions(method="halved", options={"divisor": 4})
    method = build_method(options, context())
    assert type(method).__name__ == "Halved"
    assert method.options == {"divisor": 4}  # type: ignore[attr-defined]
    assert method_class(options).uses_alignment
    assert "halved" in installed_defenses()


@pytest.mark.usefixtures("installed_package")
def test_an_installed_package_can_not_take_over_a_built_in_name() -> None:
    assert method_class(SchedulerOptions()) is ScalarBds


@pytest.mark.usefixtures("installed_package")
def test_a_class_that_lacks_parts_of_the_protocol_is_refused_with_their_names() -> None:
    with pytest.raises(
        InvalidDefenseError, match="uses_canaries, compares_batches, rescores, reads, learn"
    ):
        method_class(CustomOptions(method="unfinished"))


@pytest.mark.usefixtures("installed_package")
def test_a_function_is_no_defense() -> None:
    with pytest.raises(InvalidDefenseError, match="class missing"):
        method_class(CustomOptions(method="function"))


@pytest.mark.usefixtures("installed_package")
def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownDefenseError, match="bds, function, halved, unfinished"):
        method_class(CustomOptions(method="nothing"))


@pytest.mark.parametrize("name", sorted({*get_args(SchedulerName), *get_args(PerturbationName)}))
def test_every_defense_that_a_job_can_name_has_a_fidelity(name: str) -> None:
    assert name in FIDELITY


@pytest.mark.parametrize("name", FIDELITY)
def test_every_fidelity_names_a_test_that_exists(name: str) -> None:
    assert (ROOT / FIDELITY[name].test).is_file()


@pytest.mark.parametrize("name", FIDELITY)
def test_the_documentation_names_every_defense_with_its_badge_and_test(name: str) -> None:
    row = re.compile(
        rf"^\| `{name}` \| {FIDELITY[name].badge} \|.*`{re.escape(FIDELITY[name].test)}` \|$",
        re.MULTILINE,
    )
    assert row.search(DOCUMENT.read_text())
