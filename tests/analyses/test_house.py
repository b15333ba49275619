"""What every kind of analysis shares: registry, request, results, page."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

import analyses.registry
from analyses.context import AnalysisContext, AnalysisError, Chart, Outcome, Stopped, Table
from analyses.kind import Cost, Kind
from analyses.registry import InvalidKindError, UnknownKindError, find, names
from analyses.run import read_request, run_analysis
from jobspec.frozen import Frozen


class Request(Frozen):
    number: int = Field(ge=0, description="a count")


class Result(Frozen):
    double: int
    words: tuple[dict[str, str], ...] = ()


def double(request: Request, context: AnalysisContext) -> Outcome:
    context.progress("doubling", 1, 1)
    return Outcome(
        Result(double=2 * request.number, words=({"a": "<script>alert(1)</script>"},)),
        tables=(Table("numbers", {"n": [request.number]}),),
        charts=(Chart("A <chart>", "caption & more", "<?xml version='1.0'?><svg></svg>"),),
        warnings=("mind the <gap>",),
    )


KIND = Kind(
    name="test.double",
    title="Double <it>",
    question="What is twice the number?",
    request=Request,
    result=Result,
    method=f"{__name__}:double",
    paper="none",
    fidelity="faithful",
    backed_by=("tests/analyses/test_house.py",),
    limits=("whole numbers",),
    example={"number": 2},
    cost=lambda request: Cost(seconds=0.1, memory_bytes=1, basis="one product"),
    quick=True,
)


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])

    def run(kind: Kind, raw: object, **options: Any) -> tuple[dict[str, Any], Path]:
        context = AnalysisContext(work=tmp_path / "work", cache_dir=tmp_path / "cache", **options)
        out = tmp_path / "out"
        return run_analysis(kind, read_request(kind, raw), context, out), out

    # The tests are no package, so the method is given by a module that can be imported by name.
    monkeypatch.setattr(Kind, "load", lambda self: double)
    return run


def test_a_result_is_json_with_the_methods_fields_at_the_top(run_here: Any) -> None:
    result, out = run_here(KIND, {"number": 3}, seed=7)
    assert json.loads((out / "result.json").read_text()) == result
    assert result["double"] == 6
    assert (result["kind"], result["seed"], result["request"]) == ("test.double", 7, {"number": 3})
    assert result["tables"] == ["numbers.parquet"]
    assert (out / "numbers.parquet").is_file()


def test_a_page_escapes_every_text(run_here: Any) -> None:
    _, out = run_here(KIND, {"number": 3})
    page = (out / "index.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "Double &lt;it&gt;" in page
    assert "mind the &lt;gap&gt;" in page
    assert "<?xml" not in page


def test_a_stopped_analysis_leaves_no_result(run_here: Any, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run_here(KIND, {"number": 3}, stop=lambda: True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("raw", "param"),
    [({"number": -1}, "number"), ({}, "number"), ([], None), ({"number": 1, "x": 2}, "x")],
)
def test_a_bad_request_names_its_field(raw: object, param: str | None) -> None:
    with pytest.raises(AnalysisError) as error:
        read_request(KIND, raw)
    assert error.value.param == param


def test_every_kind_works_as_its_example_says() -> None:
    for name in names():
        described = find(name).describe()
        assert described["fidelity"] in ("faithful", "derived", "simplified")
        assert described["limits"]
        for test in described["backed_by"]:
            assert (Path(__file__).parents[2] / test.partition("::")[0]).is_file()
        json.dumps(described)


def test_kinds_are_listed_without_importing_a_method() -> None:
    code = (
        "import sys; from analyses.registry import names, find\n"
        "for name in names(): find(name).describe()\n"
        "heavy = {'numpy', 'torch', 'scipy', 'dp_accounting', 'transformers'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_kind_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownKindError, match=r"privacy\.risk"):
        find("privacy.nothing")


def test_another_package_adds_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point(EntryPoint):
        def load(self) -> Any:
            return KIND if self.value == "good:kind" else object()

    def points(group: str, name: str | None = None) -> list[EntryPoint]:
        known = [Point("test.double", "good:kind", group), Point("test.bad", "bad:kind", group)]
        return [point for point in known if name in (None, point.name)]

    monkeypatch.setattr(analyses.registry, "entry_points", points)
    assert "test.double" in names()
    assert find("test.double") is KIND
    with pytest.raises(InvalidKindError, match=r"test\.bad"):
        find("test.bad")


def test_a_page_shows_every_digit_of_a_whole_number(run_here: Any) -> None:
    _, out = run_here(KIND, {"number": 1_234_567})
    assert ">2469134</td>" in (out / "index.html").read_text()
