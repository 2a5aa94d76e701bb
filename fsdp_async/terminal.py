"""What a person sees while a run trains.

Owns the live view (a progress bar with the numbers that matter), quiet when the output is no terminal. It observes
events and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Terminal:
    """Prints the plan, shows progress, prints the summary. Use as a context manager."""

    def __init__(self, num_batches: int, *, console: Console | None = None) -> None:
        self.console = console or Console()
        self._num_batches = num_batches
        self._accuracy: float | None = None
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("warm start", total=None, numbers="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def plan(self, lines: Sequence[str]) -> None:
        """Print the effective plan, one sentence a line."""
        for line in lines:
            name, _, text = line.partition(": ")
            self.console.print(f"[bold]{name}[/bold]: {text}", highlight=False, soft_wrap=True)

    def warm_start(self, step: int, loss: float) -> None:
        """Show a supervised step."""
        self._progress.update(self._task, completed=step + 1, numbers=f"loss {loss:.3f}")

    def observe(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Show a trainer event."""
        if event == "evaluation":
            self._accuracy = values["accuracy"]
        if event == "step":
            self._progress.update(
                self._task,
                description="training",
                total=self._num_batches,
                completed=step,
                numbers=step_numbers(step, values, self._accuracy),
            )

    def summary(self, summary: Mapping[str, Any], directory: str) -> None:
        """Print what the run ended with and where it lies."""
        for key, value in summary.items():
            shown = f"{value:.6g}" if isinstance(value, float) else value
            self.console.print(f"  {key:36s} {shown}", highlight=False)
        self.console.print(f"results: {directory}", highlight=False, soft_wrap=True)


def step_numbers(step: int, values: Mapping[str, Any], accuracy: float | None) -> str:
    """The numbers that matter of one step, in one line."""
    ledger = values["ledger"]
    factors = {name: total / count for name, (total, count) in values["factors"].items() if count}
    kls = " ".join(f"{name.removesuffix('_kl_k3')} {value:.1e}" for name, value in factors.items())
    rate = ledger["consumed"] / values["time_s"]
    shown = "-" if accuracy is None else f"{accuracy:.3f}"
    staleness = values["staleness_total"] / max(1, values["num_tokens"])
    return (
        f"v{values['version']} accuracy {shown} reward {values['reward_mean']:.3f} staleness {staleness:.2f} "
        f"queued {ledger['queued']} in flight {ledger['in_flight']} {rate:.0f} samples/s | k3: {kls}"
    )
