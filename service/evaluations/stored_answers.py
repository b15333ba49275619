"""Answers to open questions of released models, read from their bundles and kept for a while."""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from service.kit.artifacts import ArtifactMissing, ArtifactStore
from service.store.models import ReleasedModel

if TYPE_CHECKING:
    from evaluators.diversity.store import StoredAnswers

MAX_FILE_BYTES = 32 * 1024 * 1024
KEPT_BYTES = 64 * 1024 * 1024


class AnswersUnavailable(Exception):
    """A model whose answers cannot be compared; the message is the reason."""


class AnswersCache:
    """Parsed files by the hash of the bundle's manifest, which names every byte of the bundle. The
    least recently used go when their files have more than `limit` bytes together."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[StoredAnswers, int]] = OrderedDict()

    def get(self, key: str) -> "StoredAnswers | None":
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: str, answers: "StoredAnswers", size: int) -> None:
        with self._lock:
            self._kept[key] = (answers, size)
            while sum(size for _, size in self._kept.values()) > self._limit:
                self._kept.popitem(last=False)


def stored_answers(
    artifacts: ArtifactStore, row: ReleasedModel, cache: AnswersCache
) -> "StoredAnswers":
    """The answers in a released model's bundle. Raises AnswersUnavailable."""
    from evaluators.diversity.store import ANSWERS, AnswersDamagedError, read_answers

    found = cache.get(row.manifest_sha256)
    if found is not None:
        return found
    key = f"{row.location}/{ANSWERS}"
    try:
        size = artifacts.size(key)
        if size > MAX_FILE_BYTES:
            raise AnswersUnavailable(f"its stored answers have more than {MAX_FILE_BYTES:,} bytes")
        found = read_answers(b"".join(artifacts.iterate(key)))
    except ArtifactMissing:
        raise AnswersUnavailable("no answers to open questions are stored with it") from None
    except AnswersDamagedError as error:
        raise AnswersUnavailable(f"its stored answers cannot be read: {error}") from error
    cache.put(row.manifest_sha256, found, size)
    return found
