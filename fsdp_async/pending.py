"""Lazy snapshots that wait to be copied.

Owns the moment at which they are copied, and what happens if it came too late. Promises that what is copied are the
live parameters of the snapshot's moment, or that the snapshot is dropped and the loss is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_async.dtensor_io import LiveState
from fsdp_async.errors import StateInUseError
from fsdp_async.live_tracker import LiveTracker
from fsdp_async.version_store import Key, VersionStore


class PendingSnapshots:
    """Those of one cache.

    Args:
        store: knows which are pending.
        tracker: knows whether a change would have been noticed.
        drop: drops the states of given keys.
    """

    def __init__(self, store: VersionStore, tracker: LiveTracker, drop: Callable[[Sequence[Key]], None]) -> None:
        self._store = store
        self._tracker = tracker
        self._drop = drop

    def complete(self, look: Callable[[], LiveState]) -> None:
        """Copy parameters of all that wait; `look` is called only if there are any.

        Raises:
            StateInUseError: weights may have changed unseen; the snapshots were dropped.
        """
        if not self._store.pending:
            return
        live = look()
        if (unwatched := self._tracker.unwatched(live)) is not None:
            self.give_up(
                f"parameter {unwatched!r} was replaced or made trainable, without a watched optimizer,", "such a change"
            )
        for state in self._store.pending:
            if state.layout.parameters != live.layout.parameters:  # buffers were copied when it was taken
                state.layout.check(live.layout, state.label)
            state.arena.copy_from(live.parameters)
            state.is_pending = False

    def give_up(self, cause: str, change: str) -> None:
        """Drop all that wait, because of `cause`.

        Raises:
            StateInUseError: if there were any; says what to do before such a `change`.
        """
        lost = [state.key for state in self._store.pending]
        if not lost:
            return
        self._drop(lost)
        raise StateInUseError(
            f"{cause} while the lazy snapshots {lost} still waited to be copied: their values may be gone, and they "
            f"were dropped. Call materialize() before {change}"
        )
