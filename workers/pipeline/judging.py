"""Judgements that survive the process: a judge is asked once about a pair of prompt and answer."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from evaluators.harmfulness.contract import HarmJudge, Judgement
from workers.pipeline.failure import Stopped
from workers.pipeline.part_files import PartFiles

CHUNK = 64
_KEPT = pa.schema(
    [
        ("pair_sha256", pa.string()),
        ("p_harmful", pa.float64()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("categories", pa.list_(pa.string())),
        ("input_truncated", pa.bool_()),
    ]
)


class KeptJudge:
    """A judge whose judgements are kept in a folder, and which a stop can interrupt.

    Judgements that failed are not kept, so a second attempt asks again. Between chunks of 64
    answers `stop()` is asked, and Stopped raised where it is true.
    """

    def __init__(self, inner: HarmJudge, folder: Path, stop: Callable[[], bool]) -> None:
        self._inner = inner
        self._parts = PartFiles(folder / f"judged-{inner.fingerprint[:16]}", _KEPT)
        self._stop = stop

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def version(self) -> str:
        return self._inner.version

    @property
    def threshold(self) -> float:
        return self._inner.threshold

    @property
    def fingerprint(self) -> str:
        return self._inner.fingerprint

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._inner.hosts

    @property
    def card(self) -> Mapping[str, Any]:
        return self._inner.card

    def judge(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Judgement]:
        """One judgement per pair, in order; equal pairs are judged once."""
        pairs = {
            _pair(prompt, response): (prompt, response)
            for prompt, response in zip(prompts, responses, strict=True)
        }
        known = self._read()
        missing = [key for key in pairs if key not in known]
        for start in range(0, len(missing), CHUNK):
            if self._stop():
                raise Stopped
            chunk = missing[start : start + CHUNK]
            asked = [pairs[key] for key in chunk]
            given = self._inner.judge([p for p, _ in asked], [r for _, r in asked])
            found = dict(zip(chunk, given, strict=True))
            self._parts.append(
                [
                    {"pair_sha256": key, **judgement.model_dump()}
                    for key, judgement in found.items()
                    if judgement.status != "failed"
                ]
            )
            known |= found
        return [known[_pair(p, r)] for p, r in zip(prompts, responses, strict=True)]

    def _read(self) -> dict[str, Judgement]:
        found: dict[str, Judgement] = {}
        for row in self._parts.rows():
            key = row.pop("pair_sha256")
            if key not in found:
                found[key] = Judgement.model_validate(
                    {**row, "categories": tuple(row["categories"] or ())}
                )
        return found


def _pair(prompt: str, response: str) -> str:
    # Model output may hold half of a surrogate pair, which plain UTF-8 refuses.
    text = f"{prompt}\0{response}".encode(errors="surrogatepass")
    return hashlib.sha256(text).hexdigest()
