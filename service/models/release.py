"""Releasing a model: the rows that make a stored bundle one, and the way out of quarantine.

The gate's pass (in a worker) and two reviewers (in the gateway) both end in `release`.
"""

import hashlib
from typing import NamedTuple

import orjson
from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from service.fine_tuning.repository import append_event
from service.kit.artifacts import ArtifactMissing, ArtifactStore
from service.kit.clock import now
from service.models.naming import model_name
from service.store.models import Job, Organization, ReleasedModel

ADAPTER = "adapter_model.safetensors"
REPORT = "report.json"
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 16 * 1024 * 1024


class BundleChanged(RuntimeError):
    """A stored bundle is not what was judged; nothing of it may be released."""


class Copied(NamedTuple):
    """A bundle under its new key, and the hash of its manifest."""

    location: str
    manifest_sha256: str


def release(session: Session, job: Job, location: str, manifest_sha256: str) -> str:
    """Make the bundle at `location` the job's released model; returns the model's name. The job's
    status is the caller's to move."""
    organization = session.get_one(Organization, job.organization_id)
    name = model_name(job.model, organization.name, job.suffix)
    session.add(
        ReleasedModel(
            id=name,
            organization_id=job.organization_id,
            job_id=job.id,
            base_model=job.model,
            location=location,
            manifest_sha256=manifest_sha256,
            created_at=int(now()),
        )
    )
    job.artifact = location
    job.fine_tuned_model = name
    append_event(session, job.id, "info", f"New fine-tuned model created: {name}")
    return name


def is_released(session: Session, location: str) -> bool:
    """Whether a model, deleted or not, names the bundle at `location`."""
    statement = select(exists().where(ReleasedModel.location == location))
    return bool(session.scalar(statement))


def copy_judged(artifacts: ArtifactStore, job: Job, target: str) -> Copied:
    """Copy the job's bundle to the key `target` and prove on the way that it is what was judged.

    Every file has the hash of the manifest and none is besides; the report in it is about the
    adapter in it, and holds the decision that the job's row holds. Raises BundleChanged, and
    StorageFull; what was copied by then is the caller's to remove.
    """
    source = job.artifact
    if source is None:
        raise BundleChanged("the job has no stored bundle")
    manifest = _read(artifacts, f"{source}/{MANIFEST}")
    try:
        files = {
            str(name): (str(item["sha256"]), int(item["bytes"]))
            for name, item in orjson.loads(manifest)["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleChanged(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    present = {key.removeprefix(f"{source}/") for key in artifacts.list(source)} - {MANIFEST}
    for name in sorted(present ^ files.keys()):
        where = "is not in the manifest" if name in present else "is missing"
        raise BundleChanged(f"{name} {where}")
    _check_report(job, _read(artifacts, f"{source}/{REPORT}"), files.get(ADAPTER, ("", 0))[0])
    for name, expected in files.items():
        stored = artifacts.put_stream(f"{target}/{name}", artifacts.iterate(f"{source}/{name}"))
        if (stored.sha256, stored.bytes) != expected:
            raise BundleChanged(f"{name} does not match its hash")
    artifacts.put_stream(f"{target}/{MANIFEST}", [manifest])
    return Copied(target, hashlib.sha256(manifest).hexdigest())


def _check_report(job: Job, content: bytes, adapter_sha256: str) -> None:
    known = job.report or {}
    try:
        report = orjson.loads(content)
        judged = str(report["artifact"]["adapter_sha256"])
        decision = report["gate"]
    except (ValueError, KeyError, TypeError) as error:
        raise BundleChanged(f"{REPORT} cannot be read ({type(error).__name__})") from error
    if judged != adapter_sha256 or judged != (known.get("artifact") or {}).get(
        "adapter_sha256", judged
    ):
        raise BundleChanged(f"{ADAPTER} is not the adapter that the gate judged")
    if decision != known.get("gate"):
        raise BundleChanged(f"{REPORT} does not hold the decision that was taken")


def _read(artifacts: ArtifactStore, key: str) -> bytes:
    try:
        with artifacts.open(key) as stream:
            content = stream.read(MAX_JSON_BYTES + 1)
    except ArtifactMissing as error:
        raise BundleChanged(f"{key.rpartition('/')[2]} is missing") from error
    if len(content) > MAX_JSON_BYTES:
        raise BundleChanged(f"{key.rpartition('/')[2]} is larger than {MAX_JSON_BYTES} bytes")
    return content
