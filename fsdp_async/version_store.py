"""Which states are retained, what each holds, and what all may cost.

Owns: keys (versions and names), one arena per state, the budget.

Promises: a state is refused before anything is allocated for it, with what is retained and what it costs;
nothing is evicted; replacing a state does not count it twice.

Does not: copy tensors, or know whether a state equals the live weights.

[Note: life of a version]
*Taken*: `snapshot(v)` copies the live parameters and buffers. With `lazy=True` only the arena is reserved and the
buffers are copied (they change in forwards); the version is *pending*: its parameters are the live ones, so they
are copied when something is about to change these: the next step of a watched optimizer, or `restore` of another
version. Dropped before that, it costs no copy. *Live*: v equals the live parameters from its snapshot or restore
until the next optimizer step begins; a visit then copies buffers only. Whether that holds is known only if every
trainable parameter belongs to a watched optimizer; otherwise `live_version` is None and lazy is refused. Whoever
edits weights by hand says so by `mark_live_changed()`. *Visited*: inside `at(v)` the model computes with v;
nothing may take, change or step weights until the visit ends. *Gone*: `drop`, or `retain` without it. The arena
goes to the pool and serves the next version. Nothing is evicted unasked.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from fsdp_async.arena import Arena, ArenaPlan, ArenaPool, plan_arena
from fsdp_async.dtensor_io import Layout
from fsdp_async.errors import CacheBudgetError, ConfigError, InputError, UnknownVersionError, VersionExistsError

Key = int | str
"""A version (integer >= 0) or the name of a state that is no publication."""

LIVE = "live"
RESERVED_NAMES = frozenset({LIVE})


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Settings of a `StateCache`.

    Attributes:
        max_versions: most integer versions retained at once; None for no limit. Named states do not count.
        max_bytes: most host memory of this rank, parking arena and pool included; None for no limit.
        pin_memory: None pins where the model lies on a CUDA device, True and False force it.
        agreement_timeout_s: how long a rank waits for the others to join a visit, snapshot or restore.
    """

    max_versions: int | None = None
    max_bytes: int | None = None
    pin_memory: bool | None = None
    agreement_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_versions", "max_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}: must be an integer >= 1, or None for no limit")
        if self.pin_memory not in (None, True, False):
            raise ConfigError(f"pin_memory={self.pin_memory!r}: must be True, False, or None to decide by device")
        if not 0 < self.agreement_timeout_s < float("inf"):
            raise ConfigError(
                f"agreement_timeout_s={self.agreement_timeout_s!r}: must be a positive number of seconds; it bounds "
                "how long ranks wait for one that does not come"
            )


@dataclass
class StoredState:
    """A retained state. While `is_pending`, the arena holds its buffers and the live model its parameters."""

    key: Key
    layout: Layout
    arena: Arena
    is_pending: bool = False

    @property
    def label(self) -> str:
        """The state in words, for messages."""
        return f"version {self.key}" if isinstance(self.key, int) else f"state {self.key!r}"


def plan_of(layout: Layout) -> ArenaPlan:
    """Where a state of `layout` lies in its arena: parameters, then buffers."""
    return plan_arena((spec.local_shape, spec.dtype) for spec in layout.tensors)


def checked_key(key: object) -> Key:
    """`key` as a version or a name.

    Raises:
        InputError: a bool, a negative or fractional number, an empty or reserved name, anything else.
    """
    if isinstance(key, str) and key and key not in RESERVED_NAMES:
        return key
    if not isinstance(key, bool | str | float):
        try:
            number = operator.index(key)  # type: ignore[arg-type]
        except TypeError:
            number = -1
        if number >= 0:
            return number
    raise InputError(
        f"version {key!r} ({type(key).__name__}): must be an integer >= 0 that counts publications, or a name such as "
        f"'reference' (not empty, not one of {sorted(RESERVED_NAMES)})"
    )


class VersionStore:
    """The retained states of one rank.

    Args:
        pool: where arenas come from and go back to.
        config: the limits.
    """

    def __init__(self, pool: ArenaPool, config: CacheConfig) -> None:
        self._pool = pool
        self._max_versions = config.max_versions
        self._max_bytes = config.max_bytes
        self._states: dict[Key, StoredState] = {}

    @property
    def versions(self) -> list[int]:
        """Integer versions, ascending."""
        return sorted(key for key in self._states if isinstance(key, int))

    @property
    def names(self) -> list[str]:
        """Named states, sorted."""
        return sorted(key for key in self._states if isinstance(key, str))

    @property
    def states(self) -> list[StoredState]:
        """All, in the order in which they were taken."""
        return list(self._states.values())

    @property
    def pending(self) -> list[StoredState]:
        """States whose parameters are still only in the live model."""
        return [state for state in self._states.values() if state.is_pending]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.arena.nbytes for state in self._states.values())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int | str) and not isinstance(key, bool) and key in self._states

    def get(self, key: object) -> StoredState:
        """The state retained as `key`.

        Raises:
            UnknownVersionError: there is none; names what is retained.
            InputError: `key` is no key at all.
        """
        state = self._states.get(checked_key(key))
        if state is None:
            raise UnknownVersionError(
                f"version {key!r} is not retained; retained are versions {self.versions} and names {self.names}. "
                "snapshot() it while it is live, and keep it in retain() while it is needed"
            )
        return state

    def reserve(self, key: Key, layout: Layout, *, overwrite: bool, working_bytes: int) -> StoredState:
        """Take memory for a state of `layout`; it is retained only by `put`, and given back by `discard`.

        Args:
            key: checked.
            layout: of the live model.
            overwrite: whether a state of that key may be replaced.
            working_bytes: what visits need besides; reserved, so that a visit never fails for the budget.

        Raises:
            VersionExistsError: retained already, and not `overwrite`.
            CacheBudgetError: over a limit.
        """
        if key in self._states and not overwrite:
            raise VersionExistsError(
                f"{self._states[key].label} is retained already (versions {self.versions}, names {self.names}); "
                "pass overwrite=True to replace it, or drop() it first"
            )
        plan = plan_of(layout)
        self._check_budget(key, plan.nbytes, working_bytes)
        old = self._states.get(key)
        arena = old.arena if old is not None and old.arena.plan == plan else self._pool.take(plan)
        return StoredState(key, layout, arena)

    def put(self, state: StoredState) -> None:
        """Retain what `reserve` prepared, in place of an older state of that key."""
        old = self._states.get(state.key)
        if old is not None and old.arena is not state.arena:
            self._pool.give(old.arena)
        self._states[state.key] = state

    def discard(self, state: StoredState) -> None:
        """Give back what `reserve` took."""
        old = self._states.get(state.key)
        if old is None or old.arena is not state.arena:
            self._pool.give(state.arena)

    def drop(self, key: Key) -> None:
        """Forget a retained state; its arena goes to the pool."""
        self._pool.give(self._states.pop(key).arena)

    def clear(self) -> None:
        """Forget all."""
        for key in list(self._states):
            self.drop(key)

    def _check_budget(self, key: Key, nbytes: int, working_bytes: int) -> None:
        others = [state for state in self._states.values() if state.key != key]
        retained = f"retained are versions {self.versions} and names {self.names}, {self.nbytes} bytes"
        num_versions = sum(isinstance(state.key, int) for state in others) + isinstance(key, int)
        if self._max_versions is not None and isinstance(key, int) and num_versions > self._max_versions:
            raise CacheBudgetError(
                f"version {key} would be number {num_versions} of at most max_versions={self._max_versions}: "
                f"{retained}. Nothing was copied; retain() or drop() what is no longer needed, or raise max_versions"
            )
        needed = sum(state.arena.nbytes for state in others) + nbytes + working_bytes
        if self._max_bytes is not None and needed > self._max_bytes:
            raise CacheBudgetError(
                f"version {key!r} needs {nbytes} bytes, {needed} with the others and the {working_bytes} that a visit "
                f"parks, more than max_bytes={self._max_bytes}: {retained}. Nothing was copied; retain() or drop() "
                "what is no longer needed, or raise max_bytes"
            )
