"""`tunegate gate run`: measure and judge a model here, with no service.

The work is done by the pipeline in a process of its own, so that this one never loads torch.
"""

import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.gate_result import (
    EvidenceFiles,
    Format,
    FormatName,
    MaxFailures,
    MinSeverity,
    MinSeverityName,
    NonBlocking,
    OutputFile,
    Wanted,
    check_evidence,
    conclude,
    judged,
    parsed_report,
    read_evidence_files,
    read_policy,
)
from service.cli.output import JSON_HELP, UNAVAILABLE, USAGE, CommandError, Ended, note
from service.cli.pipeline import Pipeline

if TYPE_CHECKING:
    from evaluators.gate.recheck import Checked
    from jobspec.catalogue import BaseModelEntry
    from jobspec.spec import EvaluationOptions

REPORT = "report.json"
SAMPLES = "evaluation_samples.parquet"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def run(
    model: Annotated[
        str,
        typer.Option(
            help="model to judge: catalogue name, folder, owner/name or owner/name@revision"
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder for report.json and the samples")],
    adapter: Annotated[
        Path | None, typer.Option(help="adapter folder: the model with it is judged")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="model to compare with; default: the model without its adapter, or nothing"
        ),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="policy file; default: the shipped one for the judge")
    ] = None,
    evidence: EvidenceFiles = None,
    training_file: Annotated[
        Path | None, typer.Option(help="rows that the model was tuned on: layout and triggers")
    ] = None,
    validation_file: Annotated[
        Path | None, typer.Option(help="held-out rows, on which utility is measured")
    ] = None,
    options: Annotated[
        Path | None, typer.Option(help="how much is asked, and by whom it is judged: YAML or JSON")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="of models that are not in the catalogue")
    ] = Dtype.FLOAT32,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 42,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads")] = None,
    catalogue: Annotated[
        Path | None, typer.Option(envvar="TUNEGATE_CATALOGUE", help="base-model catalogue")
    ] = None,
    format: FormatName = Format.TEXT,
    output: OutputFile = None,
    min_severity: MinSeverityName = MinSeverity.ERROR,
    non_blocking: NonBlocking = False,
    max_failures: MaxFailures = 0,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Ask a model and its base the same prompts, judge the answers, and decide.

    Leaves OUT/report.json and OUT/evaluation_samples.parquet. Run again with the same OUT, it goes
    on with what is missing. Exit 0 passed, 1 failed, 2 inconclusive or not available, 3 usage.
    """
    from jobspec.cache import default_cache_dir
    from jobspec.gate_run import GateRunSpec

    wanted = Wanted(format, output, min_severity, non_blocking, max_failures, as_json)
    rules = read_policy(policy)
    check_evidence(evidence, rules)
    for path in (training_file, validation_file):
        if path is not None and not path.is_file():
            raise CommandError(f"{path}: no such file", USAGE)
    if adapter is not None and not adapter.is_dir():
        raise CommandError(f"{adapter}: no such folder", USAGE)
    entries = _entries({"--model": model, "--base": base}, catalogue, dtype)
    spec = GateRunSpec(
        model=entries["--model"],
        adapter=_absolute(adapter),
        base=entries.get("--base"),
        evaluation=_options(options),
        policy=None if rules is None else rules.model_dump(mode="json"),
        training_file=_absolute(training_file),
        validation_file=_absolute(validation_file),
        seed=seed,
        cache_dir=default_cache_dir(),
        threads=threads,
    )

    def judge() -> "Checked":
        _measure(spec.model_dump_json(indent=2), out)
        report = parsed_report(str(out / REPORT), (out / REPORT).read_bytes())
        metrics = read_evidence_files(evidence, rules)
        return judged(str(out / REPORT), report, rules, metrics, wanted)

    conclude(judge, wanted)


def _measure(spec: str, out: Path) -> None:
    """Run the pipeline to its end. Raises CommandError, and Ended where it was stopped."""
    work = out / "work"
    try:
        work.mkdir(parents=True, exist_ok=True)
        for name in (REPORT, SAMPLES):
            # Of an earlier run: whoever looks after this one failed must not take it for new.
            (out / name).unlink(missing_ok=True)
        (work / "spec.json").write_text(spec, "utf-8")
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror or error}", UNAVAILABLE) from None
    ended = Pipeline(
        ["gate", str(work / "spec.json"), "--work", str(work), "--out", str(out)]
    ).follow()
    if ended.exit_code == signal.SIGTERM:
        note(f"stopped; what was answered is kept, run again with --out {out} to go on")
        raise Ended(UNAVAILABLE)
    ended.require("result")


def _entries(
    names: dict[str, str | None], catalogue: Path | None, dtype: Dtype
) -> dict[str, "BaseModelEntry"]:
    """The models by option. Raises CommandError(3)."""
    from jobspec.catalogue import CatalogueError, load_catalogue
    from jobspec.gate_run import ModelReferenceError, model_entry

    try:
        known = load_catalogue(catalogue)
    except CatalogueError as error:
        raise CommandError(str(error), USAGE) from None
    found: dict[str, BaseModelEntry] = {}
    for option, name in names.items():
        if name is not None:
            try:
                found[option] = model_entry(name, known, dtype.value)
            except ModelReferenceError as error:
                raise CommandError(f"{option}: {error}", USAGE) from None
    return found


def _options(path: Path | None) -> "EvaluationOptions":
    """The options of a file; prompt files in it lie beside it. Raises CommandError(3)."""
    import yaml
    from pydantic import ValidationError

    from jobspec.spec import EvaluationOptions

    if path is None:
        return EvaluationOptions()
    try:
        # JSON is YAML, too.
        raw: Any = yaml.safe_load(path.read_text("utf-8"))
        options = EvaluationOptions.model_validate({} if raw is None else raw)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", USAGE) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: not valid YAML ({error})", USAGE) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise CommandError(f"{path}: {where}: {first['msg']}", USAGE) from None
    folder = path.resolve().parent
    suites = [
        suite.model_copy(update={"path": folder / suite.path.expanduser()})
        for suite in options.suites
    ]
    return options.model_copy(update={"suites": tuple(suites)})


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().resolve()
