"""The queue between engines and trainer: bounded, version-aware, with a ledger that always balances.

Owns admission (how many groups may be submitted under a version), the order of consumption (oldest submitted first)
and the count of every sample. It promises that nothing is lost or doubled: at every moment

    submitted = produced + in flight        produced = consumed + dropped + queued

and that a group submitted under version v is taken before v + max_staleness + 1 is published, or dropped and counted.
Thread-safe. It knows no engine and no tensor.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fsdp_async.errors import ConfigError, InputError, QueueClosedError
from fsdp_async.ledger import Ledger
from fsdp_async.types import GroupKey, Prompt, Response, ResponseGroup, VersionSpan


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """`capacity_groups` bounds the groups that are queued or in flight.

    A capacity that is no multiple of the batch keeps the engine busy while the trainer trains, and mixes versions.
    """

    capacity_groups: int = 48

    def __post_init__(self) -> None:
        if self.capacity_groups < 1:
            raise ConfigError(f"queue.capacity_groups={self.capacity_groups}: must be at least 1")


@dataclass
class _Outstanding:
    """A submitted group that is neither consumed nor dropped; `group` is None while in flight."""

    prompt: Prompt
    version: int
    num_samples: int
    group: ResponseGroup | None = None


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
        if groups_per_batch < 1 or sync_every < 1 or max_staleness < 0:
            raise ConfigError(
                f"trainer.groups_per_batch={groups_per_batch}, sync_every={sync_every}, max_staleness={max_staleness}: "
                "the first two must be at least 1, the last at least 0; nothing could ever be submitted"
            )
        if capacity_groups < groups_per_batch:
            raise ConfigError(
                f"queue.capacity_groups={capacity_groups} is below trainer.groups_per_batch={groups_per_batch}; "
                "a batch could never be full"
            )
        self.capacity_groups = capacity_groups
        self.groups_per_batch = groups_per_batch
        self.sync_every = sync_every
        self.max_staleness = max_staleness
        self._changed = threading.Condition()
        self._outstanding: dict[GroupKey, _Outstanding] = {}
        self._given_up: set[GroupKey] = set()
        self._counts: Counter[str] = Counter()
        self._dropped_by_length: Counter[int] = Counter()
        self._dropped_by_reason: Counter[str] = Counter()
        self._num_batches_taken = 0
        self._closed = False

    @property
    def num_outstanding(self) -> int:
        """Groups in flight or queued."""
        with self._changed:
            return len(self._outstanding)

    @property
    def num_batches_taken(self) -> int:
        """Calls of `take` that were satisfied."""
        with self._changed:
            return self._num_batches_taken

    @property
    def ledger(self) -> Ledger:
        """The counts of this moment."""
        with self._changed:
            return _ledger(self._counts, self._outstanding, self._dropped_by_length, self._dropped_by_reason)

    def num_admissible(self, published_version: int) -> int:
        """Groups that may be submitted now, under `published_version`.

        Of K = `sync_every` batches to a version, (published + max_staleness + 1) K will have been taken before the
        version after the last admissible one appears; whatever is outstanding must fit into those not yet taken.
        """
        with self._changed:
            room = min(self._staleness_bound(published_version), self.capacity_groups) - len(self._outstanding)
            return max(0, room)

    def oldest_referenced_version(self, published_version: int) -> int | None:
        """The oldest version that an outstanding or still admissible group may carry; None if there is none."""
        with self._changed:
            versions = [item.version for item in self._outstanding.values()]
            if self._staleness_bound(published_version) > len(self._outstanding):
                versions.append(published_version)
            return min(versions, default=None)

    def submit(self, prompts: Sequence[Prompt], num_samples: int, version: int) -> None:
        """Register groups that are about to be generated under `version` or newer weights.

        Raises:
            InputError: more groups than `num_admissible`, or a group that is outstanding, or given up and may still
                arrive (its answer could not be told from the new one's); nothing registered.
            QueueClosedError: the queue is closed.
        """
        with self._changed:
            self._refuse_closed("submit")
            keys = [prompt.key for prompt in prompts]
            taken = self._outstanding.keys() | self._given_up
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
                self._outstanding[key] = _Outstanding(prompt, version, num_samples)
            self._counts["submitted"] += num_samples * len(keys)

    def reissue(self) -> list[Prompt]:
        """The prompts in flight, oldest first, to be ordered again because nobody works on them any more."""
        with self._changed:
            lost = [item for item in self._outstanding.values() if item.group is None]
            self._counts["reissued"] += sum(item.num_samples for item in lost)
            return [item.prompt for item in lost]

    def put(self, group: ResponseGroup) -> None:
        """Queue a finished group. One that was given up before is counted as late and otherwise ignored.

        It never has to wait: room was reserved when the group was admitted, so a full queue holds up the producer at
        `submit`, and no put can evict anything.

        Raises:
            InputError: a group never submitted, here already, or with another number of samples.
            QueueClosedError: the queue is closed.
        """
        key = group.prompt.key
        with self._changed:
            if key in self._given_up:
                self._given_up.remove(key)
                self._counts["late"] += len(group.responses)
                return
            self._refuse_closed("put")
            item = self._outstanding.get(key)
            if item is None or item.group is not None:
                raise InputError(f"group {key} was {'never submitted' if item is None else 'put already'}")
            if len(group.responses) != item.num_samples:
                raise InputError(f"group {key} has {len(group.responses)} samples, submitted were {item.num_samples}")
            item.group = group
            self._counts["produced"] += item.num_samples
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
            InputError: no group, or more than a batch.
            QueueClosedError: closed, and what is queued cannot satisfy the call.
            TimeoutError: `timeout_s` passed; the message names the group that is awaited. Nothing was consumed.
        """
        self._refuse_size(num_groups)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (missing := self._first_missing(num_groups)) is not None:
                self._refuse_closed(f"take({num_groups}), which still awaits {missing}")
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise TimeoutError(f"take({num_groups}) waited {timeout_s} s for {missing}")
                self._changed.wait(remaining)
            taken = []
            for key in list(self._outstanding)[:num_groups]:
                item = self._outstanding.pop(key)
                assert item.group is not None
                taken.append(item.group)
                self._counts["consumed"] += item.num_samples
            self._num_batches_taken += 1
            return taken

    def drop_stale(self, published_version: int) -> int:
        """Give up the groups that could only be trained on beyond the bound; returns how many."""
        with self._changed:
            oldest_allowed = published_version - self.max_staleness
            stale = [key for key, item in self._outstanding.items() if item.version < oldest_allowed]
            return self._drop(stale, "stale")

    def drain(self, reason: str) -> int:
        """Give up everything outstanding, at the end of a run; returns how many groups."""
        with self._changed:
            return self._drop(list(self._outstanding), reason)

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
            return {
                "outstanding": [
                    [_fields(item.prompt), item.version, item.num_samples, item.group and _to_plain(item.group)]
                    for item in self._outstanding.values()
                ],
                "given_up": [list(key) for key in sorted(self._given_up)],
                "counts": dict(self._counts),
                # Pairs, for JSON would turn integer keys into text.
                "dropped_by_length": [list(pair) for pair in sorted(self._dropped_by_length.items())],
                "dropped_by_reason": dict(self._dropped_by_reason),
                "num_batches_taken": self._num_batches_taken,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the queue that `state` was taken from.

        Raises:
            FsdpAsyncError: the counts of `state` do not fit its groups; the queue is unchanged.
        """
        items = [
            _Outstanding(prompt, version, num_samples, group and _from_plain(prompt, group))
            for prompt, version, num_samples, group in (
                (_prompt_from(plain), *rest) for plain, *rest in state["outstanding"]
            )
        ]
        outstanding = {item.prompt.key: item for item in items}
        counts = Counter[str](state["counts"])
        by_length, by_reason = Counter[int](dict(state["dropped_by_length"])), Counter[str](state["dropped_by_reason"])
        _ledger(counts, outstanding, by_length, by_reason).check()
        with self._changed:
            self._outstanding, self._counts = outstanding, counts
            self._given_up = {(prompt_id, epoch) for prompt_id, epoch in state["given_up"]}
            self._dropped_by_length, self._dropped_by_reason = by_length, by_reason
            self._num_batches_taken = state["num_batches_taken"]
            self._changed.notify_all()

    def _staleness_bound(self, published_version: int) -> int:
        batches = (published_version + self.max_staleness + 1) * self.sync_every - self._num_batches_taken
        return max(0, batches * self.groups_per_batch)

    def _first_missing(self, num_groups: int) -> str | None:
        oldest = list(self._outstanding.items())[:num_groups]
        waiting = next((key for key, item in oldest if item.group is None), None)
        if waiting is not None:
            return f"group {waiting}, which is in flight"
        return None if len(oldest) == num_groups else f"{num_groups - len(oldest)} groups that nobody has submitted"

    def _drop(self, keys: Sequence[GroupKey], reason: str) -> int:
        for key in keys:
            item = self._outstanding.pop(key)
            if item.group is None:
                self._given_up.add(key)
                self._counts["produced"] += item.num_samples
                self._dropped_by_length[0] += item.num_samples
            else:
                self._dropped_by_length.update(len(response.token_ids) for response in item.group.responses)
            self._counts["dropped"] += item.num_samples
            self._dropped_by_reason[reason] += item.num_samples
        return len(keys)

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise QueueClosedError(f"{what}: the queue is closed; make a new one, or load its state into one")

    def _refuse_size(self, num_groups: int) -> None:
        if not 1 <= num_groups <= self.groups_per_batch:
            raise InputError(
                f"{num_groups} groups are no batch: ask for 1 to {self.groups_per_batch} (trainer.groups_per_batch)"
            )


def _ledger(
    counts: Counter[str],
    outstanding: Mapping[GroupKey, _Outstanding],
    by_length: Mapping[int, int],
    by_reason: Mapping[str, int],
) -> Ledger:
    return Ledger(
        submitted=counts["submitted"],
        produced=counts["produced"],
        consumed=counts["consumed"],
        dropped=counts["dropped"],
        queued=sum(item.num_samples for item in outstanding.values() if item.group is not None),
        in_flight=sum(item.num_samples for item in outstanding.values() if item.group is None),
        num_late=counts["late"],
        num_reissued=counts["reissued"],
        num_dropped_by_length=dict(sorted(by_length.items())),
        num_dropped_by_reason=dict(sorted(by_reason.items())),
    )


def _to_plain(group: ResponseGroup) -> dict[str, Any]:
    return {
        "responses": [
            _fields(response) | {"version_spans": [[s.version, s.start, s.stop] for s in response.version_spans]}
            for response in group.responses
        ],
        "submitted_version": group.submitted_version,
    }


def _prompt_from(plain: Mapping[str, Any]) -> Prompt:
    return Prompt(**{**plain, "token_ids": tuple(plain["token_ids"])})


def _from_plain(prompt: Prompt, plain: Mapping[str, Any]) -> ResponseGroup:
    responses = tuple(
        Response(
            **response
            | {name: tuple(response[name]) for name in ("token_ids", "rollout_log_prob", "response_mask")}
            | {"version_spans": tuple(VersionSpan(*span) for span in response["version_spans"])}
        )
        for response in plain["responses"]
    )
    return ResponseGroup(prompt, responses, plain["submitted_version"])


def _fields(noun: Prompt | Response) -> dict[str, Any]:
    values = {field.name: getattr(noun, field.name) for field in fields(noun)}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return plain | {"info": dict(noun.info)}
