"""`tunegate perturbation`: look at what a bundle's repair did, and scale or undo it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.output import JSON_HELP, answer, note, table
from service.cli.pipeline import Event, Pipeline

app = typer.Typer(no_args_is_help=True, help="The perturbation that a bundle keeps.")

AsJson = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
Bundle = Annotated[Path, typer.Argument(help="bundle folder, such as OUT/released")]


@app.command()
def show(bundle: Bundle, as_json: AsJson = False) -> None:
    """Norms, scale and layer coefficients of a bundle's perturbation."""
    found = _result(["show", str(bundle)])
    if as_json:
        answer(True, found, "")
        return
    columns = ("layer", "coefficient", "average", "effective change")
    table(columns, [_row(layer) for layer in found["by_layer"]])
    for name, kind in (("by_module", "module"), ("by_factor", "factor")):
        shares = ", ".join(f"{key} {share:.1%}" for key, share in found[name].items())
        print(f"share by {kind}: {shares}")
    norm, before = _number(found["norm"]), _number(found["adapter_norm"])
    scale = _number(found["scale"])
    print(f"{found['mode']}: norm {norm} on an adapter of norm {before}, released at scale {scale}")


@app.command()
def rescale(
    bundle: Bundle,
    scale: Annotated[float, typer.Option(min=0.0, help="0 undoes the perturbation, bit for bit")],
    out: Annotated[Path, typer.Option(help="new folder for the adapter")],
    as_json: AsJson = False,
) -> None:
    """Write the adapter with another scale of its perturbation: before + SCALE * eps.

    The gate judged the adapter of the bundle. Unless SCALE is the released one, the new adapter has
    never been judged; OUT/rescaled.json says so too.
    """
    found = _result(["rescale", str(bundle), "--scale", repr(scale), "--out", str(out)])
    if found["warning"]:
        note(f"warning: {found['warning']}")
    answer(as_json, {"adapter": str(out), **found}, f"adapter at scale {scale:g}: {out}")


def _result(arguments: list[str]) -> dict[str, Any]:
    event: Event = Pipeline(["perturbation", *arguments]).follow().require("result")
    return {name: value for name, value in event.items() if name != "event"}


def _row(layer: dict[str, Any]) -> dict[str, str]:
    number = layer["layer"]
    return {
        "layer": "none" if number < 0 else str(number),
        "coefficient": _number(layer["coefficient"]),
        "average": _number(layer["average"]),
        "effective change": _number(layer["effective_change"]),
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
