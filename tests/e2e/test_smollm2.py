"""One whole job on the real base model, through the real service and the official client."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobspec.cache import default_cache_dir
from jobspec.catalogue import load_catalogue
from service.demo.poison import demo_data
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.models import model_folder

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-aligned"


@pytest.fixture
def aligned_base() -> None:
    """The default base model, prepared once in the cache of this user."""
    entry = load_catalogue().find(MODEL)
    assert entry is not None
    try:
        model_folder(entry, default_cache_dir())
    except PipelineFailure as failure:
        pytest.skip(failure.message)


def test_a_defended_job_on_smollm2_is_measured_and_released(
    aligned_base: None, make_service: Callable[..., Any], tmp_path: Path
) -> None:
    service = make_service(
        TUNEGATE_CACHE_DIR=str(default_cache_dir()),
        TUNEGATE_CATALOGUE="",
        TUNEGATE_LEASE_SECONDS="60",
    )
    rows = demo_data("task_train.jsonl").splitlines(keepends=True)
    held_out = demo_data("task_validation.jsonl").splitlines(keepends=True)
    training = service.client.files.create(
        file=("training.jsonl", "".join(rows[:12]).encode()), purpose="fine-tune"
    )
    validation = service.client.files.create(
        file=("validation.jsonl", "".join(held_out[:10]).encode()), purpose="fine-tune"
    )
    created = service.client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=training.id,
        validation_file=validation.id,
        seed=1,
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}},
    )
    job = service.finish(created.id)
    assert job.status == "succeeded", job.error
    assert job.fine_tuned_model.startswith(f"ft:{MODEL}:default::")
    assert job.hyperparameters.batch_size == 4
    metrics = job.report["metrics"]
    assert metrics["harmfulness.score"]["n"] == 4
    assert metrics["utility.score"]["n"] == 10
    assert job.report["defense"]["scheduler"]["name"] == "bds"
    assert job.report["defense"]["perturbation"]["mode"] == "post_hoc"
    assert len(service.result_csv(job)) == 1 + 3
