"""A run as columns: what its events say, step by step.

Owns the reading of `metrics.jsonl` for people. Runs that were killed, resumed or never trained are read as far as
they go; a quantity that a run did not log is a column of None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_async.audit import read_log
from fsdp_async.errors import InputError
from fsdp_async.recorder import METRICS
from fsdp_async.run_dir import RECORD
from fsdp_async.summary import summarize

Record = Mapping[str, Any]
Column = list[float | None]


@dataclass(frozen=True)
class RunData:
    """Events of a run in order, and what is known of it beside them."""

    name: str
    events: Sequence[Record]
    record: Record

    @classmethod
    def read(cls, directory: Path) -> RunData:
        """Read the run in `directory`; a last line that is torn is left out.

        Raises:
            InputError: there is no run, or it logged nothing, or a line is damaged.
        """
        path = directory / METRICS
        if not path.is_file():
            raise InputError(f"{directory}: no run here ({METRICS} is missing); give the run.output_dir of a run")
        try:
            events = read_log(path)
            record = json.loads((directory / RECORD).read_text(encoding="utf-8")) if _has_record(directory) else {}
        except ValueError as error:
            raise InputError(
                f"{directory}: a line of {METRICS} or {RECORD} is no JSON ({error}); restore it"
            ) from error
        if not events:
            raise InputError(f"{path}: nothing was logged yet; wait for the first event")
        return cls(directory.resolve().name, events, record)

    @property
    def steps(self) -> list[Record]:
        """Events of training steps."""
        return self.of("step")

    @property
    def summary(self) -> dict[str, Any]:
        """As in `summary.json`, of what is there."""
        return summarize(self.events)

    @property
    def resumed_after(self) -> list[int]:
        """Steps after which the run was gone on with."""
        return [int(entry["after_step"]) for entry in self.record.get("resumed", ())]

    def of(self, event: str) -> list[Record]:
        """Events of one kind."""
        return [record for record in self.events if record["event"] == event]

    def column(self, *path: str, event: str = "step") -> Column:
        """The number at `path` in each event of a kind; None where there is none."""
        return [_number(_at(record, path)) for record in self.of(event)]

    def factor(self, name: str) -> Column:
        """Mean of a factor's divergence over the tokens of each step, nats."""
        pairs = [_at(step, ("factors", name)) for step in self.steps]
        return [None if not pair or not pair[1] or pair[0] is None else pair[0] / pair[1] for pair in pairs]

    def keys(self, section: str) -> list[str]:
        """Sorted names that any step has below `section`."""
        return sorted({key for step in self.steps for key in step.get(section, ())})


def smooth(values: Column, window: int) -> Column:
    """Mean of the last `window` numbers that are there, at each place; None where there are none."""
    smoothed: Column = []
    for stop in range(1, len(values) + 1):
        there = [value for value in values[max(0, stop - window) : stop] if value is not None]
        smoothed.append(sum(there) / len(there) if there else None)
    return smoothed


def _has_record(directory: Path) -> bool:
    return (directory / RECORD).is_file()


def _at(record: Any, path: Sequence[str]) -> Any:
    for key in path:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
