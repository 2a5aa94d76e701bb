"""Who computes with an old version of a model now.

Owns the one visit that a model may have at a time, whichever of its caches makes it, and the order in which a visit is
undone. Promises: whatever is raised in the body, or by a signal anywhere, the live state comes back, then flags and
generators, then the model is free again. What is parked and shown is the swap's business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from fsdp_async.dtensor_io import LiveState
from fsdp_async.errors import StateInUseError
from fsdp_async.interrupts import HeldSignals
from fsdp_async.swaps import ProcessState, Swap
from fsdp_async.version_store import StoredState


@dataclass(frozen=True)
class Visit:
    """What a visit begins with: the version, the settled live model, and what a forward changes besides tensors."""

    state: StoredState
    live: LiveState
    process: ProcessState
    parks_parameters: bool


class ModelVisits:
    """The visit of one model, if there is one, and the caches that it has."""

    def __init__(self) -> None:
        self.caches: WeakSet[Any] = WeakSet()
        self._visited: StoredState | None = None
        self._thread = ""

    def refuse_drop(self, state: StoredState) -> None:
        """A state that the model shows now is in use.

        Raises:
            StateInUseError: it is.
        """
        if self._visited is state:
            raise StateInUseError(f"{state.label} is being visited and cannot be dropped; leave it first")

    def refuse_if_busy(self, operation: str) -> None:
        """Only one thing at a time.

        Raises:
            StateInUseError: the model does not hold its own weights now.
        """
        if self._visited is not None:
            raise StateInUseError(
                f"{operation} inside a visit to {self._visited.label} (by thread {self._thread!r}; now "
                f"{threading.current_thread().name!r}): the live model does not hold its own weights there. "
                "Leave the visit first; visits do not nest"
            )

    def enter(self, visit: Visit) -> Visit:
        """From here on the model is busy."""
        self._visited, self._thread = visit.state, threading.current_thread().name
        return visit

    @contextmanager
    def during(self, model: nn.Module, swap: Swap, begin: Callable[[], Visit]) -> Iterator[nn.Module]:
        """Let `model` compute with the version of the visit that `begin` enters."""
        with HeldSignals() as signals, torch.no_grad():
            visit = begin()
            has_failed = True
            try:
                swap.park(visit.live, parameters=visit.parks_parameters)
                try:
                    swap.show(visit.live, visit.state.arena)
                    torch.clear_autocast_cache()
                    signals.is_open = True
                    yield model
                    signals.is_open = has_failed = False
                finally:
                    signals.is_open = False
                    torch.clear_autocast_cache()
                    swap.put_back(model, visit.live, failed=has_failed)
            finally:
                try:
                    visit.process.put_back()
                finally:
                    self._visited = None


_visits: WeakKeyDictionary[nn.Module, ModelVisits] = WeakKeyDictionary()


def visits_of(model: nn.Module) -> ModelVisits:
    """The same for all caches of `model`."""
    return _visits.setdefault(model, ModelVisits())
