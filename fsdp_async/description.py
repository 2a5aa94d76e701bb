"""A cache in words, and as a table for notebooks."""

from __future__ import annotations

from html import escape

from fsdp_async.arena import ArenaPool
from fsdp_async.live_tracker import LiveTracker
from fsdp_async.swaps import Swap
from fsdp_async.version_store import StoredState, VersionStore


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


def html_table(store: VersionStore, tracker: LiveTracker, description: str) -> str:
    """Retained states in the order in which they were taken, and `description` below. Asks no other rank."""
    rows = "".join(f"<tr>{_cells(state, tracker)}</tr>" for state in store.states)
    none = "<tr><td colspan='4'>no version is retained</td></tr>"
    heads = "".join(f"<th>{name}</th>" for name in ("version", "parameters", "tensors", "bytes on this rank"))
    return f"<table><tr>{heads}</tr>{rows or none}</table><pre>{escape(description)}</pre>"


def _cells(state: StoredState, tracker: LiveTracker) -> str:
    held = "those of the live model, copied before they change" if state.is_pending else "copied"
    if tracker.holds(state.key) and not state.is_pending:
        held = "copied, equal to the live ones"
    values = (state.key, held, len(state.layout.tensors), f"{state.arena.nbytes:,}")
    return "".join(f"<td>{escape(str(value))}</td>" for value in values)
