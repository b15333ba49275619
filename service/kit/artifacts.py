"""The artifact store: whole files by key, over any fsspec file system.

Everything is written under a temporary key first and renamed when complete, so a reader never
sees half a file and an error leaves nothing behind.
"""

import errno
import hashlib
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Self, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

CHUNK_BYTES = 1024 * 1024
PARTIAL = "partial"


class StorageFull(OSError):
    """The artifact store has no room left; free space or enlarge it, then try again."""


class ArtifactMissing(FileNotFoundError):
    """No such key in the artifact store."""


class Stored(NamedTuple):
    """What was written."""

    bytes: int
    sha256: str


def _as_storage_error(error: OSError) -> OSError:
    if isinstance(error, StorageFull) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return StorageFull(error.errno, "the artifact store is full")


class ArtifactWriter:
    """One file being written. `commit` makes it visible; otherwise `abort` removes every trace."""

    def __init__(self, store: "ArtifactStore", key: str) -> None:
        self._store = store
        self._key = key
        self._draft = f"{PARTIAL}/{uuid.uuid4().hex}"
        self._digest = hashlib.sha256()
        self._size = 0
        try:
            self._handle = store._open(self._draft, "wb")
        except OSError as error:
            raise _as_storage_error(error) from error

    def write(self, chunk: bytes) -> None:
        """Append `chunk`. Raises StorageFull."""
        try:
            self._handle.write(chunk)
        except OSError as error:
            raise _as_storage_error(error) from error
        self._digest.update(chunk)
        self._size += len(chunk)

    def close(self) -> Stored:
        """End writing; the draft can then be read with `draft()`. Raises StorageFull."""
        try:
            self._handle.close()
        except OSError as error:
            raise _as_storage_error(error) from error
        return Stored(self._size, self._digest.hexdigest())

    def draft(self) -> IO[bytes]:
        """The closed draft, to be checked before it is committed."""
        return self._store._open(self._draft, "rb")

    def commit(self) -> Stored:
        """Close and publish under the key."""
        stored = self.close()
        self._store._rename(self._draft, self._key)
        return stored

    def abort(self) -> None:
        """Remove the draft, whatever state it is in."""
        with suppress(OSError):
            self._handle.close()
        self._store.delete(self._draft)


class ArtifactStore:
    """Files and folders by key ("files/abc"), below one URL."""

    def __init__(self, file_system: Any, root: str) -> None:
        self._fs = file_system
        self._root = root.rstrip("/")

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The store at an fsspec URL: file:///folder, s3://bucket/prefix, memory://…"""
        file_system, root = fsspec.core.url_to_fs(url)
        if isinstance(file_system, LocalFileSystem):
            file_system.auto_mkdir = True
            Path(root).mkdir(parents=True, exist_ok=True)
        return cls(file_system, root)

    def _path(self, key: str) -> str:
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or "\\" in key or "\0" in key or ".." in parts:
            raise ValueError(f"not an artifact key: {key!r}")
        return f"{self._root}/{key}"

    def _open(self, key: str, mode: str) -> IO[bytes]:
        try:
            return cast(IO[bytes], self._fs.open(self._path(key), mode))
        except FileNotFoundError as error:
            raise ArtifactMissing(f"no artifact {key}") from error

    def _rename(self, source: str, target: str) -> None:
        path = self._path(target)
        try:
            if isinstance(self._fs, LocalFileSystem):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(self._path(source)).replace(path)
            else:
                self._fs.mv(self._path(source), path, recursive=self._fs.isdir(self._path(source)))
        except OSError as error:
            raise _as_storage_error(error) from error

    def writer(self, key: str) -> ArtifactWriter:
        """Start writing `key` piece by piece."""
        self._path(key)
        return ArtifactWriter(self, key)

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> Stored:
        """Write one file. Raises StorageFull; after any error nothing is left of it."""
        writer = self.writer(key)
        try:
            for chunk in chunks:
                writer.write(chunk)
            return writer.commit()
        except BaseException:
            writer.abort()
            raise

    def put_folder(self, key: str, local_dir: Path) -> dict[str, Stored]:
        """Replace the folder `key` by the files of `local_dir`; returns them by relative name.

        The files are first complete under a temporary key. Raises StorageFull; after any error
        nothing is left of the new folder.
        """
        self._path(key)
        draft = f"{PARTIAL}/{uuid.uuid4().hex}"
        stored: dict[str, Stored] = {}
        try:
            for path in sorted(item for item in local_dir.rglob("*") if item.is_file()):
                name = path.relative_to(local_dir).as_posix()
                with path.open("rb") as handle:
                    stored[name] = self.put_stream(f"{draft}/{name}", _chunks(handle))
            if not stored:
                raise FileNotFoundError(f"nothing to store: {local_dir.name} has no files")
            self.delete(key)
            self._rename(draft, key)
        except BaseException:
            self.delete(draft)
            raise
        return stored

    def fetch_folder(self, key: str, local_dir: Path) -> None:
        """Replace `local_dir` by a copy of the folder `key`. Raises ArtifactMissing."""
        names = self.list(key)
        if not names:
            raise ArtifactMissing(f"no artifact {key}")
        draft = local_dir.with_name(f"{local_dir.name}.{uuid.uuid4().hex}")
        try:
            for name in names:
                target = draft / PurePosixPath(name).relative_to(key)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as handle:
                    for chunk in self.iterate(name):
                        handle.write(chunk)
            if local_dir.exists():
                shutil.rmtree(local_dir)
            draft.rename(local_dir)
        except OSError as error:
            raise _as_storage_error(error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def open(self, key: str) -> IO[bytes]:
        """The file `key`, for reading. Raises ArtifactMissing."""
        return self._open(key, "rb")

    def iterate(self, key: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The bytes of `key`, in pieces. Raises ArtifactMissing."""
        with self.open(key) as handle:
            yield from _chunks(handle, chunk_bytes)

    def exists(self, key: str) -> bool:
        """Whether `key` is a file, or a folder with files."""
        return bool(self._fs.exists(self._path(key)))

    def size(self, key: str) -> int:
        """Bytes of the file `key`. Raises ArtifactMissing."""
        try:
            return int(self._fs.size(self._path(key)))
        except FileNotFoundError as error:
            raise ArtifactMissing(f"no artifact {key}") from error

    def list(self, prefix: str = "") -> list[str]:
        """Keys of all files below the folder `prefix`, sorted."""
        path = self._path(prefix) if prefix else self._root
        self._fs.invalidate_cache()
        found = self._fs.find(path)
        base = self._fs._strip_protocol(self._root).rstrip("/") + "/"
        return sorted(str(item)[len(base) :] for item in found if str(item) != path)

    def delete(self, prefix: str) -> None:
        """Remove a file or a folder; one that is not there is no error."""
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(prefix), recursive=True)
        self._fs.invalidate_cache()

    def remove_stale_drafts(self, age_seconds: float) -> int:
        """Remove drafts of writers that died more than `age_seconds` ago; returns how many."""
        oldest = datetime.now(UTC) - timedelta(seconds=age_seconds)
        stale = [key for key in self.list(PARTIAL) if self._fs.modified(self._path(key)) < oldest]
        for key in stale:
            self.delete(key)
        return len(stale)

    def check_writable(self) -> None:
        """Write and remove a small file. Raises OSError when the store cannot be written."""
        key = f"{PARTIAL}/probe-{uuid.uuid4().hex}"
        self.put_stream(key, [b"ok"])
        self.delete(key)


def _chunks(handle: IO[bytes], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    while chunk := handle.read(chunk_bytes):
        yield chunk
