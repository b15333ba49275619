"""Where converted models and baselines are kept between jobs."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """TUNEGATE_CACHE_DIR, else a folder in the user's cache home."""
    explicit = os.environ.get("TUNEGATE_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser().resolve()
    home = os.environ.get("XDG_CACHE_HOME")
    root = Path(home).expanduser() if home else Path.home() / ".cache"
    return root / "tunegate"
