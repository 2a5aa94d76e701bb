"""The sample queue as plain containers, and back.

Owns the form in which a queue is saved, and the refusal of everything that no queue could have saved: a state is read
whole and checked before anybody sees a part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fsdp_async.checks import is_whole, require_whole
from fsdp_async.errors import FsdpAsyncError, InputError
from fsdp_async.ledger import Ledger
from fsdp_async.types import GroupKey, Prompt, Response, ResponseGroup, VersionSpan

COUNTS = ("submitted", "produced", "consumed", "dropped", "late", "reissued")


@dataclass
class Outstanding:
    """A submitted group that is neither consumed nor dropped; `group` is None while in flight."""

    prompt: Prompt
    version: int
    num_samples: int
    group: ResponseGroup | None = None

    def check_answer(self, group: ResponseGroup) -> None:
        """Refuse a group that does not answer this order.

        Raises:
            InputError: another prompt, other samples than were ordered, or one of them twice.
        """
        key, ordered = self.prompt.key, self.prompt
        if len(group.responses) != self.num_samples:
            raise InputError(f"group {key} has {len(group.responses)} samples, submitted were {self.num_samples}")
        if (group.prompt.key, group.prompt.task, group.prompt.token_ids) != (key, ordered.task, ordered.token_ids):
            raise InputError(f"group {key} answers {group.prompt}, submitted was {ordered}; raise the epoch instead")
        if foreign := {r.prompt_id for r in group.responses} - {ordered.prompt_id}:
            raise InputError(f"group {key} holds responses to other prompts: {sorted(foreign, key=repr)}")
        if len({r.sample_index for r in group.responses}) != self.num_samples:
            indices = [r.sample_index for r in group.responses]
            raise InputError(f"group {key} holds a sample twice: sample_index {indices}; number them apart")


@dataclass
class QueueState:
    """Everything that a queue knows beside its settings. `outstanding` is in order of submission."""

    outstanding: dict[GroupKey, Outstanding] = field(default_factory=dict)
    given_up: set[GroupKey] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    dropped_by_length: Counter[int] = field(default_factory=Counter)
    dropped_by_reason: Counter[str] = field(default_factory=Counter)
    num_batches_taken: int = 0

    @property
    def ledger(self) -> Ledger:
        """The counts of this moment."""
        counts, items = self.counts, self.outstanding.values()
        return Ledger(
            submitted=counts["submitted"],
            produced=counts["produced"],
            consumed=counts["consumed"],
            dropped=counts["dropped"],
            queued=sum(item.num_samples for item in items if item.group is not None),
            in_flight=sum(item.num_samples for item in items if item.group is None),
            num_late=counts["late"],
            num_reissued=counts["reissued"],
            num_dropped_by_length=dict(sorted(self.dropped_by_length.items())),
            num_dropped_by_reason=dict(sorted(self.dropped_by_reason.items())),
        )

    def to_plain(self) -> dict[str, Any]:
        """Plain containers only, so that JSON holds it (as far as the `info` of prompts and responses is plain)."""
        return {
            "outstanding": [
                [_fields(item.prompt), item.version, item.num_samples, item.group and _group_to_plain(item.group)]
                for item in self.outstanding.values()
            ],
            "given_up": [list(key) for key in sorted(self.given_up)],
            "counts": dict(self.counts),
            # Pairs, for JSON would turn integer keys into text.
            "dropped_by_length": [list(pair) for pair in sorted(self.dropped_by_length.items())],
            "dropped_by_reason": dict(self.dropped_by_reason),
            "num_batches_taken": self.num_batches_taken,
        }


def read_state(plain: Mapping[str, Any], *, capacity_groups: int) -> QueueState:
    """The state that `plain` was made of.

    Raises:
        InputError: a part is missing, unknown, malformed or doubled, does not fit the others, or there are more groups
            than `capacity_groups`.
    """
    known = [f.name for f in fields(QueueState)]
    if not isinstance(plain, Mapping) or set(plain) != set(known):
        found = sorted(plain, key=repr) if isinstance(plain, Mapping) else type(plain).__name__
        raise InputError(f"state of a queue: found {found}, need a mapping of exactly {known}")
    try:
        state = QueueState(
            outstanding=_keyed(_read_outstanding(item) for item in plain["outstanding"]),
            given_up=_read_given_up(plain["given_up"]),
            counts=_read_counts("counts", plain["counts"].items()),
            dropped_by_length=_read_counts("dropped_by_length", plain["dropped_by_length"]),
            dropped_by_reason=_read_counts("dropped_by_reason", plain["dropped_by_reason"].items()),
            num_batches_taken=plain["num_batches_taken"],
        )
    except InputError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"state of a queue: malformed ({type(error).__name__}: {error}); it is not what a queue saved"
        ) from error
    _check_whole(state, capacity_groups)
    return state


def _check_whole(state: QueueState, capacity_groups: int) -> None:
    """Refuse parts that do not fit each other."""
    require_whole("state of a queue: num_batches_taken", state.num_batches_taken, 0, InputError)
    if unknown := sorted(set(state.counts) - set(COUNTS)):
        raise InputError(f"state of a queue: unknown counts {unknown}; known are {COUNTS}")
    if lengths := [length for length in state.dropped_by_length if not is_whole(length, 0)]:
        raise InputError(f"state of a queue: dropped_by_length has lengths {lengths}; need integers of at least 0")
    if both := sorted(state.given_up & state.outstanding.keys()):
        raise InputError(f"state of a queue: groups {both} are given up and outstanding; they can be one only")
    if len(state.outstanding) > capacity_groups:
        raise InputError(
            f"state of a queue: {len(state.outstanding)} groups are outstanding, and queue.capacity_groups is "
            f"{capacity_groups}; raise it"
        )
    for name in ("dropped_by_length", "dropped_by_reason"):
        if (total := sum(getattr(state, name).values())) != state.counts["dropped"]:
            raise InputError(f"state of a queue: {name} counts {total} samples, dropped {state.counts['dropped']}")
    try:
        state.ledger.check()
    except FsdpAsyncError as error:
        raise InputError(f"state of a queue: its counts do not fit its groups: {error}") from error


def _keyed(items: Iterable[Outstanding]) -> dict[GroupKey, Outstanding]:
    found: dict[GroupKey, Outstanding] = {}
    for item in items:
        if item.prompt.key in found:
            raise InputError(f"state of a queue: group {item.prompt.key} is outstanding twice")
        found[item.prompt.key] = item
    return found


def _read_outstanding(plain: Any) -> Outstanding:
    prompt_fields, version, num_samples, group = plain
    prompt = Prompt(**prompt_fields)
    where = f"state of a queue: group {prompt.key}"
    if not isinstance(prompt.prompt_id, str) or not is_whole(prompt.epoch, 0):
        raise InputError(f"{where}: need a text and an integer of at least 0")
    require_whole(f"{where}: version", version, 0, InputError)
    require_whole(f"{where}: num_samples", num_samples, 1, InputError)
    item = Outstanding(prompt, version, num_samples)
    if group is not None:
        item.group = _read_group(prompt, group)
        require_whole(f"{where}: submitted_version", item.group.submitted_version, 0, InputError)
        item.check_answer(item.group)
    return item


def _read_given_up(plain: Any) -> set[GroupKey]:
    keys = [(prompt_id, epoch) for prompt_id, epoch in plain]
    if not all(isinstance(prompt_id, str) and is_whole(epoch, 0) for prompt_id, epoch in keys):
        raise InputError(f"state of a queue: given_up={plain}; need pairs (prompt_id, epoch)")
    if len(set(keys)) != len(keys):
        raise InputError(f"state of a queue: given_up={plain} names a group twice")
    return set(keys)


def _read_counts(name: str, pairs: Iterable[Any]) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for key, value in pairs:
        require_whole(f"state of a queue: {name} of {key!r}", value, 0, InputError)
        if key in counts:
            raise InputError(f"state of a queue: {name} counts {key!r} twice")
        counts[key] = value
    return counts


def _group_to_plain(group: ResponseGroup) -> dict[str, Any]:
    return {
        "responses": [
            _fields(response) | {"version_spans": [[s.version, s.start, s.stop] for s in response.version_spans]}
            for response in group.responses
        ],
        "submitted_version": group.submitted_version,
    }


def _read_group(prompt: Prompt, plain: Mapping[str, Any]) -> ResponseGroup:
    responses = tuple(
        Response(**{**response, "version_spans": tuple(VersionSpan(*span) for span in response["version_spans"])})
        for response in plain["responses"]
    )
    return ResponseGroup(prompt, responses, plain["submitted_version"])


def _fields(noun: Prompt | Response) -> dict[str, Any]:
    values = {f.name: getattr(noun, f.name) for f in fields(noun)}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return plain | {"info": dict(noun.info)}
