"""Where a run's time went.

Owns the division of the trainer's seconds, from the first batch on to the end of the last step, into what trains and
what does not. The start of engines is no part of it, and evaluations are nobody's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_async.report_data import RunData
from fsdp_async.timeline import busy_s, without

Interval = tuple[float, float]

WORK = ("behaviour", "update")
LOST = {
    "wait": "waiting for samples or engines",
    "publish": "publishing weights",
    "checkpoint": "copying checkpoints",
    "other": "everything else (logging, batching, prompts)",
}


@dataclass(frozen=True)
class TimeShares:
    """Seconds in all, and shares (0 to 1) of them: of each phase of the trainer, and of the engine's work."""

    total_s: float
    trainer: dict[str, float]
    engine_busy: float

    @property
    def lost(self) -> float:
        """Share in which the trainer did not train."""
        return sum(self.trainer[name] for name in LOST)

    def sentence(self) -> str:
        """For people."""
        if not self.total_s:
            return "No training step was recorded, so no time was lost."
        parts = sorted(((self.trainer[name], words) for name, words in LOST.items()), reverse=True)
        to = ", ".join(f"{share:.1%} {words}" for share, words in parts)
        updates, behaviour = self.trainer["update"], self.trainer["behaviour"]
        return (
            f"In {self.total_s:.1f} s from the first batch on, evaluations left out, the trainer computed "
            f"{1 - self.lost:.1%} of the time ({updates:.1%} updates, {behaviour:.1%} behaviour log-probs) and lost "
            f"{self.lost:.1%}: {to}. The engine generated {self.engine_busy:.1%} of it."
        )


def spans_of(run: RunData) -> dict[str, list[Interval]]:
    """Intervals (seconds on the run's clock) of each phase of the trainer; `engine` is when any engine generated."""
    spans: dict[str, list[Interval]] = {"engine": []}
    for event in run.events:
        for phase, start, stop in event.get("trainer_spans", ()):
            spans.setdefault(phase, []).append((start, stop))
        spans["engine"] += [(start, stop) for start, stop in event.get("engine_spans", ())]
    return spans


def time_shares(run: RunData) -> TimeShares:
    """Shares over the time from the arrival of the first batch to the end of the last step."""
    steps = run.steps
    spans = spans_of(run)
    waits = spans.get("wait", [])
    names = (*WORK, *LOST)
    begun = [start for start, _ in spans.get("behaviour", [])]
    if not steps or not begun:
        return TimeShares(0.0, dict.fromkeys(names, 0.0), 0.0)
    window = [(min(begun), steps[-1]["time_s"])]
    window = without(window, spans.get("evaluate", []))
    total = busy_s(window)
    # A wait inside another phase, for an engine to copy weights, is time lost to waiting.
    seconds = {name: _inside(without(spans.get(name, []), () if name == "wait" else waits), window) for name in names}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    shares = {name: value / total for name, value in seconds.items()}
    return TimeShares(total, shares, _inside(spans["engine"], window) / total)


def _inside(spans: Sequence[Interval], window: Sequence[Interval]) -> float:
    return busy_s(spans) - busy_s(without(spans, window))
