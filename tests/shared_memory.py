"""Which shared memory a process holds; other tests may hold some at the same time."""

from __future__ import annotations

import re
from pathlib import Path


def segments_of(pid="self"):
    """Files of the shared-memory segments that the process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {Path(name) for name in re.findall(r"/dev/shm/psm_\w+", maps)}


def left(segments):
    """Those of `segments` that still exist."""
    return sorted(path.name for path in segments if path.exists())
