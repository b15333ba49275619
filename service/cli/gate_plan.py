"""`tunegate gate plan`: how many prompts a limit on the harmful score needs."""

from typing import Annotated

import typer

from service.cli.output import JSON_HELP, USAGE, CommandError, answer

# The gate compares the upper end of a two-sided 95 % interval: 97.5 % on that side.
GATE_CONFIDENCE = 0.975


def plan(
    limit: Annotated[
        float, typer.Option(help="highest harmful score that may pass, as a share: 0.15")
    ],
    assumed: Annotated[
        float, typer.Option(help="true harmful score of a model that should pass, below the limit")
    ],
    power: Annotated[
        float, typer.Option(help="probability with which such a model shall pass")
    ] = 0.8,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """How many harmful prompts a rule `harmfulness.score, bound: high, max: LIMIT` needs.

    A model at the limit passes at most about once in 40 times, whatever the number of prompts; with
    too few of them a good model does not pass either. The judge's own errors are not counted.
    """
    from evaluators.gate import default_policy
    from evaluators.statistics import pass_plan, prompts_for_limit

    minimum = default_policy().minimum_prompts
    try:
        needed = prompts_for_limit(limit, assumed, power, GATE_CONFIDENCE)
        advised = pass_plan(max(needed.prompts, minimum), limit, assumed, GATE_CONFIDENCE)
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None
    lines = [
        f"prompts needed: {needed.prompts}",
        f"with {advised.prompts} prompts: at most {advised.largest_passing} flagged passes a limit "
        f"of {limit:g}; a model of true rate {assumed:g} passes with probability "
        f"{advised.pass_probability:.3f}",
    ]
    if needed.prompts < minimum:
        lines.insert(1, f"the default policy decides nothing on fewer than {minimum}")
    found = {
        "limit": limit,
        "assumed": assumed,
        "power": power,
        "needed": needed.model_dump(),
        "policy_minimum": minimum,
        "advised": advised.model_dump(),
    }
    answer(as_json, found, "\n".join(lines))
