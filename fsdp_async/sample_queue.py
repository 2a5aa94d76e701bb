"""The queue between engines and trainer: bounded, version-aware, with a ledger that always balances.

Owns admission (how many groups may be submitted under a version), the order of consumption (oldest submitted first)
and the count of every sample. It promises that nothing is lost or doubled: at every moment

    submitted = produced + in flight        produced = consumed + dropped + queued

and that a group submitted under version v is taken before v + max_staleness + 1 is published, or dropped and counted.
Thread-safe. It knows no engine and no tensor.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_async.checks import is_whole, require_whole
from fsdp_async.errors import ConfigError, InputError, QueueClosedError
from fsdp_async.ledger import Ledger
from fsdp_async.queue_state import Outstanding, QueueState, read_state
from fsdp_async.types import GroupKey, Prompt, ResponseGroup


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """`capacity_groups` bounds the groups that are queued or in flight.

    A capacity that is no multiple of the batch keeps the engine busy while the trainer trains, and mixes versions.
    """

    capacity_groups: int = 48

    def __post_init__(self) -> None:
        require_whole("queue.capacity_groups", self.capacity_groups, 1)


class SampleQueue:
    """Groups in the order of their submission; see the module docstring.

    Args:
        capacity_groups: most groups outstanding (queued or in flight).
        groups_per_batch: groups that one `take` of the trainer consumes.
        sync_every: batches between two publications.
        max_staleness: versions that may be published between submission and consumption.

    Raises:
        ConfigError: a number that no schedule can satisfy.
    """

    def __init__(self, *, capacity_groups: int, groups_per_batch: int, sync_every: int, max_staleness: int) -> None:
        numbers = ((groups_per_batch, 1), (sync_every, 1), (max_staleness, 0))
        if not all(is_whole(value, least) for value, least in numbers):
            raise ConfigError(
                f"trainer.groups_per_batch={groups_per_batch}, sync_every={sync_every}, max_staleness={max_staleness}: "
                "integers, the first two at least 1 and the last at least 0; else nothing could ever be submitted"
            )
        if not is_whole(capacity_groups, groups_per_batch):
            raise ConfigError(
                f"queue.capacity_groups={capacity_groups} must be an integer of at least trainer.groups_per_batch="
                f"{groups_per_batch}; a batch could never be full"
            )
        self.capacity_groups = capacity_groups
        self.groups_per_batch = groups_per_batch
        self.sync_every = sync_every
        self.max_staleness = max_staleness
        self._changed = threading.Condition()
        self._state = QueueState()
        self._closed = False

    @property
    def num_outstanding(self) -> int:
        """Groups in flight or queued."""
        with self._changed:
            return len(self._state.outstanding)

    @property
    def num_batches_taken(self) -> int:
        """Calls of `take` that were satisfied."""
        with self._changed:
            return self._state.num_batches_taken

    @property
    def ledger(self) -> Ledger:
        """The counts of this moment."""
        with self._changed:
            return self._state.ledger

    def num_admissible(self, published_version: int) -> int:
        """Groups that may be submitted now, under `published_version`.

        Of K = `sync_every` batches to a version, (published + max_staleness + 1) K will have been taken before the
        version after the last admissible one appears; whatever is outstanding must fit into those not yet taken.
        """
        with self._changed:
            room = min(self._staleness_bound(published_version), self.capacity_groups) - len(self._state.outstanding)
            return max(0, room)

    def oldest_referenced_version(self, published_version: int) -> int | None:
        """The oldest version that an outstanding or still admissible group may carry; None if there is none."""
        with self._changed:
            versions = [item.version for item in self._state.outstanding.values()]
            if self._staleness_bound(published_version) > len(self._state.outstanding):
                versions.append(published_version)
            return min(versions, default=None)

    def submit(self, prompts: Sequence[Prompt], num_samples: int, version: int) -> None:
        """Register groups that are about to be generated under `version` or newer weights.

        Raises:
            InputError: no number of samples, no version, more groups than `num_admissible`, or a group that is
                outstanding, or given up and may still arrive (its answer could not be told from the new one's);
                nothing registered.
            QueueClosedError: the queue is closed.
        """
        require_whole("num_samples", num_samples, 1, InputError)
        require_whole("version", version, 0, InputError)
        with self._changed:
            self._refuse_closed("submit")
            keys = [prompt.key for prompt in prompts]
            taken = self._state.outstanding.keys() | self._state.given_up
            if doubled := [key for key, count in Counter(keys).items() if count > 1 or key in taken]:
                raise InputError(
                    f"prompts {doubled} (prompt_id, epoch) are outstanding already, or were given up and may still "
                    "arrive; raise the epoch instead"
                )
            if len(keys) > (room := self.num_admissible(version)):
                raise InputError(
                    f"{len(keys)} groups submitted under version {version}, but only {room} are admissible"
                )
            for key, prompt in zip(keys, prompts, strict=True):
                self._state.outstanding[key] = Outstanding(prompt, version, num_samples)
            self._state.counts["submitted"] += num_samples * len(keys)

    def reissue(self) -> list[Prompt]:
        """The prompts in flight, oldest first, to be ordered again because nobody works on them any more."""
        with self._changed:
            lost = [item for item in self._state.outstanding.values() if item.group is None]
            self._state.counts["reissued"] += sum(item.num_samples for item in lost)
            return [item.prompt for item in lost]

    def put(self, group: ResponseGroup) -> None:
        """Queue a finished group. One that was given up before is counted as late and otherwise ignored.

        It never has to wait: room was reserved when the group was admitted, so a full queue holds up the producer at
        `submit`, and no put can evict anything.

        Raises:
            InputError: a group never submitted, here already, or that does not answer what was submitted.
            QueueClosedError: the queue is closed.
        """
        key = group.prompt.key
        with self._changed:
            if key in self._state.given_up:
                self._state.given_up.remove(key)
                self._state.counts["late"] += len(group.responses)
                return
            self._refuse_closed("put")
            item = self._state.outstanding.get(key)
            if item is None or item.group is not None:
                raise InputError(f"group {key} was {'never submitted' if item is None else 'put already'}")
            item.check_answer(group)
            item.group = group
            self._state.counts["produced"] += item.num_samples
            self._changed.notify_all()

    def ready(self, num_groups: int) -> bool:
        """Whether the `num_groups` oldest submitted groups are all queued.

        Raises:
            InputError: no group, or more than a batch.
        """
        self._refuse_size(num_groups)
        with self._changed:
            return self._first_missing(num_groups) is None

    def take(self, num_groups: int, *, timeout_s: float | None = None) -> list[ResponseGroup]:
        """Consume the `num_groups` oldest submitted groups, waiting until they are all here.

        Counts as one batch. Fewer than `groups_per_batch` are for the last batch of a run: admission has reckoned
        with full ones, so after a smaller one what is outstanding may pass the bound and be dropped.

        Raises:
            InputError: no group, more than a batch, or a time that is no number.
            QueueClosedError: closed, and what is queued cannot satisfy the call.
            TimeoutError: `timeout_s` passed; the message names the group that is awaited. Nothing was consumed.
        """
        self._refuse_size(num_groups)
        if timeout_s is not None and (not isinstance(timeout_s, int | float) or math.isnan(timeout_s)):
            raise InputError(f"timeout_s={timeout_s!r} must be a number of seconds, or None to wait for ever")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (missing := self._first_missing(num_groups)) is not None:
                self._refuse_closed(f"take({num_groups}), which still awaits {missing}")
                remaining = None if deadline is None else min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                if remaining is not None and remaining <= 0:
                    raise TimeoutError(f"take({num_groups}) waited {timeout_s} s for {missing}")
                self._changed.wait(remaining)
            taken = []
            for key in list(self._state.outstanding)[:num_groups]:
                item = self._state.outstanding.pop(key)
                assert item.group is not None
                taken.append(item.group)
                self._state.counts["consumed"] += item.num_samples
            self._state.num_batches_taken += 1
            return taken

    def drop_stale(self, published_version: int) -> int:
        """Give up the groups that could only be trained on beyond the bound; returns how many."""
        with self._changed:
            oldest_allowed = published_version - self.max_staleness
            stale = [key for key, item in self._state.outstanding.items() if item.version < oldest_allowed]
            return self._drop(stale, "stale")

    def drain(self, reason: str) -> int:
        """Give up everything outstanding, at the end of a run; returns how many groups."""
        with self._changed:
            return self._drop(list(self._state.outstanding), reason)

    def close(self) -> None:
        """Refuse further work; what is queued can still be taken. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed queue needs: prompts and groups in order, given-up groups, counts.

        Plain containers only, so that JSON holds it (as far as the `info` of prompts and responses is plain).
        """
        with self._changed:
            return self._state.to_plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the queue that `state` was taken from.

        Raises:
            InputError: `state` is malformed, does not fit itself, or has more groups than the capacity; the queue is
                unchanged.
        """
        loaded = read_state(state, capacity_groups=self.capacity_groups)
        with self._changed:
            self._state = loaded
            self._changed.notify_all()

    def _staleness_bound(self, published_version: int) -> int:
        batches = (published_version + self.max_staleness + 1) * self.sync_every - self._state.num_batches_taken
        return max(0, batches * self.groups_per_batch)

    def _first_missing(self, num_groups: int) -> str | None:
        oldest = list(self._state.outstanding.items())[:num_groups]
        waiting = next((key for key, item in oldest if item.group is None), None)
        if waiting is not None:
            return f"group {waiting}, which is in flight"
        return None if len(oldest) == num_groups else f"{num_groups - len(oldest)} groups that nobody has submitted"

    def _drop(self, keys: Sequence[GroupKey], reason: str) -> int:
        for key in keys:
            item = self._state.outstanding.pop(key)
            if item.group is None:
                self._state.given_up.add(key)
                self._state.counts["produced"] += item.num_samples
                self._state.dropped_by_length[0] += item.num_samples
            else:
                self._state.dropped_by_length.update(len(response.token_ids) for response in item.group.responses)
            self._state.counts["dropped"] += item.num_samples
            self._state.dropped_by_reason[reason] += item.num_samples
        return len(keys)

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise QueueClosedError(f"{what}: the queue is closed; make a new one, or load its state into one")

    def _refuse_size(self, num_groups: int) -> None:
        if not is_whole(num_groups, 1) or num_groups > self.groups_per_batch:
            raise InputError(
                f"{num_groups} groups are no batch: ask for 1 to {self.groups_per_batch} (trainer.groups_per_batch)"
            )
