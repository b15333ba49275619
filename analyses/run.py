"""One analysis from raw request to a folder of results; the same with and without a server."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from analyses.context import AnalysisContext, AnalysisError, Outcome
from analyses.kind import Kind
from analyses.page import page
from jobspec.frozen import Frozen

RESULT = "result.json"
PAGE = "index.html"
RESULT_VERSION = 1


def read_request(kind: Kind, raw: object) -> Frozen:
    """The kind's request of a JSON value. Raises AnalysisError, which names the first field."""
    try:
        return kind.request.model_validate_json(json.dumps(raw), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise AnalysisError(f"{where or 'request'}: {message}", where or None) from error
    except (TypeError, ValueError) as error:
        raise AnalysisError(f"the request is no JSON value: {error}") from error


def run_analysis(
    kind: Kind, request: Frozen, context: AnalysisContext, out: Path
) -> dict[str, Any]:
    """Run the method and write out/result.json, out/NAME.parquet per table and out/index.html.

    Returns the content of result.json. Raises AnalysisError (a request that cannot be answered) and
    Stopped.
    """
    outcome: Outcome = kind.load()(request, context)
    context.check_stop()
    return write_outcome(kind, request, outcome, context.seed, out)


def write_outcome(
    kind: Kind, request: Frozen, outcome: Outcome, seed: int, out: Path
) -> dict[str, Any]:
    """The folder of a finished analysis. result.json comes last: where it is, all else is, too."""
    out.mkdir(parents=True, exist_ok=True)
    for table in outcome.tables:
        _write_table(out / f"{table.name}.parquet", table.columns)
    result = {
        "version": RESULT_VERSION,
        "kind": kind.name,
        "fidelity": kind.fidelity,
        "seed": seed,
        "request": request.model_dump(mode="json"),
        "warnings": list(outcome.warnings),
        "tables": [f"{table.name}.parquet" for table in outcome.tables],
        **outcome.result.model_dump(mode="json"),
    }
    (out / PAGE).write_text(page(kind, result, outcome), "utf-8")
    text = json.dumps(result, indent=2, allow_nan=False)
    draft = out / f".{RESULT}"
    draft.write_text(text + "\n", "utf-8")
    draft.replace(out / RESULT)
    return result


def _write_table(path: Path, columns: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)
