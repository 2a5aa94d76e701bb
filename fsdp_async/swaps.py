"""How a model comes to compute with a stored version, and how the live state comes back.

Owns: the `Swap` interface; `CopySwap`, the one that works for every layout and is the oracle for others; what
surrounds any visit (buffers, train/eval flags, random state).

Promises: whatever is raised, on the way in, inside or on the way out, the live tensors end up bit for bit as
they were; a swap allocates in `prepare`, before anything is written.

Does not: choose versions, talk to other ranks, or know the optimizer. Why copying is safe between a forward
and its backward: [Note: training-safe copies] in `dtensor_io`.

A visit, seen from here (`state_cache` calls in this order):

    prepare   allocate                    nothing written yet; may fail
    park      live -> parking arena       live untouched
    show      version -> live tensors     from here on `put_back` runs, whatever happens
    (body)
    put_back  parking arena -> live tensors
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_async.arena import Arena, ArenaPlan, ArenaPool
from fsdp_async.dtensor_io import BufferSlot, LiveState, capture, local_view, settle
from fsdp_async.errors import StateMismatchError
from fsdp_async.interrupts import HeldSignals

T = TypeVar("T")

MAX_INTERRUPTS = 100
"""How many Ctrl-C may hit one write of weights before it gives up; each costs one more copy."""


class Swap(Protocol):
    """One way to visit a version. `live` is the settled model as it was when the visit began."""

    name: str
    reason: str
    """Why this swap is used, for people."""

    def working_bytes(self, plan: ArenaPlan) -> int:
        """Bytes the swap holds besides the versions."""

    def prepare(self, plan: ArenaPlan) -> None:
        """Allocate what a visit needs. May raise RuntimeError (out of memory)."""

    def park(self, live: LiveState, *, parameters: bool) -> None:
        """Keep the live state aside, untouched; only buffers if the visit will not change parameters."""

    def show(self, live: LiveState, version: Arena) -> None:
        """Make the model compute with what was parked replaced by `version`."""

    def put_back(self, model: nn.Module, live: LiveState, *, failed: bool) -> None:
        """Make the live state whole again; `failed` tells that the body raised."""

    def release(self) -> None:
        """Give back what `prepare` allocated."""


class CopySwap:
    """Parks the live shards in an arena, copies the version in, and copies the live shards back.

    Args:
        pool: where the parking arena comes from; it is kept for the next visit.
    """

    name = "copy"
    reason = "works for every layout; costs three copies of the shards a visit, none where the version is live"

    def __init__(self, pool: ArenaPool) -> None:
        self._pool = pool
        self._parking: Arena | None = None
        self._num_parked = 0

    def working_bytes(self, plan: ArenaPlan) -> int:
        """The parking arena: as large as one version."""
        return plan.nbytes

    def prepare(self, plan: ArenaPlan) -> None:
        """Take the parking arena, once."""
        if self._parking is not None and self._parking.plan != plan:
            self.release()
        if self._parking is None:
            self._parking = self._pool.take(plan)

    def park(self, live: LiveState, *, parameters: bool) -> None:
        """Copy the live shards and buffers to the parking arena."""
        self._num_parked = len(live.parameters) if parameters else 0
        self._arena.copy_from(live.parameters[: self._num_parked])
        self._arena.copy_from(live.buffer_views, start=len(live.parameters))

    def show(self, live: LiveState, version: Arena) -> None:
        """Copy the version into the live shards and buffers."""
        version.copy_to(live.parameters[: self._num_parked])
        write_buffers(live, version)

    def put_back(self, model: nn.Module, live: LiveState, *, failed: bool) -> None:
        """Copy the parked shards and buffers back, into the objects the visit began with."""

        def write() -> LiveState:
            self._arena.copy_to(live.parameters[: self._num_parked])
            give_buffers_back(live, self._arena)
            settle(model, after_failure=failed)
            _return_storage(live)
            now = capture(model)
            self._write_moved(live, now)
            return now

        _refuse_replaced_tensors(live, uninterrupted(write))

    def release(self) -> None:
        """Give the parking arena back."""
        if self._parking is not None:
            self._pool.give(self._parking)
            self._parking = None

    @property
    def _arena(self) -> Arena:
        if self._parking is None:
            raise AssertionError("prepare() comes before a visit")
        return self._parking

    def _write_moved(self, live: LiveState, now: LiveState) -> None:
        # A body that converts the model (or loads a checkpoint) gives its tensors new storage.
        found = {spec.fqn: (spec, view) for spec, view in zip(now.layout.parameters, now.parameters, strict=True)}
        for index, spec in enumerate(live.layout.parameters[: self._num_parked]):
            now_spec, view = found.get(spec.fqn, (None, None))
            if view is not None and now_spec == spec and view.data_ptr() != live.parameters[index].data_ptr():
                self._arena.copy_to([view], start=index)


def _return_storage(live: LiveState) -> None:
    """Plain parameters get the very storage (and dtype) back that they had."""
    for owner, view in zip(live.owners, live.parameters, strict=True):
        if not isinstance(owner, DTensor) and (owner.data_ptr(), owner.dtype) != (view.data_ptr(), view.dtype):
            owner.data = view


def _refuse_replaced_tensors(live: LiveState, now: LiveState) -> None:
    live.layout.check(now.layout, "after the visit, the live state")
    for spec, before, after in zip(live.layout.tensors, live.owners, now.owners, strict=False):
        if before is not after:
            raise StateMismatchError(
                f"the body of the visit replaced parameter {spec.fqn!r}: expected the same Parameter object, found "
                "another. The live values are back in the original object, which the optimizer still steps; assign "
                "it to the module again, and only read the model inside a visit"
            )


def write_buffers(live: LiveState, version: Arena) -> None:
    """Give the live buffers the values they had in `version` (slots behind the parameters)."""
    for index, slot in enumerate(live.buffers, start=live.layout.num_parameters):
        if slot.is_overlapping:
            _assign(slot, version.views[index].to(slot.tensor.device, copy=True))
        else:
            version.copy_to([local_view(slot.tensor)], start=index)


def give_buffers_back(live: LiveState, parked: Arena) -> None:
    """Register the live buffer objects again, with the values they had."""
    for index, slot in enumerate(live.buffers, start=live.layout.num_parameters):
        _assign(slot, slot.tensor)
        if not slot.is_overlapping:
            parked.copy_to([local_view(slot.tensor)], start=index)


def _assign(slot: BufferSlot, value: Tensor) -> None:
    for module, name in slot.owners:
        if getattr(module, name, None) is not value:
            setattr(module, name, value)


def uninterrupted(write: Callable[[], T]) -> T:
    """Finish `write` (which must be repeatable) even if something is raised in it, and raise that afterwards.

    Half-written weights are worse than a late Ctrl-C. An error, other than an interrupt, is tried once more.

    Raises:
        BaseException: the first thing that was raised; `write` is complete, unless an error came twice.
    """
    with HeldSignals():
        return _repeated(write)


def _repeated(write: Callable[[], T]) -> T:
    # What no signal handler raises (a debugger, another thread) may still come in between.
    first: BaseException | None = None
    for _ in range(MAX_INTERRUPTS):
        try:
            result = write()
        except BaseException as raised:
            if isinstance(raised, Exception) and isinstance(first, Exception):
                raise
            first = first or raised
        else:
            break
    if first is not None:
        raise first
    return result


@dataclass(frozen=True)
class ProcessState:
    """What a forward changes besides tensors: train/eval flags and random generators."""

    flags: tuple[tuple[nn.Module, bool], ...]
    torch_state: Tensor
    device_states: tuple[tuple[torch.device, Tensor], ...]
    numpy_state: dict[str, Any]
    python_state: Any

    @classmethod
    def of(cls, model: nn.Module) -> ProcessState:
        """The state now: flags of every submodule; generators of torch, numpy, python and the model's devices."""
        devices = {p.device for p in model.parameters() if p.device.type != "cpu"}
        return cls(
            flags=tuple((module, module.training) for module in model.modules()),
            torch_state=torch.get_rng_state(),
            device_states=tuple((d, torch.get_device_module(d).get_rng_state(d)) for d in devices),
            numpy_state=dict(np.random.get_state(legacy=False)),
            python_state=random.getstate(),
        )

    def put_back(self) -> None:
        """Set everything as it was."""
        for module, training in self.flags:
            module.training = training
        torch.set_rng_state(self.torch_state)
        for device, state in self.device_states:
            torch.get_device_module(device).set_rng_state(state, device)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)
