"""The one clock of the gateway."""

import time


def now() -> float:
    """Unix time in seconds."""
    return time.time()
