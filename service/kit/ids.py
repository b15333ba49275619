"""Identifiers: random where they must not be guessed, sortable where they make a log."""

import secrets
import string
import threading
import time

_ALPHABET = string.ascii_letters + string.digits
_LENGTH = 24
_SEPARATORS = {"ftckpt": "_", "cp": "_", "req": "_"}
_SORTABLE = {"ftevent"}

_lock = threading.Lock()
_last_nanoseconds = 0


def _rising_nanoseconds() -> int:
    """Unix time in nanoseconds, strictly rising within this process."""
    global _last_nanoseconds
    with _lock:
        _last_nanoseconds = max(time.time_ns(), _last_nanoseconds + 1)
        return _last_nanoseconds


def random_text(length: int) -> str:
    """`length` random letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def new_id(kind: str) -> str:
    """A new id such as "ftjob-V9…": `kind`, a separator, 24 characters.

    Ids of kind "ftevent" sort by the time they were made: 16 hexadecimal digits of nanoseconds,
    then 8 random ones.
    """
    separator = _SEPARATORS.get(kind, "-")
    if kind in _SORTABLE:
        return f"{kind}{separator}{_rising_nanoseconds():016x}{secrets.token_hex(4)}"
    return f"{kind}{separator}{random_text(_LENGTH)}"
