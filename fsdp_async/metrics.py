"""Statistics that merge.

Owns the small algebra by which numbers from micro-batches, mini-batches and ranks become one number: every
entry knows how to merge with its like, so nothing is ever reduced by its name, and any split of the same
tokens gives the same result. All accumulation is float64. Logging is not its job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_async.errors import InputError


class Entry(Protocol):
    """One mergeable quantity."""

    def merge(self, other: Self) -> Self:
        """The entry of the two inputs taken together."""
        ...

    def to_dict(self, name: str) -> dict[str, float]:
        """Reported numbers, keyed by `name` or `name/<what>`."""
        ...


@dataclass(frozen=True)
class Total:
    """A plain sum, for counts."""

    value: float

    def merge(self, other: Self) -> Self:
        """Add."""
        return type(self)(self.value + other.value)

    def to_dict(self, name: str) -> dict[str, float]:
        """`{name: value}`."""
        return {name: self.value}


@dataclass(frozen=True)
class Mean:
    """A weighted mean: `total / count`. Nothing is reported when nothing was counted."""

    total: float
    count: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Self:
        """Mean of `values` where `mask` (same shape, bool)."""
        kept = values.detach()[mask].double()
        return cls(float(kept.sum()), float(kept.numel()))

    def merge(self, other: Self) -> Self:
        """Add totals and counts."""
        return type(self)(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN when nothing was counted."""
        return self.total / self.count if self.count else math.nan

    def to_dict(self, name: str) -> dict[str, float]:
        """`{name: mean}`, or nothing."""
        return {name: self.value} if self.count else {}


@dataclass(frozen=True)
class Moments:
    """Count, mean, centred second moment and extremes (Chan, Golub, LeVeque 1979, parallel update)."""

    count: float
    mean: float
    m2: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Self:
        """Moments of `values` where `mask` (same shape, bool)."""
        kept = values.detach()[mask].double()
        if kept.numel() == 0:
            return cls(0.0, 0.0, 0.0, math.inf, -math.inf)
        mean = kept.mean()
        return cls(
            float(kept.numel()), float(mean), float((kept - mean).square().sum()), float(kept.min()), float(kept.max())
        )

    def merge(self, other: Self) -> Self:
        """Pool two samples."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        delta = other.mean - self.mean
        return type(self)(
            count,
            self.mean + delta * other.count / count,
            self.m2 + other.m2 + delta * delta * self.count * other.count / count,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )

    def to_dict(self, name: str) -> dict[str, float]:
        """`name/mean`, `name/std` (population), `name/min`, `name/max`; nothing for an empty sample."""
        if not self.count:
            return {}
        std = math.sqrt(self.m2 / self.count)
        return {f"{name}/mean": self.mean, f"{name}/std": std, f"{name}/min": self.minimum, f"{name}/max": self.maximum}


@dataclass(frozen=True)
class EffectiveSampleSize:
    """Share of effective samples (sum w)^2 / (N sum w^2), in (0, 1]; 0 when every weight is 0.

    Held as log-sum-exp of *unclamped* log weights: clamping would make the worst batch look perfect, and sums
    of tiny weights would underflow (Kong 1992; Owen, Monte Carlo, chapter 9.3).
    """

    log_sum: float
    log_sum_sq: float
    count: float

    @classmethod
    def of_log(cls, log_weights: Tensor, mask: Tensor) -> Self:
        """From log weights (-inf is a weight of 0) where `mask` (same shape, bool)."""
        kept = log_weights.detach()[mask].double()
        if kept.numel() == 0:
            return cls(-math.inf, -math.inf, 0.0)
        return cls(float(kept.logsumexp(0)), float((2 * kept).logsumexp(0)), float(kept.numel()))

    def merge(self, other: Self) -> Self:
        """Pool two samples."""
        return type(self)(
            _log_add(self.log_sum, other.log_sum), _log_add(self.log_sum_sq, other.log_sum_sq), self.count + other.count
        )

    @property
    def value(self) -> float:
        """The share; 0 when all weights are 0 or there are none."""
        if not self.count or self.log_sum == -math.inf:
            return 0.0
        return min(1.0, math.exp(2 * self.log_sum - self.log_sum_sq - math.log(self.count)))

    def to_dict(self, name: str) -> dict[str, float]:
        """`{name: share}`, or nothing for an empty sample."""
        return {name: self.value} if self.count else {}


@dataclass(frozen=True)
class Correlation:
    """Pearson correlation of two samples, by centred co-moments."""

    count: float
    mean_x: float
    mean_y: float
    m2_x: float
    m2_y: float
    co_moment: float

    @classmethod
    def of(cls, x: Tensor, y: Tensor, mask: Tensor) -> Self:
        """Correlation of `x` and `y` where `mask` (same shapes, bool)."""
        a, b = x.detach()[mask].double(), y.detach()[mask].double()
        if a.numel() == 0:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        da, db = a - a.mean(), b - b.mean()
        return cls(float(a.numel()), float(a.mean()), float(b.mean()), float(da @ da), float(db @ db), float(da @ db))

    def merge(self, other: Self) -> Self:
        """Pool two samples."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        scale = self.count * other.count / count
        return type(self)(
            count,
            self.mean_x + dx * other.count / count,
            self.mean_y + dy * other.count / count,
            self.m2_x + other.m2_x + dx * dx * scale,
            self.m2_y + other.m2_y + dy * dy * scale,
            self.co_moment + other.co_moment + dx * dy * scale,
        )

    def to_dict(self, name: str) -> dict[str, float]:
        """`{name: r}`; nothing where a sample is constant (the correlation is undefined)."""
        spread = self.m2_x * self.m2_y
        return {name: self.co_moment / math.sqrt(spread)} if spread > 0 else {}


@dataclass(frozen=True)
class Histogram:
    """Counts of positive values: equal bins of log10 between two edges, one of them centred at 1, and what lies beyond.

    `counts` holds what is below the lowest edge (0 included), each bin, and what is at or above the highest edge.
    """

    LOWEST_LOG10: ClassVar[float] = -3.025
    HIGHEST_LOG10: ClassVar[float] = 3.025
    NUM_BINS: ClassVar[int] = 121

    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Self:
        """Counts of `values` (at least 0) where `mask` (same shape, bool)."""
        position = values.detach()[mask].double().log10().sub(cls.LOWEST_LOG10)
        index = (position * (cls.NUM_BINS / (cls.HIGHEST_LOG10 - cls.LOWEST_LOG10))).floor() + 1
        index = index.clamp(0, cls.NUM_BINS + 1).long()
        return cls(tuple(torch.bincount(index, minlength=cls.NUM_BINS + 2).tolist()))

    def merge(self, other: Self) -> Self:
        """Add counts."""
        return type(self)(tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    @classmethod
    def edges_log10(cls) -> list[float]:
        """Edges between bins, `NUM_BINS + 1` of them."""
        width = (cls.HIGHEST_LOG10 - cls.LOWEST_LOG10) / cls.NUM_BINS
        return [cls.LOWEST_LOG10 + width * index for index in range(cls.NUM_BINS + 1)]

    def to_dict(self, name: str) -> dict[str, float]:
        """Nothing: a histogram is no number."""
        return {}


@dataclass(frozen=True)
class Statistics:
    """Named entries. Merging takes the union of names; a name keeps one kind of entry for ever."""

    entries: Mapping[str, Entry] = field(default_factory=dict)

    def merge(self, other: Statistics) -> Statistics:
        """Statistics of both inputs together.

        Raises:
            InputError: a name stands for two kinds of entry.
        """
        merged: dict[str, Entry] = dict(self.entries)
        for name, entry in other.entries.items():
            mine = merged.get(name)
            if mine is not None and type(mine) is not type(entry):
                raise InputError(f"statistic {name!r} is {type(mine).__name__} here and {type(entry).__name__} there")
            merged[name] = entry if mine is None else mine.merge(entry)
        return Statistics(merged)

    def all_reduce(self, group: ProcessGroup | None) -> Statistics:
        """The same statistics on every rank of `group`, merged in rank order; unchanged when `group` is None."""
        if group is None:
            return self
        gathered: list[Statistics] = [Statistics()] * dist.get_world_size(group)
        dist.all_gather_object(gathered, self, group=group)
        return merge_all(gathered)

    def prefixed(self, prefix: str) -> Statistics:
        """The same entries under `prefix/name`."""
        return Statistics({f"{prefix}/{name}": entry for name, entry in self.entries.items()})

    def to_dict(self) -> dict[str, float]:
        """Reported numbers of all entries."""
        return {key: value for name, entry in self.entries.items() for key, value in entry.to_dict(name).items()}


def merge_all(parts: Iterable[Statistics]) -> Statistics:
    """Merge any number of statistics, left to right."""
    merged = Statistics()
    for part in parts:
        merged = merged.merge(part)
    return merged


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Per-token k3 = exp(L) - 1 - L >= 0 for L = log of a ratio (Schulman 2020, "Approximating KL divergence")."""
    return torch.expm1(log_ratio) - log_ratio


def _log_add(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
