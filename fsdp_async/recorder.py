"""What a run leaves behind.

Owns `metrics.jsonl`, `summary.json` and the recorded batches of one run directory, and keeps the events in memory
that the summary is computed from. Files that matter are whole or absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp_async.files import write_json, write_tensors
from fsdp_async.loggers import Loggers
from fsdp_async.run_dir import RunDirectory
from fsdp_async.summary import summarize

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


class Recorder:
    """Observer of one run; promotes its directory once the first step has been taken."""

    def __init__(self, directory: RunDirectory, loggers: Loggers, *, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        self._directory = directory
        self._loggers = loggers
        self._events: list[Mapping[str, Any]] = list(earlier)
        if self._events:
            loggers.settle(directory.path)

    @property
    def num_events(self) -> int:
        """Lines of `metrics.jsonl`."""
        return len(self._events)

    @property
    def directory(self) -> Path:
        """Where the run writes now."""
        return self._directory.path

    def observe(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Log an event; after the first training step the run takes its place."""
        self._events.append({"event": event, "step": step, **values})
        self._loggers.log(event, step, values)
        if event == "step" and step == 1:
            self._directory.promote()
            self._loggers.settle(self._directory.path)

    def record_batch(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of one step to `batches/step_NNNNNN.safetensors`."""
        write_tensors(self._directory.path / "batches" / f"step_{step:06d}.safetensors", tensors)

    def finish(self) -> dict[str, Any]:
        """Write and return the summary of what happened so far."""
        summary = summarize(self._events)
        write_json(self._directory.path / SUMMARY, summary)
        return summary
