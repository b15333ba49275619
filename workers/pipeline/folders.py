"""Folders that are either complete or absent: write aside, flush, rename; one writer at a time."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if absent); other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def write_folder(target: Path, fill: Callable[[Path], object]) -> None:
    """Make `target` from what `fill` writes into a temporary folder beside it, then rename.

    An error or a crash leaves no `target`; an existing one is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fill(aside)
        for path in aside.rglob("*"):
            if path.is_file():
                _flush(path)
        _flush(aside)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            target.rename(old / target.name)
            aside.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            aside.rename(target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def cached_folder(target: Path, fill: Callable[[Path], object]) -> Path:
    """`target`, made by `fill` if it is not there yet; concurrent callers make it once."""
    if not target.is_dir():
        with file_lock(target.parent / f".{target.name}.lock"):
            for stale in target.parent.glob(f".{target.name}-*"):
                shutil.rmtree(stale, ignore_errors=True)
            if not target.is_dir():
                write_folder(target, fill)
    return target


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
