"""Events into trackio; the only file that imports it, run by its path in `logger_worker.py`'s process."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

# Trackio reads it when it is imported.
os.environ["TRACKIO_DIR"] = str(Path(os.environ["FSDP_ASYNC_RUN_DIRECTORY"]) / "trackio")
import trackio


class TrackioRun:
    """One run of trackio, whose database lies below the run's directory."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._troubles: list[str] = []
        warnings.showwarning = self._note
        self._run = trackio.init(
            project=options["project"],
            name=f"{options['name']}-{options['id']}",
            resume="allow",
            config=options["settings"],
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of one event."""
        self._run.log(dict(numbers), step=step)
        self._raise_noted()

    def finish(self, exit_code: int) -> None:
        """Write what is left; trackio does not ask how a run ended."""
        self._run.finish()
        self._raise_noted()

    def _note(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Trackio only warns of what it could not keep, from a thread of its own."""
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))
        if str(message).startswith("trackio"):
            self._troubles.append(str(message))

    def _raise_noted(self) -> None:
        if self._troubles:
            raise OSError(self._troubles[0])


def open_run(options: Mapping[str, Any]) -> TrackioRun:
    """Start the run, or go on with it."""
    return TrackioRun(options)
