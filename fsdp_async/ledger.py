"""The account of every sample.

Owns the counts and the two equations that hold at every moment; `sample_queue.py` keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdp_async.errors import FsdpAsyncError


@dataclass(frozen=True)
class Ledger:
    """Counts of samples. `num_dropped_by_length` maps response tokens to samples (0 where none ever arrived).

    `num_reissued` counts orders that were given again, after an engine or the run ended; they are submitted once.
    """

    submitted: int = 0
    produced: int = 0
    consumed: int = 0
    dropped: int = 0
    queued: int = 0
    in_flight: int = 0
    num_late: int = 0
    num_reissued: int = 0
    num_dropped_by_length: Mapping[int, int] = field(default_factory=dict)
    num_dropped_by_reason: Mapping[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Raise if a sample was lost or doubled.

        Raises:
            FsdpAsyncError: an equation of the module docstring does not hold.
        """
        if self.submitted != self.produced + self.in_flight:
            raise FsdpAsyncError(f"ledger: submitted != produced + in flight: {self}; this is a fault of the queue")
        if self.produced != self.consumed + self.dropped + self.queued:
            raise FsdpAsyncError(
                f"ledger: produced != consumed + dropped + queued: {self}; this is a fault of the queue"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)
