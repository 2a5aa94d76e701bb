"""Who worked when.

Owns spans of work on one clock (`time.monotonic`, shared by all processes of a node) and their overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """`phase` lasted from `start_s` to `stop_s`, seconds on the timeline's clock."""

    phase: str
    start_s: float
    stop_s: float


class Timeline:
    """Spans of one worker, counted from an epoch that was `elapsed_s` ago. Not thread-safe.

    `epoch_s` is that moment on the monotonic clock. `announce` is told the innermost phase whenever it changes.
    """

    def __init__(self, *, elapsed_s: float = 0.0, announce: Callable[[str], None] | None = None) -> None:
        self.epoch_s = time.monotonic() - elapsed_s
        self._announce = announce
        self._current = ""
        self._fresh: list[Span] = []
        self._seconds: dict[str, float] = {}

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return time.monotonic() - self.epoch_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the body as one span of `name`, also when it raises."""
        start_s, outer = self.now_s(), self._current
        self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)
            stop_s = self.now_s()
            self._fresh.append(Span(name, start_s, stop_s))
            self._seconds[name] = self._seconds.get(name, 0.0) + stop_s - start_s

    def _enter(self, name: str) -> None:
        self._current = name
        if self._announce is not None:
            self._announce(name)

    def seconds(self, name: str) -> float:
        """All time spent in phase `name` so far."""
        return self._seconds.get(name, 0.0)

    def drain(self) -> list[Span]:
        """Spans recorded since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh


def without(spans: Iterable[tuple[float, float]], holes: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals in order that cover the seconds of `spans` outside `holes`."""
    pieces: list[tuple[float, float]] = []
    covered = _union(holes)
    first = 0
    for start, stop in _union(spans):
        while first < len(covered) and covered[first][1] <= start:
            first += 1
        index = first
        while index < len(covered) and covered[index][0] < stop:
            if start < covered[index][0]:
                pieces.append((start, covered[index][0]))
            start = max(start, covered[index][1])
            index += 1
        if start < stop:
            pieces.append((start, stop))
    return pieces


def busy_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one span."""
    return sum(stop - start for start, stop in _union(spans))


def overlap_s(a: Iterable[tuple[float, float]], b: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by a span of `a` and by a span of `b`."""
    first, second = _union(a), _union(b)
    # |A and B| = |A| + |B| - |A or B|; the unions are disjoint inside, so this counts nothing twice.
    return busy_s(first) + busy_s(second) - busy_s([*first, *second])


def overlap_fraction(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Shared seconds over the smaller of the two busy times; 0.0 when either never worked."""
    smaller = min(busy_s(a), busy_s(b))
    return min(1.0, max(0.0, overlap_s(a, b) / smaller)) if smaller > 0 else 0.0


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals in order that cover the same seconds."""
    union: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return union
