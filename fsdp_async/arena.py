"""Host memory for versions: one storage per arena, exact size, pre-touched, pooled, pinned where it helps.

Owns: the plan of where tensors lie in an arena, allocation, pinning, the pool of freed arenas.

Promises: no two arenas share storage, and none shares storage with a live tensor; `nbytes` is what is really
allocated; slots begin at multiples of 64 bytes. A machine that cannot pin gets pageable memory, the same
results, and one warning.

Does not: know versions, budgets or FSDP. Not thread-safe: its user holds a lock.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLOT_ALIGNMENT_BYTES = 64
"""A cache line, and the widest vector load of a CPU."""

MAX_FREE_ARENAS = 2
"""One for the version that leaves while the next arrives, one to spare; more would only hold memory."""

Pin = Callable[[Tensor], Callable[[], None]]
"""Page-locks a storage; returns what undoes it. Raises RuntimeError where that fails."""


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies: offset in bytes, shape in elements."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ArenaPlan:
    """The slots of an arena and its size in bytes."""

    slots: tuple[Slot, ...]
    nbytes: int


def plan_arena(tensors: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> ArenaPlan:
    """Lay tensors, given as (shape, dtype), one behind the other; padding only up to the next alignment."""
    slots: list[Slot] = []
    offset = end = 0
    for shape, dtype in tensors:
        slots.append(Slot(offset, shape, dtype))
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        offset = -(-end // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    return ArenaPlan(tuple(slots), end)


class Arena:
    """One block of host memory and the tensors that lie in it.

    Attributes:
        plan: sizes and offsets.
        views: one contiguous tensor per slot, on the CPU, all in `storage`.
        storage: uint8 [plan.nbytes].
        is_pinned: whether the pages are locked.
    """

    def __init__(self, plan: ArenaPlan, pin: Pin | None = None) -> None:
        """Allocate and touch every page, so that the first snapshot is as fast as the tenth.

        Raises:
            RuntimeError: `pin` failed, or the machine is out of memory.
        """
        self.plan = plan
        # zeros() maps the shared zero page and would be touched by the first copy; fill_ writes. Outside
        # inference_mode whatever the caller does: an inference tensor could not be rewritten later.
        with torch.inference_mode(False), torch.no_grad():
            self.storage = torch.empty(plan.nbytes, dtype=torch.uint8).fill_(0)
            self.views = [_view(self.storage, slot) for slot in plan.slots]
        self.is_pinned = False
        if pin is not None and plan.nbytes:
            # Runs before the storage goes; not at exit, when the driver may be gone already.
            weakref.finalize(self, pin(self.storage)).atexit = False
            self.is_pinned = True

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.storage.untyped_storage().nbytes()

    def copy_from(self, tensors: Sequence[Tensor], start: int = 0) -> None:
        """Copy `tensors` into slots `start`, `start + 1`, ...; complete on return."""
        self._copy([(view, tensor) for view, tensor in zip(self.views[start:], tensors, strict=False)])

    def copy_to(self, tensors: Sequence[Tensor], start: int = 0) -> None:
        """Copy slots `start`, `start + 1`, ... into `tensors`; complete on return."""
        self._copy([(tensor, view) for view, tensor in zip(self.views[start:], tensors, strict=False)])

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        # A loop of copy_ is as fast as the private foreach copy.
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=self.is_pinned)
        if any(target.device != source.device for target, source in pairs):
            # FSDP's all-gather streams need not wait for the stream these copies ran on.
            torch.accelerator.synchronize()


def _view(storage: Tensor, slot: Slot) -> Tensor:
    nbytes = torch.Size(slot.shape).numel() * slot.dtype.itemsize
    return storage[slot.offset : slot.offset + nbytes].view(slot.dtype).view(slot.shape)


class ArenaPool:
    """Hands out arenas and reuses those of equal size that came back.

    Args:
        pin: how memory is pinned, or None for pageable memory.
        max_bytes: free arenas are released rather than let `nbytes` pass this; None for no limit. Those in use
            are their user's to bound.
    """

    def __init__(self, pin: Pin | None = None, max_bytes: int | None = None) -> None:
        self.pin = pin
        self.max_bytes = max_bytes
        self._free: list[Arena] = []
        self._used: dict[int, Arena] = {}

    @property
    def used_nbytes(self) -> int:
        """Bytes of the arenas handed out."""
        return sum(arena.nbytes for arena in self._used.values())

    @property
    def free_nbytes(self) -> int:
        """Bytes kept for reuse."""
        return sum(arena.nbytes for arena in self._free)

    @property
    def nbytes(self) -> int:
        """All bytes allocated."""
        return self.used_nbytes + self.free_nbytes

    def take(self, plan: ArenaPlan) -> Arena:
        """An arena for `plan`; what it holds is undefined. Allocates only if none of that plan is free.

        Raises:
            RuntimeError: the machine is out of memory.
        """
        for index, arena in enumerate(self._free):
            if arena.plan == plan:
                del self._free[index]
                break
        else:
            arena = self._allocate(plan)
        self._used[id(arena)] = arena
        return arena

    def give(self, arena: Arena) -> None:
        """Take an arena back; at most `MAX_FREE_ARENAS` are kept, the most recent ones."""
        del self._used[id(arena)]
        self._free = [*self._free, arena][-MAX_FREE_ARENAS:]

    def trim(self, max_free_bytes: int = 0) -> None:
        """Release free arenas, oldest first, until at most `max_free_bytes` are kept."""
        while self._free and self.free_nbytes > max_free_bytes:
            del self._free[0]

    def _allocate(self, plan: ArenaPlan) -> Arena:
        if self.max_bytes is not None:
            self.trim(max(0, self.max_bytes - self.used_nbytes - plan.nbytes))
        if self.pin is not None:
            try:
                return Arena(plan, self.pin)
            except RuntimeError as error:
                self.pin = None  # one warning, not one per version
                warnings.warn(
                    f"pinning {plan.nbytes} bytes of host memory failed ({error}); versions are kept in pageable "
                    "memory: the same results, slower copies. Set pin_memory=False to silence this",
                    RuntimeWarning, stacklevel=2,
                )  # fmt: skip
        return Arena(plan)


def register_with_cuda(storage: Tensor) -> Callable[[], None]:
    """Page-lock `storage` in place.

    Registered rather than allocated pinned, because PyTorch's pinned allocator rounds sizes up to a power of
    two: up to twice the memory.

    Returns:
        A function that unlocks it; call it while the storage is alive.

    Raises:
        RuntimeError: CUDA refused.
    """
    runtime = torch.cuda.cudart()
    address = storage.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, storage.nbytes, 0)))

    def unregister() -> None:
        runtime.cudaHostUnregister(address)

    return unregister


def choose_pin(pin_memory: bool | None, devices: Iterable[torch.device]) -> Pin | None:
    """How to pin host memory for a model on `devices`.

    Args:
        pin_memory: None pins where tensors live on a CUDA device (nothing to gain elsewhere: silent); True asks
            for it and warns where it cannot be had; False never pins.
        devices: of the model's tensors.
    """
    if pin_memory is False:
        return None
    if torch.cuda.is_available() and (pin_memory or any(device.type == "cuda" for device in devices)):
        return register_with_cuda
    if pin_memory:
        warnings.warn(
            "pin_memory=True, but this machine has no CUDA device; versions are kept in pageable memory, with the "
            "same results. Leave pin_memory unset to pin only where it helps",
            RuntimeWarning, stacklevel=3,
        )  # fmt: skip
    return None
