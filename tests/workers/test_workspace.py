"""The spec that a worker writes for an attempt."""

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from jobspec.hyperparameters import DpoHyperparameters, Hyperparameters
from jobspec.spec import JobSpec
from service.fine_tuning.attempts import Lease
from service.store.models import Attempt
from workers.workspace import prepare, read_plan


def written(workshop: Any, job_id: str) -> JobSpec:
    """The spec of the job's first attempt, as the training process reads it."""
    with workshop.transaction() as session:
        attempt = session.scalars(select(Attempt).where(Attempt.job_id == job_id)).one()
        lease = Lease(job_id, attempt.number, "worker")
        plan = read_plan(session, lease)
    path, _ = prepare(workshop.settings, workshop.artifacts, lease, plan)
    return JobSpec.model_validate(json.loads(Path(path).read_text("utf-8")))


@pytest.mark.parametrize("beta", ["auto", 0.3])
def test_a_dpo_job_reaches_the_pipeline_with_its_method_and_beta(workshop: Any, beta: Any):
    asked = {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": "auto", "beta": beta}
    spec = written(workshop, workshop.new_job(method={"type": "dpo"}, hyperparameters=asked))
    assert spec.method == "dpo"
    assert spec.hyperparameters == DpoHyperparameters(n_epochs=2, beta=beta)


def test_a_supervised_job_reaches_the_pipeline_without_a_beta(workshop: Any):
    spec = written(workshop, workshop.new_job())
    assert (spec.method, type(spec.hyperparameters)) == ("supervised", Hyperparameters)


def test_a_private_job_reaches_the_pipeline_with_its_noise(workshop: Any):
    asked = {"noise_multiplier": 1.5, "clip": 0.5}
    spec = written(
        workshop,
        workshop.new_job(
            request={"privacy": asked},
            defense={"scheduler": {"name": "none"}, "perturbation": {"mode": "none"}},
        ),
    )
    assert spec.privacy is not None
    assert (spec.privacy.noise_multiplier, spec.privacy.clip) == (1.5, 0.5)
