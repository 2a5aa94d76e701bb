"""Weights from the trainer to its engines.

Owns the publishers: bounded buckets in shared memory (child processes) or in this process (threads), two at a time, so
that a publication never stages more than two buckets and, where the model fits into two, never waits for an engine. A
bucket's memory is reused only after every engine has said that it copied it; who does not say so in time is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fsdp_async.buckets import WeightBucket, pack
from fsdp_async.checks import require_whole
from fsdp_async.errors import EngineTimeoutError, InputError
from fsdp_async.rollout import RolloutEngine
from fsdp_async.shared_block import SharedBlock

NUM_SLOTS = 2
Waiting = Callable[[], AbstractContextManager[object]]


class WeightPublisher(Protocol):
    """Sends a version to every engine."""

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, only: RolloutEngine | None = None
    ) -> None:
        """Send named full tensors to every engine (or `only` one), one pass, reading each before the next is asked for.

        When it returns, everything has been read (the trainer may step) and handed over; engines take it between two
        chunks of work. A tied tensor comes once.

        Raises:
            InputError: no tensor, no version (an integer >= 0), or the publisher is closed.
            EngineTimeoutError: an engine did not take an earlier bucket in time; names version, bucket and engine.
        """
        ...

    def flush(self) -> None:
        """Wait until every engine has taken everything.

        Raises:
            EngineTimeoutError: as `publish`.
        """
        ...

    def forget(self, engine: RolloutEngine) -> None:
        """`engine` was started again: it will not confirm anything that was handed over before."""
        ...

    def close(self) -> None:
        """Free all memory; idempotent. Call `flush` before, or engines may find it gone."""
        ...


class Slot(Protocol):
    """A block of memory that buckets are written to."""

    capacity: int

    @property
    def handle(self) -> str | Tensor:
        """What an engine needs to find the memory."""
        ...

    def memory(self) -> Tensor:
        """The block as a uint8 tensor."""
        ...

    def free(self) -> None:
        """Give it back."""
        ...


class LocalSlot:
    """Memory of this process."""

    def __init__(self, num_bytes: int) -> None:
        self.capacity = num_bytes
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)

    @property
    def handle(self) -> Tensor:
        """The memory itself."""
        return self._memory

    def memory(self) -> Tensor:
        """The memory itself."""
        return self._memory

    def free(self) -> None:
        """Left to the garbage collector."""


@dataclass
class _InUse:
    slot: Slot | None = None
    claim: tuple[int, int] = (-1, -1)
    """(version, bucket) that lies in the slot."""
    awaited: list[RolloutEngine] = field(default_factory=list)
    """Engines that are still to copy it."""


class BucketPublisher:
    """A publisher over one kind of slot; see the module docstring. `waiting()` surrounds each wait for engines."""

    make_slot: type[SharedBlock] | type[LocalSlot]

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        bucket_bytes: int,
        timeout_s: float,
        waiting: Waiting = nullcontext,
    ) -> None:
        require_whole("bucket_bytes", bucket_bytes, 1, InputError)
        self._engines = list(engines)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._waiting = waiting
        self._slots = [_InUse() for _ in range(NUM_SLOTS)]
        self._next = 0
        self._closed = False

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, only: RolloutEngine | None = None
    ) -> None:
        """See `WeightPublisher.publish`."""
        if self._closed:
            raise InputError(f"version {version} published after close(); make a new publisher")
        require_whole("version", version, 0, InputError)
        engines = self._engines if only is None else [only]
        pending: WeightBucket | None = None
        for index, piece in enumerate(pack(tensors, self._bucket_bytes)):
            if pending is not None:
                _hand_over(pending, engines)
            slot = self._free_slot(piece.num_bytes, (version, index), engines)
            piece.copy_to(slot.memory())
            entries = tuple(entry for entry, _ in piece.entries)
            pending = WeightBucket(version, index, False, entries, slot.handle)
        if pending is None:
            raise InputError(f"version {version} was published without a single tensor")
        # Only now is it known to be the last one.
        _hand_over(WeightBucket(version, pending.index, True, pending.entries, pending.memory), engines)

    def flush(self) -> None:
        """See `WeightPublisher.flush`."""
        for used in sorted(self._slots, key=lambda used: used.claim):
            self._await(used, "the end of the run")

    def forget(self, engine: RolloutEngine) -> None:
        """See `WeightPublisher.forget`."""
        for used in self._slots:
            used.awaited = [other for other in used.awaited if other is not engine]

    def close(self) -> None:
        """Free the slots."""
        self._closed = True
        for used in self._slots:
            if used.slot is not None:
                used.slot.free()
                used.slot = None

    def _free_slot(self, num_bytes: int, claim: tuple[int, int], engines: Sequence[RolloutEngine]) -> Slot:
        used = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        self._await(used, f"bucket {claim[1]} of version {claim[0]}")
        if used.slot is not None and used.slot.capacity < num_bytes:
            used.slot.free()
            used.slot = None
        if used.slot is None:
            used.slot = self.make_slot(max(1, num_bytes))
        used.claim, used.awaited = claim, list(engines)
        return used.slot

    def _await(self, used: _InUse, what_for: str) -> None:
        """Wait until every engine has copied what lies in the slot."""
        if not used.awaited:
            return
        version, bucket = used.claim
        with self._waiting():
            for engine in used.awaited:
                try:
                    engine.wait_loaded(version, bucket, self._timeout_s)
                except EngineTimeoutError as error:
                    raise EngineTimeoutError(
                        f"publication, {what_for}: the trainer waited {self._timeout_s:g} s for {engine.name} to copy "
                        f"bucket {bucket} of version {version} ({error}); the engine is busy, stopped or deadlocked. "
                        "Look at its stack; shorten its chunks (rollout.prompts_per_chunk) or raise "
                        "rollout.load_timeout_s"
                    ) from error
        used.awaited = []


def _hand_over(bucket: WeightBucket, engines: Sequence[RolloutEngine]) -> None:
    for engine in engines:
        engine.load(bucket.version, bucket)


class SharedMemoryPublisher(BucketPublisher):
    """For engines in other processes of this machine."""

    make_slot = SharedBlock


class InProcessPublisher(BucketPublisher):
    """For engines in threads of this process."""

    make_slot = LocalSlot
