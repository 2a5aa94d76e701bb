"""The files of one run, on the rank that writes them.

Owns the order in which they come to be: the lock and the directory, the record, the metrics (cut back to where a
resumed run goes on) and the summary.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdp_async.checkpoint import CHECKPOINTS, remove_leavings
from fsdp_async.config import Config
from fsdp_async.files import write_json
from fsdp_async.loggers import Loggers, rewind_jsonl
from fsdp_async.recorder import METRICS, Recorder
from fsdp_async.resume import Resumption, goes_on_in_place
from fsdp_async.run_dir import RECORD, RunDirectory, run_record


class RunFiles:
    """Taken down with `stack`."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self._config = config
        self._stack = stack
        self._directory: RunDirectory | None = None
        self.recorder: Recorder | None = None

    @property
    def directory(self) -> Path:
        """Where the run writes now."""
        assert self._directory is not None, "lock() comes first"
        return self._directory.path

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints lie."""
        return self.directory / CHECKPOINTS

    @property
    def are_kept(self) -> bool:
        """Whether they stay when the run has ended."""
        return self._directory is not None and self._directory.is_kept

    def lock(self) -> None:
        """Hold the directory.

        Raises:
            RunDirectoryError, OutputError: it cannot be had.
        """
        run, in_place = self._config.run, goes_on_in_place(self._config)
        # A run that ended before its first checkpoint has nothing to go on from; what it left is kept aside.
        overwrite = run.overwrite or (run.resume == "auto" and not in_place)
        directory = RunDirectory(Path(run.output_dir), overwrite=overwrite, resume=in_place)
        self._directory = self._stack.enter_context(directory)

    def begin(self, plan_lines: list[str], resumption: Resumption | None) -> None:
        """Write the record, and bring the metrics to where the run goes on."""
        record = run_record(
            dataclasses.asdict(self._config), seeds={"run": self._config.run.seed}, plan_lines=plan_lines
        )
        step, earlier = None, []
        if resumption is not None:
            step, earlier = resumption.step, self._earlier_events(resumption)
            record["resumed"] = [*self._earlier_resumptions(), _entry(resumption)]
        write_json(self.directory / RECORD, record)
        remove_leavings(self.checkpoints)
        loggers = self._stack.enter_context(
            Loggers(self._config.logging, self.directory, resumed_from=step, settings=record["config"])
        )
        self.recorder = Recorder(self._directory_held, loggers, earlier=earlier)

    def finish(self) -> dict[str, Any]:
        """Write and return the summary."""
        assert self.recorder is not None, "begin() comes first"
        return self.recorder.finish()

    @property
    def _directory_held(self) -> RunDirectory:
        assert self._directory is not None
        return self._directory

    def _earlier_events(self, resumption: Resumption) -> list[dict[str, Any]]:
        """Events up to the checkpoint. What was done after it is done again; its events move to another file."""
        num = int(resumption.state["num_events"])
        mine = self.directory / METRICS
        theirs = resumption.path.parent.parent / METRICS
        if not mine.exists() and theirs.exists():
            mine.write_bytes(b"".join(theirs.read_bytes().splitlines(keepends=True)[:num]))
        return rewind_jsonl(mine, num)

    def _earlier_resumptions(self) -> list[dict[str, Any]]:
        path = self.directory / RECORD
        if not path.exists():
            return []
        earlier: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")).get("resumed", [])
        return earlier


def _entry(resumption: Resumption) -> dict[str, Any]:
    return {
        "after_step": resumption.step,
        "from": str(resumption.path),
        "changed": list(resumption.changes),
        "at": datetime.now(UTC).isoformat(),
    }
