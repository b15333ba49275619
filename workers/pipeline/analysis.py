"""An analysis: the kind's method is run with what it may read, and its result is kept.

Nothing heavy is imported here: a kind that needs no model never loads torch. A second run with the
same work folder goes on with what the method kept.
"""

import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import analyses.context
from analyses.context import AnalysisContext, AnalysisError, JobFolder, Outcome
from analyses.kind import Kind
from analyses.registry import InvalidKindError, UnknownKindError, find
from analyses.run import PAGE, RESULT, read_request, write_outcome
from jobspec.analysis import AnalysedJob, AnalysisSpec
from jobspec.catalogue import BaseModelEntry
from jobspec.frozen import Frozen
from workers.pipeline.bundle import ADAPTER, MANIFEST, REPORT
from workers.pipeline.emit import Emit
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.folders import write_folder
from workers.pipeline.hashing import file_sha256, text_sha256

RESULT_FOLDER = "result"
# A reader's eye needs no more, and a method may count every row.
PROGRESS_SECONDS = 0.25


def run_analysis_spec(
    spec: AnalysisSpec, work: Path, emit: Emit, stop: Callable[[], bool]
) -> dict[str, Any]:
    """Answer the spec's question; `work`/result then holds result.json, tables, page and manifest.

    Returns the content of result.json. Raises PipelineFailure (a reason for the person who asked)
    and Stopped (`stop()` turned true).
    """
    emit("stage", stage="validating")
    kind = find_kind(spec.kind)
    request = checked_request(kind, spec.request)
    job = None if spec.job is None else _job_folder(spec.job)
    emit("stage", stage="analyzing")
    context = AnalysisContext(
        work=work / "partial",
        cache_dir=spec.cache_dir,
        seed=spec.seed,
        files=dict(spec.files),
        job=job,
        load_model=_model_loader(spec.cache_dir),
        progress=_Counted(emit),
        stop=stop,
    )
    context.work.mkdir(parents=True, exist_ok=True)
    outcome = _answer(kind, request, context)
    emit("stage", stage="publishing")
    result = _write(work / RESULT_FOLDER, kind, request, outcome, spec.seed)
    emit("result", bundle=str(work / RESULT_FOLDER), report=summary(result), kind=kind.name)
    return result


def run_local_analysis(
    spec: AnalysisSpec, out: Path, emit: Emit, stop: Callable[[], bool]
) -> dict[str, Any]:
    """The same with the result in `out`. What was finished of an interrupted run lies in out/work,
    by the question and its files, until there is a result. Raises as run_analysis_spec."""
    work = out / "work" / f"analysis-{question_key(spec)}"
    (out / RESULT).unlink(missing_ok=True)
    result = run_analysis_spec(spec, work, emit, stop)
    _copy_result(work / RESULT_FOLDER, out)
    shutil.rmtree(work, ignore_errors=True)
    with suppress(OSError):
        # Another question may have left something there.
        work.parent.rmdir()
    return result


def find_kind(name: str) -> Kind:
    """The kind of this name. Raises PipelineFailure: `invalid_analysis` for an unknown name,
    `analysis_unavailable` for one whose package cannot be used."""
    try:
        return find(name)
    except UnknownKindError as error:
        raise PipelineFailure("invalid_analysis", str(error), param="kind") from error
    except (InvalidKindError, ImportError, AttributeError) as error:
        raise PipelineFailure(
            "analysis_unavailable", f"the analysis {name} cannot be loaded: {error}"
        ) from error


def checked_request(kind: Kind, raw: object) -> Frozen:
    """The kind's request. Raises PipelineFailure(invalid_analysis) naming the field."""
    try:
        return read_request(kind, raw)
    except AnalysisError as error:
        raise _invalid(AnalysisError(str(error), error.param or "request")) from error


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """What the job's row keeps of a result: single values, warnings and names of tables."""
    kept = {
        name: value
        for name, value in result.items()
        if not isinstance(value, list | dict) and name not in ("version", "kind", "seed")
    }
    return {**kept, "warnings": result["warnings"], "tables": result["tables"]}


def question_key(spec: AnalysisSpec) -> str:
    """Names a question with the content of all that it reads, so that partial results of another
    one are never taken for this one's."""
    read: dict[str, Any] = {name: _content(path) for name, path in sorted(spec.files.items())}
    if spec.job is not None:
        parts = (spec.job.bundle, spec.job.training_file)
        read |= {"job": [spec.job.base.model_dump_json(), *map(_content, parts)]}
    asked = [spec.kind, spec.request, spec.seed, read]
    return text_sha256(json.dumps(asked, sort_keys=True))[:20]


def _content(path: Path) -> str:
    """The hash of a file, or of the adapter in a folder."""
    found = path / ADAPTER if path.is_dir() else path
    return file_sha256(found) if found.is_file() else str(path)


def _answer(kind: Kind, request: Frozen, context: AnalysisContext) -> Outcome:
    try:
        outcome: Outcome = kind.load()(request, context)
        context.check_stop()
    except analyses.context.Stopped as error:
        raise Stopped from error
    except AnalysisError as error:
        raise _invalid(error) from error
    except ModuleNotFoundError as error:
        raise PipelineFailure(
            "analysis_unavailable",
            f"the analysis {kind.name} needs the Python package {error.name}, which is not "
            "installed; install it, or tunegate with all its parts",
        ) from error
    return outcome


def _invalid(error: AnalysisError) -> PipelineFailure:
    """A reason with the field's name in front, where the method did not write it itself."""
    message, param = str(error), error.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    return PipelineFailure("invalid_analysis", message, param=param)


def _job_folder(job: AnalysedJob) -> JobFolder:
    try:
        report = json.loads((job.bundle / REPORT).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PipelineFailure(
            "invalid_analysis", f"job: {job.bundle / REPORT} cannot be read: {error}", param="job"
        ) from error
    return JobFolder(job.job_id, job.base, job.bundle, job.training_file, report)


def _model_loader(
    cache_dir: Path,
) -> Callable[[BaseModelEntry, Path | None], tuple[Any, Any]]:
    def load(entry: BaseModelEntry, adapter: Path | None) -> tuple[Any, Any]:
        from workers.pipeline.artifact import adapter_artifact, load_adapter
        from workers.pipeline.models import load_base

        base = load_base(entry, cache_dir)
        if adapter is None:
            return base.model, base.tokenizer
        return load_adapter(base.model, adapter_artifact(adapter)), base.tokenizer

    return load


class _Counted:
    """A method's counts as events: the first and the last of each stretch, and some between."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._what: str | None = None
        self._next = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        moment = time.monotonic()
        if what == self._what and done < total and moment < self._next:
            return
        self._what, self._next = what, moment + PROGRESS_SECONDS
        self._emit("progress", stage=what, done=done, total=total)


def _write(
    target: Path, kind: Kind, request: Frozen, outcome: Outcome, seed: int
) -> dict[str, Any]:
    """The result's files and a manifest of them; the folder exists only when it is whole."""
    results: list[dict[str, Any]] = []

    def fill(aside: Path) -> None:
        results.append(write_outcome(kind, request, outcome, seed, aside))
        files = {
            path.name: {"sha256": file_sha256(path), "bytes": path.stat().st_size}
            for path in sorted(aside.iterdir())
        }
        (aside / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n", "utf-8")

    write_folder(target, fill)
    return results[0]


def _copy_result(result: Path, out: Path) -> None:
    """Put the files where a person looks for them; result.json last, and each file at once."""
    names = sorted(path.name for path in result.iterdir() if path.name != MANIFEST)
    for name in [*(name for name in names if name not in (PAGE, RESULT)), PAGE, RESULT]:
        draft = out / f".{name}.part"
        shutil.copyfile(result / name, draft)
        draft.replace(out / name)
