"""Versions of a model's weights in host memory; any of them can be evaluated while training goes on.

    live model (FSDP2 shards, or plain tensors)
       | snapshot(v)  copy shards           ^ restore(v)            ^ at(v): park live, copy v in,
       v              -> arena of v         | arena of v -> shards  |        body, copy live back
    +---------------------------------------------------------------------+
    | versions  0 1 2 ...  "reference"   one arena each (arena.ArenaPool) |  retain / drop -> pool -> next snapshot
    +---------------------------------------------------------------------+

Who waits on whom
    snapshot, at (on both ends), restore, reading  every rank of the model waits for every other (agreement.py)
    watched optimizer.step                         for the copy of snapshots taken lazily, on this rank only
    retain, drop, materialize, watch, versions     nobody
    any call from a second thread                  for a running snapshot or restore; refused during a visit

See [Note: life of a version] in `version_store.py`.

Owns the lives of versions. Promises: docs/state_cache.md. Does not: spill to disk, save files, compress.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_async.agreement import RankAgreement
from fsdp_async.arena import ArenaPool, choose_pin
from fsdp_async.description import describe, html_table
from fsdp_async.dtensor_io import LiveState, capture, check_sharded, check_supported, ranks_of, settle
from fsdp_async.errors import InputError, StateInUseError
from fsdp_async.interrupts import HeldSignals
from fsdp_async.live_tracker import LiveTracker
from fsdp_async.pending import PendingSnapshots
from fsdp_async.state_reading import ReadableStates
from fsdp_async.swaps import CopySwap, ProcessState, Swap, uninterrupted, write_buffers
from fsdp_async.version_store import CacheConfig, Key, StoredState, VersionStore, checked_key, plan_of
from fsdp_async.visits import Visit, visits_of

__all__ = ["CacheConfig", "StateCache"]


class StateCache(ReadableStates):
    """Retains versions of `model`'s weights and lets the model compute with any of them.

    Collective for a model on several ranks: construct it, call `snapshot`, `at` and `restore` on all, in one order.
    A context manager that closes it.

    Args:
        model: plain, sharded by `fully_shard` before, or under DDP (see docs/state_cache.md on its buffers).
        config: limits and timeouts.
        process_group: the ranks that act together; None takes those of the model's device meshes.

    Raises:
        UnsupportedModelError: FSDP1, meta or inference tensors.
    """

    def __init__(
        self, model: nn.Module, config: CacheConfig | None = None, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        check_supported(model)
        settle(model)
        live, self._model = capture(model), model
        self._config = config or CacheConfig()
        self._sharded = {spec.fqn for spec in live.layout.tensors if spec.placements is not None}
        pin = choose_pin(self._config.pin_memory, (view.device for view in live.parameters))
        self._pool = ArenaPool(pin, self._config.max_bytes)
        self._store = VersionStore(self._pool, self._config)
        self._swap: Swap = CopySwap(self._pool)
        self._tracker = LiveTracker()
        self._pending = PendingSnapshots(self._store, self._tracker, self._drop)
        ranks = ranks_of(model) if process_group is None else sorted(dist.get_process_group_ranks(process_group))
        self._agreement = RankAgreement(ranks, self._config.agreement_timeout_s)
        self._lock = threading.RLock()
        self._is_closed = False
        self._visits = visits_of(model)
        self._visits.caches.add(self)

    @property
    def versions(self) -> list[int]:
        """The retained versions, ascending; named states are in `names`."""
        return self._store.versions

    @property
    def names(self) -> list[str]:
        """The retained named states, sorted."""
        return self._store.names

    def __contains__(self, version: object) -> bool:
        return version in self._store

    @property
    def live_version(self) -> int | None:
        """The newest version known to equal the live parameters; None after a step, or if that is not known."""
        return self._tracker.live_version

    @property
    def nbytes(self) -> int:
        """Bytes of host memory this rank has allocated: versions, parking arena, pool."""
        return self._pool.nbytes

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """A CPU group of the ranks that act together, for small messages; None for one process."""
        return self._agreement.group

    def describe(self) -> str:
        """What is retained, what it costs, and which swap is used and why; for people."""
        return describe(self._store, self._pool, self._swap, self._tracker, self._agreement.ranks)

    def _repr_html_(self) -> str:
        return html_table(self._store, self._tracker, self.describe())

    def snapshot(self, version: Key, *, lazy: bool = False, overwrite: bool = False) -> None:
        """Retain the live parameters and buffers as `version`. Collective.

        Args:
            version: an integer >= 0, or a name such as "reference".
            lazy: copy parameters only when they are about to change; see [Note: life of a version].
            overwrite: replace a retained state of that key.

        Raises:
            VersionExistsError: it is retained and `overwrite` is False.
            CacheBudgetError: beyond `max_versions` or `max_bytes`; nothing was copied or dropped.
            StateInUseError: inside a visit; or lazy, and a trainable parameter has no watched optimizer.
            StateMismatchError: a parameter that should be sharded is not.
            RankDisagreementError: ranks asked for different things, failed, or did not arrive.
        """
        with HeldSignals(), self._lock:
            self._refuse_if_busy("snapshot")
            state, live = self._agreement.prepare(
                f"snapshot({version!r}, lazy={lazy}, overwrite={overwrite})",
                lambda: self._prepare_snapshot(version, lazy=lazy, overwrite=overwrite),
                undo=lambda prepared: self._store.discard(prepared[0]),
            )
            # A lazy snapshot in the closure of a step would be outdated when the step ends: copied at once.
            state.is_pending = lazy and self._tracker.can_know(live)

            def write() -> None:
                state.arena.copy_from(live.buffer_views, start=len(live.parameters))
                if not state.is_pending:
                    state.arena.copy_from(live.parameters)
                self._store.put(state)
                self._tracker.add(state.key, live)

            uninterrupted(write)  # overwriting reuses the arena: half a copy would be a mixed version

    def _prepare_snapshot(self, version: Key, *, lazy: bool, overwrite: bool) -> tuple[StoredState, LiveState]:
        key = checked_key(version)
        live = self._look()
        if lazy:
            self._tracker.refuse_lazy(key, live)
        working_bytes = self._swap.working_bytes(plan_of(live.layout))
        return self._store.reserve(key, live.layout, overwrite=overwrite, working_bytes=working_bytes), live

    def restore(self, version: Key) -> None:
        """Make `version` the live weights for good, buffers included. Collective.

        Raises:
            UnknownVersionError: it is not retained; the message lists what is.
            StateMismatchError: the live model has another layout; nothing was written.
            StateInUseError: inside a visit.
            RankDisagreementError: ranks asked for different things, failed, or did not arrive.
        """
        with HeldSignals(), self._lock:
            self._refuse_if_busy("restore")
            state, live = self._agreement.prepare(f"restore({version!r})", lambda: self._prepare_read(version))
            is_live = self._tracker.is_live(state.key, live)
            if not is_live:
                for cache in self._visits.caches:
                    cache._pending.complete(lambda: live)

            def write() -> None:
                if not is_live:
                    for cache in self._visits.caches:
                        cache._tracker.changed()
                    state.arena.copy_to(live.counted_parameters)
                write_buffers(live, state.arena)
                self._tracker.add(state.key, live)

            uninterrupted(write)
            torch.clear_autocast_cache()

    def materialize(self, version: Key | None = None) -> None:
        """Copy parameters of lazy snapshots that still wait for it, now.

        Args:
            version: one that must be complete afterwards; None for all.

        Raises:
            UnknownVersionError: it is not retained.
            StateInUseError: inside a visit.
        """
        with HeldSignals(), self._lock:
            self._refuse_if_busy("materialize")
            if version is None or self._store.get(version).is_pending:
                self._pending.complete(self._look)

    def retain(self, versions: Iterable[int]) -> None:
        """Drop every integer version that is not in `versions`; named states stay. Unknown ones are ignored.

        Raises:
            StateInUseError: the version being visited is not in `versions`; nothing was dropped.
        """
        keep = {checked_key(version) for version in versions}
        if names := sorted(key for key in keep if isinstance(key, str)):
            raise InputError(f"retain({names}): names are kept until drop(); give integer versions only")
        with HeldSignals(), self._lock:
            self._drop([version for version in self.versions if version not in keep])

    def drop(self, version: Key) -> None:
        """Forget `version`, integer or name; a lazy one that is still pending is never copied.

        Raises:
            UnknownVersionError: it is not retained.
            StateInUseError: it is being visited.
        """
        with HeldSignals(), self._lock:
            self._drop([self._store.get(version).key])

    @contextmanager
    def at(self, version: Key) -> Iterator[nn.Module]:
        """Let the model compute with `version`: `with cache.at(3) as model: ...`. Collective, on both ends.

        The body runs under no_grad and only reads weights: forwards, `full_tensors`, evaluation. Afterwards
        parameters, buffers, train/eval flags and the process's random state are as before, whatever was raised.
        Do not run a backward through the visited version (autograd cannot see that weights went back), forward
        under inference_mode (FSDP2 would keep inference tensors), or step an optimizer that is not watched. A visit
        to a version that is live copies no parameters, so a body that writes to them would change the live model.

        Yields:
            The live module itself.

        Raises:
            UnknownVersionError: it is not retained; the message lists what is.
            StateMismatchError: the live model has another layout (nothing was written), or the body replaced tensors.
            StateInUseError: inside another visit, from another thread during one, or under inference_mode.
            RankDisagreementError: ranks asked for different things, failed, did not arrive, or left differently.
        """
        with self._visits.during(self._model, self._swap, lambda: self._begin_visit(version)) as model:
            yield model
        # A rank that left early would gather with peers that are still inside: mixed weights, in silence.
        self._agreement.compare(f"leave at({version!r})")

    def _begin_visit(self, version: Key) -> Visit:
        def prepare() -> Visit:
            state, live = self._prepare_read(version)
            self._swap.prepare(state.arena.plan)
            is_live = self._tracker.is_live(state.key, live)
            return Visit(state, live, ProcessState.of(self._model), parks_parameters=not is_live)

        with self._lock:
            self._refuse_if_busy("at")
            return self._visits.enter(self._agreement.prepare(f"at({version!r})", prepare))

    @contextmanager
    def receive(self, keys: Iterable[Key]) -> Iterator[dict[Key, dict[str, Tensor]]]:
        """Retain states whose values the body writes into the tensors that it gets, named as by `tensors`. Collective.

        Nothing is retained where the body raises.

        Raises:
            VersionExistsError, CacheBudgetError, StateInUseError, RankDisagreementError: as `snapshot`.
        """
        with self._lock:
            self._refuse_if_busy("receive")
            wanted = [checked_key(key) for key in keys]
            live = self._look()
            states: list[StoredState] = []
            with ExitStack() as undo:
                for key in wanted:
                    state, _ = self._agreement.prepare(
                        f"receive({key!r})",
                        partial(self._prepare_snapshot, key, lazy=False, overwrite=False),
                        undo=lambda prepared: self._store.discard(prepared[0]),
                    )
                    undo.callback(self._store.discard, state)
                    states.append(state)
                yield {state.key: live.dress(state.arena.views) for state in states}
                undo.pop_all()
            for state in states:
                self._store.put(state)

    def watch(self, optimizer: Optimizer) -> None:
        """Learn from `optimizer`'s public step hooks when the live weights change; several may be watched.

        Raises:
            InputError: not a torch optimizer, one without step hooks (a wrapper of another), or one that steps
                parameters which are not this model's.
            StateInUseError: inside a visit.
        """
        with HeldSignals(), self._lock:
            self._refuse_if_busy("watch")
            self._tracker.watch(optimizer, self._look(), self)

    def mark_live_changed(self) -> None:
        """Tell the cache that live weights were edited by hand (not by a watched optimizer or `restore`).

        Raises:
            StateInUseError: inside a visit; or lazy snapshots were pending, whose values are gone with the edit:
                they have been dropped. Call `materialize()` before editing.
        """
        with HeldSignals(), self._lock:
            self._refuse_if_busy("mark_live_changed")
            self._tracker.changed()
            self._pending.give_up("live weights were edited", "editing weights by hand")

    def before_step(self) -> None:
        """Called by the step hook of a watched optimizer: complete lazy snapshots, then count as changed.

        Raises:
            StateInUseError: inside a visit, before the step changes anything.
        """
        with HeldSignals(), self._lock:
            self._refuse_if_busy("optimizer.step")
            self._pending.complete(self._look)
            self._tracker.begin_step()

    def after_step(self) -> None:
        """Called by the step hook of a watched optimizer."""
        self._tracker.end_step()

    def close(self) -> None:
        """Drop everything, stop watching, give memory and the process group back. Idempotent.

        Raises:
            StateInUseError: inside a visit.
        """
        if self._is_closed:
            return
        with HeldSignals(), self._lock:
            self._refuse_if_busy("close")
            self._tracker.close()
            self._store.clear()
            self._swap.release()
            self._pool.trim()
            self._agreement.close()
            self._visits.caches.discard(self)
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def settled(self, operation: str, versions: Sequence[Key] = ()) -> Iterator[LiveState]:
        """See `ReadableStates`."""

        def look() -> LiveState:
            live = self._look()
            for state in map(self._store.get, versions):
                state.layout.check(live.layout, state.label)
            # Before ranks agree: one that cannot copy must not leave the others waiting in what they gather.
            self._pending.complete(lambda: live)
            return live

        with HeldSignals(), self._lock:
            self._refuse_if_busy(operation)
            yield self._agreement.prepare(operation, look)

    def _refuse_if_busy(self, operation: str) -> None:
        if self._is_closed:
            raise StateInUseError(f"{operation} on a closed cache; build a new StateCache")
        self._visits.refuse_if_busy(operation)

    def _prepare_read(self, version: Key) -> tuple[StoredState, LiveState]:
        state = self._store.get(version)
        live = self._look()
        state.layout.check(live.layout, state.label)
        return state, live

    def _look(self) -> LiveState:
        if torch.is_inference_mode_enabled():
            raise StateInUseError("not under torch.inference_mode(): its tensors cannot be trained; use no_grad()")
        settle(self._model)
        live = capture(self._model)
        check_sharded(live, self._sharded)
        return live

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._visits.refuse_drop(self._store.get(key))
        for key in keys:
            self._store.drop(key)
            self._tracker.remove(key)
