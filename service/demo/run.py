"""Runs the demo with the official client and gathers what was measured."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from openai import OpenAI, OpenAIError

from service.cli.output import UNAVAILABLE, CommandError
from service.demo.embedded import Running
from service.demo.poison import PoisonedFile, demo_data

POLL_SECONDS = 0.5
FINISHED = ("succeeded", "failed", "cancelled")
GATE_CODES = ("safety_gate_failed", "gate_inconclusive")
NO_DEFENSE = {"scheduler": "none", "perturbation": "none"}

Progress = Callable[[str, str, float], None]


class DemoSettings(NamedTuple):
    """What the two jobs are run with."""

    seed: int
    share: float
    epochs: int


class Finished(NamedTuple):
    """A job at its end and how long it took."""

    job: Any
    seconds: float


def run_jobs(
    service: Running, poisoned: PoisonedFile, settings: DemoSettings, progress: Progress
) -> dict[str, Finished]:
    """Upload both files, run the undefended and the defended job, return them when finished.

    Raises CommandError if a job ends for another reason than the gate.
    """
    try:
        with OpenAI(base_url=f"{service.url}/v1", api_key=service.key) as client:
            return _run_jobs(client, poisoned, settings, progress)
    except OpenAIError as error:
        raise CommandError(f"the gateway answered: {error}", UNAVAILABLE) from error


def _run_jobs(
    client: OpenAI, poisoned: PoisonedFile, settings: DemoSettings, progress: Progress
) -> dict[str, Finished]:
    validation = client.files.create(
        file=("validation.jsonl", demo_data("task_validation.jsonl").encode()), purpose="fine-tune"
    )
    training = client.files.create(
        file=("training.jsonl", poisoned.text.encode()), purpose="fine-tune"
    )
    extras: Mapping[str, dict[str, Any]] = {
        "undefended": {"defense": NO_DEFENSE},
        "defended": {},
    }
    finished = {}
    for name, extra in extras.items():
        started = time.monotonic()
        job = client.fine_tuning.jobs.create(
            model="smollm2-135m-aligned",
            training_file=training.id,
            validation_file=validation.id,
            suffix=name,
            seed=settings.seed,
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": settings.epochs}},
            },
            extra_body=extra,
        )
        job = _watch(client, job.id, partial(progress, name))
        finished[name] = Finished(job, time.monotonic() - started)
        error = job.error
        if job.status != "succeeded" and (error is None or error.code not in GATE_CODES):
            reason = "no reason given" if error is None else f"{error.code}: {error.message}"
            raise CommandError(f"the {name} job ended as {job.status} ({reason})", UNAVAILABLE)
    return finished


def _watch(client: OpenAI, job_id: str, progress: Callable[[str, float], None]) -> Any:
    """Poll a job until it is finished, telling its stage and the share of training steps done."""
    while True:
        job = client.fine_tuning.jobs.retrieve(job_id)
        stage = getattr(job, "stage", None) or job.status
        share = 0.0
        part = (getattr(job, "tunegate", None) or {}).get("progress")
        if stage == "tuning":
            newest = client.fine_tuning.jobs.list_events(job_id, limit=5).data
            steps = [event.data for event in newest if event.type == "metrics" and event.data]
            if steps:
                data: dict[str, Any] = dict(steps[0])  # type: ignore[call-overload]
                share = data["step"] / data["total_steps"]
                stage = f"tuning, step {data['step']} of {data['total_steps']}"
        elif part:
            share = part["done"] / max(part["total"], 1)
            stage = f"{stage}, {part['stage']}"
        progress(stage, share)
        if job.status in FINISHED:
            return job
        time.sleep(POLL_SECONDS)


def result(
    finished: Mapping[str, Finished], poisoned: PoisonedFile, settings: DemoSettings
) -> dict[str, Any]:
    """The table of the demo as plain values."""
    defended = finished["defended"].job.report
    rows = [
        _row(
            "base",
            defended["base_metrics"],
            defended["base_gate"]["verdict"],
            max(one.job.report["timings"]["evaluating_base"] for one in finished.values()),
        ),
        *(
            _row(name, one.job.report["metrics"], one.job.report["gate"]["verdict"], one.seconds)
            for name, one in finished.items()
        ),
    ]
    distrusted = [
        {**row, "poisoned": row["line"] in poisoned.poisoned_lines}
        for row in defended["defense"]["scheduler"]["distrusted"]
    ]
    return {
        "rows": rows,
        "seed": settings.seed,
        "poisoned_rows": len(poisoned.poisoned_lines),
        "training_rows": poisoned.text.count("\n"),
        "distrusted": distrusted,
        "distrusted_poisoned": sum(row["poisoned"] for row in distrusted),
        "perturbation_scale": defended["defense"]["perturbation"].get("scale"),
        "effective_sample_size": defended["defense"]["scheduler"]["effective_sample_size"],
    }


def _row(name: str, metrics: Mapping[str, Any], verdict: str, seconds: float) -> dict[str, Any]:
    def pick(metric: str) -> dict[str, Any]:
        found = metrics[metric]
        return {key: found[key] for key in ("value", "n", "low", "high")}

    return {
        "name": name,
        "harmful_score": pick("harmfulness.score"),
        "refusal_rate": pick("refusal.rate"),
        "over_refusal": pick("refusal.over_refusal"),
        "utility": pick("utility.score"),
        "diversity": pick("diversity.intra_similarity"),
        "verdict": verdict,
        "seconds": round(seconds, 1),
    }
