"""The artifact store, on a folder and on an fsspec store that is no folder."""

import errno
import hashlib
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.kit.artifacts import ArtifactMissing, ArtifactStore, StorageFull


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "file":
        return ArtifactStore.from_url((tmp_path / "with space").as_uri().replace("%20", " "))
    return ArtifactStore.from_url(f"memory://{uuid.uuid4().hex}/prefix")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    (path / "deep").mkdir(parents=True)
    (path / "a.txt").write_bytes(b"aa")
    (path / "deep" / "b.bin").write_bytes(bytes(range(256)))
    return path


def test_a_stored_stream_comes_back_with_its_size_and_hash(store: ArtifactStore) -> None:
    stored = store.put_stream("files/a", [b"one", b"", b"two"])
    assert stored == (6, hashlib.sha256(b"onetwo").hexdigest())
    assert b"".join(store.iterate("files/a", chunk_bytes=2)) == b"onetwo"
    with store.open("files/a") as handle:
        assert handle.read() == b"onetwo"
    assert store.size("files/a") == 6


def test_a_second_stream_replaces_the_first(store: ArtifactStore) -> None:
    store.put_stream("k", [b"old"])
    store.put_stream("k", [b"new"])
    assert b"".join(store.iterate("k")) == b"new"


def test_nothing_is_visible_before_the_commit(store: ArtifactStore) -> None:
    writer = store.writer("files/a")
    writer.write(b"x")
    assert not store.exists("files/a")
    writer.commit()
    assert store.exists("files/a")


def test_an_error_while_streaming_leaves_nothing(store: ArtifactStore) -> None:
    def broken() -> Iterator[bytes]:
        yield b"x" * 100_000
        raise RuntimeError("the sender failed")

    with pytest.raises(RuntimeError, match="the sender failed"):
        store.put_stream("files/a", broken())
    assert store.list() == []


def test_a_folder_comes_back_file_by_file(
    store: ArtifactStore, folder: Path, tmp_path: Path
) -> None:
    stored = store.put_folder("bundles/one", folder)
    assert stored["a.txt"] == (2, hashlib.sha256(b"aa").hexdigest())
    assert store.list("bundles") == ["bundles/one/a.txt", "bundles/one/deep/b.bin"]
    assert store.list() == store.list("bundles")
    target = tmp_path / "back"
    store.fetch_folder("bundles/one", target)
    assert (target / "a.txt").read_bytes() == b"aa"
    assert (target / "deep" / "b.bin").read_bytes() == bytes(range(256))


def test_a_folder_replaces_what_was_there_on_both_sides(
    store: ArtifactStore, folder: Path, tmp_path: Path
) -> None:
    store.put_folder("b", folder)
    (folder / "a.txt").unlink()
    store.put_folder("b", folder)
    assert store.list("b") == ["b/deep/b.bin"]
    target = tmp_path / "back"
    target.mkdir()
    (target / "stale").write_bytes(b"")
    store.fetch_folder("b", target)
    assert [path.name for path in target.iterdir()] == ["deep"]
    assert not list(tmp_path.glob("back.*"))


def test_deleting_takes_a_file_or_a_whole_folder(store: ArtifactStore, folder: Path) -> None:
    store.put_folder("b/one", folder)
    store.put_stream("b/two", [b"x"])
    store.delete("b/one")
    assert store.list() == ["b/two"]
    store.delete("b/two")
    store.delete("b/never")
    assert store.list() == []
    assert not store.exists("b/two")


def test_a_missing_key_is_an_error_of_its_own(store: ArtifactStore, tmp_path: Path) -> None:
    with pytest.raises(ArtifactMissing):
        store.open("none")
    with pytest.raises(ArtifactMissing):
        store.size("none")
    with pytest.raises(ArtifactMissing):
        store.fetch_folder("none", tmp_path / "x")
    assert store.list("none") == []


def test_an_empty_folder_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no files"):
        store.put_folder("b", tmp_path / "empty")
    assert store.list() == []


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a\\b", "a\0b"])
def test_a_key_cannot_leave_the_store(store: ArtifactStore, key: str) -> None:
    with pytest.raises(ValueError, match="not an artifact key"):
        store.put_stream(key, [b"x"])


def test_the_store_says_whether_it_can_be_written(tmp_path: Path) -> None:
    store = ArtifactStore.from_url((tmp_path / "s").as_uri())
    store.check_writable()
    assert store.list() == []
    (tmp_path / "s").rename(tmp_path / "moved")
    (tmp_path / "s").write_bytes(b"a file where the folder was")
    with pytest.raises(OSError, match=r".+"):
        store.check_writable()


def test_only_drafts_of_dead_writers_are_stale(store: ArtifactStore) -> None:
    store.put_stream("files/a", [b"x"])
    store.writer("files/b").close()
    assert store.remove_stale_drafts(3600) == 0
    assert store.remove_stale_drafts(-1) == 1
    assert store.list() == ["files/a"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with one megabyte."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_an_error_of_its_own_and_leaves_nothing(
    small_disk: Path, tmp_path: Path
) -> None:
    store = ArtifactStore.from_url((small_disk / "store").as_uri())
    with pytest.raises(StorageFull) as caught:
        store.put_stream("files/a", [b"x" * 500_000] * 5)
    assert caught.value.errno == errno.ENOSPC
    big = tmp_path / "big"
    big.mkdir()
    for index in range(5):
        (big / str(index)).write_bytes(b"x" * 500_000)
    with pytest.raises(StorageFull):
        store.put_folder("bundles/b", big)
    assert store.list() == []
    assert store.put_stream("files/a", [b"x" * 500_000]).bytes == 500_000
