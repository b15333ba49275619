"""What a job's report guarantees about the privacy of its rows."""

from collections.abc import Mapping
from typing import Any

from service.kit.errors import ApiError
from service.store.models import Job


def guarantee(report: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """The report's block `privacy`, with the hash of the adapter that it is about.

    Raises ApiError 400 `no_privacy_guarantee` for a job that was tuned without privacy: noise
    cannot be added to what an adapter has learned already.
    """
    block = report.get("privacy")
    if block is None:
        raise ApiError(
            400,
            f"Job {job.id} was tuned without privacy, and there is no guarantee to be had "
            "afterwards. Create it again with 'privacy'.",
            "no_privacy_guarantee",
            "id",
        )
    artifact = report.get("artifact") or {}
    return {
        "job_id": job.id,
        "adapter_sha256": artifact.get("adapter_sha256"),
        "privacy": block,
    }
