"""Which shared memory a process holds; other tests may hold some at the same time."""

from __future__ import annotations

import re
from pathlib import Path


def blocks_of(pid="self"):
    """The shared blocks that a process has mapped; none for one that has ended."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return re.findall(r"/memfd:fsdp_async|/dev/shm/psm_\w+", maps)


def named_segments():
    """Segments in /dev/shm, which outlive a process that is killed."""
    return {path.name for path in Path("/dev/shm").glob("psm_*")}
