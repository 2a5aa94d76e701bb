"""Events into Weights & Biases; the only file that imports it, run by its path in `logger_worker.py`'s process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

INIT_TIMEOUT_S = 30


class WandbRun:
    """One run of W&B, whose files lie below the run's directory."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        settings = wandb.Settings(
            silent=True, console="off", disable_code=True, x_disable_stats=True, init_timeout=INIT_TIMEOUT_S
        )
        self._run = wandb.init(
            project=options["project"],
            name=options["name"],
            id=options["id"],
            resume="allow",
            mode=options["mode"],
            dir=options["directory"],
            config=options["settings"],
            settings=settings,
        )
        # Its own counter must grow; ours goes back where a run is resumed.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of one event."""
        self._run.log({"step": step, **numbers})

    def finish(self, exit_code: int) -> None:
        """Write, or send, what is left; other codes than 0 are a run that failed."""
        self._run.finish(exit_code=exit_code)


def open_run(options: Mapping[str, Any]) -> WandbRun:
    """Start the run, or go on with it."""
    return WandbRun(options)
