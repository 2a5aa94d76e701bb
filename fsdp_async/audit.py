"""Evidence beside the ledger: who made a sample, who consumed it, and what was going on.

Owns three small files that trust nobody's counts: the engine's own log of the groups that it finished, the trainer's of
those that it trained on, and the phase in hand, readable after the process was killed in it (`tests/chaos.py` joins
them).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fsdp_async.files import write_bytes
from fsdp_async.types import ResponseGroup

PRODUCED, CONSUMED, PHASE = "produced.jsonl", "consumed.jsonl", "phase"
PHASE_BYTES = 32


class GroupLog:
    """Appends one line a call, whole or (where the process dies in it) torn; the file follows its directory."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def append(self, step: int | None, groups: Iterable[ResponseGroup]) -> None:
        """Keep the identities of `groups`, and the step that consumed them."""
        line = {"step": step, "samples": [list(sample) for group in groups for sample in group.sample_ids]}
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Whole lines; a torn one, of a process that died in it, is left out."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def rewind_log(path: Path, step: int) -> None:
    """Forget what was consumed after `step`: it is relative to weights that are gone, and consumed again.

    Raises:
        OutputError: the file could not be written; it is as it was.
    """
    if path.exists():
        kept = [line for line in read_log(path) if line["step"] <= step]
        write_bytes(path, b"".join((json.dumps(line) + "\n").encode() for line in kept))


def phase_announcer(path: Path) -> Callable[[str], None]:
    """Writes the name of a phase to `path`, in place; some microseconds a call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)

    def announce(name: str) -> None:
        os.pwrite(descriptor, name.encode().ljust(PHASE_BYTES), 0)

    return announce
