"""What a person sees while a run trains.

Owns the live view (a progress bar, and below it the numbers that matter), quiet when the output is no terminal. It
observes events and decides nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fsdp_async.errors import OutputError


class Output(Console):
    """Standard output, whose reader may go away."""

    def on_broken_pipe(self) -> None:
        """Say so, where rich would end the process without a word.

        Raises:
            OutputError: always.
        """
        try:
            super().on_broken_pipe()  # keeps Python from complaining once more when it flushes at exit
        except SystemExit:
            raise OutputError(errno.EPIPE, "stdout was closed by its reader, so nobody sees what happens") from None


class Terminal:
    """Prints the plan, shows progress, prints the summary. Use as a context manager."""

    def __init__(self, num_batches: int, *, console: Console | None = None, is_live: bool = True) -> None:
        self.console = console or Output()
        self._num_batches = num_batches
        self._is_live = is_live and self.console.is_terminal
        self._accuracy: float | None = None
        self._training_start_s = 0.0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("warm start", total=None)
        self._numbers = Text()
        self._live = Live(Group(self._progress, self._numbers), console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    def plan(self, lines: Sequence[str]) -> None:
        """Print the effective plan, one sentence a line."""
        for line in lines:
            name, _, text = line.partition(": ")
            self.console.print(Text.assemble((name, "bold"), ": ", text), soft_wrap=True)

    def warm_start(self, step: int, loss: float) -> None:
        """Show a supervised step."""
        self._progress.update(self._task, completed=step + 1)
        self._numbers.plain = f"loss {loss:.3f}"

    def observe(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Show a trainer event."""
        if event == "publication" and step == 0:
            self._training_start_s = values["time_s"]
        if event == "evaluation":
            self._accuracy = values["accuracy"]
        if event == "step":
            self._progress.update(self._task, description="training", total=self._num_batches, completed=step)
            seconds = values["time_s"] - self._training_start_s
            self._numbers.plain = step_numbers(values, self._accuracy, seconds)

    def finished(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        """Print what the run ended with and where it lies."""
        self._stop()
        for key, value in summary.items():
            shown = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else value
            self.console.print(Text(f"  {key:36s} {shown}"))
        where = (
            "nothing was kept: the run ended before its first step" if directory is None else f"results: {directory}"
        )
        self.console.print(Text(where), soft_wrap=True)

    def _stop(self) -> None:
        if self._live.is_started:
            self._live.stop()


def step_numbers(values: Mapping[str, Any], accuracy: float | None, seconds: float) -> str:
    """The numbers that matter of one step, in two lines; `seconds` is how long training has gone on."""
    ledger = values["ledger"]
    rate = ledger["consumed"] / seconds if seconds > 0 else 0.0
    staleness = values["staleness_total"] / max(1, values["num_tokens"])
    factors = {name: total / count for name, (total, count) in values["factors"].items() if count}
    divergences = ", ".join(f"{name.removesuffix('_kl_k3')} {value:.1e}" for name, value in factors.items())
    return (
        f"version {values['version']}, accuracy {'-' if accuracy is None else f'{accuracy:.3f}'}, "
        f"reward {values['reward_mean']:.3f}, staleness {staleness:.2f}\n"
        f"queued {ledger['queued']}, in flight {ledger['in_flight']}, {rate:.0f} samples/s, KL (k3): {divergences}"
    )
