"""Where this machine keeps what can be had again: the cache folder."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """SEMIX_CACHE, or ~/.cache/semix; it need not be there yet, and may be removed at any time."""
    return Path(os.environ.get("SEMIX_CACHE") or "~/.cache/semix").expanduser()
