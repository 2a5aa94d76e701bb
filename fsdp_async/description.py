"""A cache in words."""

from __future__ import annotations

from fsdp_async.arena import ArenaPool
from fsdp_async.live_tracker import LiveTracker
from fsdp_async.swaps import Swap
from fsdp_async.version_store import VersionStore


def describe(store: VersionStore, pool: ArenaPool, swap: Swap, tracker: LiveTracker, ranks: list[int]) -> str:
    """What is retained, what it costs, and which swap is used and why; for people."""
    pending = [state.key for state in store.pending]
    used = pool.used_nbytes
    return "\n".join([
        f"versions {store.versions}, names {store.names}, pending {pending}, live_version {tracker.live_version}",
        f"bytes: {pool.nbytes} = {store.nbytes} versions + {used - store.nbytes} parking + {pool.free_nbytes} pool "
        f"(max_bytes {pool.max_bytes}), {'pinned' if pool.pin else 'pageable'}",
        f"swap {swap.name}: {swap.reason}",
        f"ranks {ranks or 'this process alone'}, watched optimizers {tracker.num_watched}",
    ])  # fmt: skip
