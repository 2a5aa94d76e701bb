"""Events into trackio; the only file that imports it, run by its path in `logger_worker.py`'s process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Trackio reads it when it is imported.
os.environ["TRACKIO_DIR"] = str(Path(os.environ["FSDP_ASYNC_RUN_DIRECTORY"]) / "trackio")
import trackio


class TrackioRun:
    """One run of trackio, whose database lies below the run's directory."""

    def __init__(self, options: Mapping[str, Any]) -> None:
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

    def finish(self) -> None:
        """Write what is left."""
        self._run.finish()


def open_run(options: Mapping[str, Any]) -> TrackioRun:
    """Start the run, or go on with it."""
    return TrackioRun(options)
