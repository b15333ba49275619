"""A bundle on disk: every file is what its manifest says, and the judged adapter is in it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from service.kit.artifacts import Stored

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
REPORT = "report.json"
MANIFEST = "manifest.json"
# Formats that can carry code; a bundle holds weights as safetensors only.
_REFUSED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".py", ".npy"})
_REQUIRED = (ADAPTER, ADAPTER_CONFIG, REPORT)


class BundleDamaged(RuntimeError):
    """The bundle is not what its manifest says; nothing of it may be stored."""


@dataclass(frozen=True)
class Manifest:
    """Names and hashes of a bundle's files, and the hash of the manifest itself."""

    files: Mapping[str, str]
    sha256: str


def read_bundle(folder: Path, required: Sequence[str] = _REQUIRED) -> Manifest:
    """Check every file against manifest.json: all there, none besides, hashes and sizes right.

    Raises BundleDamaged naming the file.
    """
    manifest, sizes = _read_manifest(folder)
    present = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()
    } - {MANIFEST}
    for name in sorted(present ^ manifest.files.keys()):
        where = "is not in the manifest" if name in present else "is missing"
        raise BundleDamaged(f"{name} {where}")
    for name in required:
        if name not in manifest.files:
            raise BundleDamaged(f"{name} is missing")
    for name in manifest.files:
        _check_file(folder, name, manifest, sizes)
    return manifest


def read_part(folder: Path, names: Sequence[str], sha256: str | None) -> Manifest:
    """Check some files of a bundle against its manifest, and that against its own hash (None: not
    known). Raises BundleDamaged naming the file."""
    manifest, sizes = _read_manifest(folder)
    if sha256 is not None and manifest.sha256 != sha256:
        raise BundleDamaged(f"{MANIFEST} is not the one that was released")
    for name in names:
        if name not in manifest.files:
            raise BundleDamaged(f"{name} is missing")
        _check_file(folder, name, manifest, sizes)
    return manifest


def _read_manifest(folder: Path) -> tuple[Manifest, dict[str, int]]:
    try:
        raw = (folder / MANIFEST).read_bytes()
        listed = json.loads(raw)["files"]
        files = {str(name): str(item["sha256"]) for name, item in listed.items()}
        sizes = {str(name): int(item["bytes"]) for name, item in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleDamaged(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    return Manifest(files, hashlib.sha256(raw).hexdigest()), sizes


def _check_file(folder: Path, name: str, manifest: Manifest, sizes: Mapping[str, int]) -> None:
    path = folder / name
    if path.is_symlink() or PurePosixPath(name).suffix.lower() in _REFUSED_SUFFIXES:
        raise BundleDamaged(f"{name} is of a kind that is never released")
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != manifest.files[name] or path.stat().st_size != sizes[name]:
        raise BundleDamaged(f"{name} does not match its hash")


def check_stored(stored: Mapping[str, Stored], manifest: Manifest) -> None:
    """Raises BundleDamaged when a file changed between its check and its copy."""
    for name, sha256 in manifest.files.items():
        if name not in stored or stored[name].sha256 != sha256:
            raise BundleDamaged(f"{name} changed while it was stored")


def check_judged(folder: Path, manifest: Manifest, verdict: str) -> None:
    """Raises BundleDamaged unless the report in the bundle is about the adapter in the bundle, and
    holds the verdict that decides over its release."""
    try:
        report = json.loads((folder / REPORT).read_text("utf-8"))
        judged, decided = report["artifact"]["adapter_sha256"], report["gate"]["verdict"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleDamaged(
            f"{REPORT} names no adapter or no verdict ({type(error).__name__})"
        ) from error
    if judged != manifest.files.get(ADAPTER):
        raise BundleDamaged(f"{ADAPTER} is not the adapter that the gate judged")
    if decided != verdict:
        raise BundleDamaged(f"the verdict is {verdict}, but {REPORT} says {decided}")
