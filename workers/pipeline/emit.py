"""The pipeline's voice: one JSON object a line, and nothing else, on the stream it was given."""

import json
import math
from typing import Any, Protocol, TextIO


class Emit(Protocol):
    """Send one event."""

    def __call__(self, event: str, **fields: Any) -> None: ...


class JsonLines:
    """Writes events as JSON lines, flushed one by one; NaN and infinities become null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **_finite(fields)}, ensure_ascii=True, allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
