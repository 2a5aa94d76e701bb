"""Weights on their way: bounded pieces of named tensors in one block of memory.

Owns packing (any tensor is cut into byte ranges where it does not fit) and unpacking into a model by name. It promises
that a model is complete when its last bucket has been taken, or an error names what is missing, extra or of another
shape. Where the memory lies, and who waits for whom, is `weight_sync.py`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_async.checks import require_whole
from fsdp_async.errors import InputError, StateMismatchError, UnsupportedModelError

ALIGNMENT = 64


@dataclass(frozen=True)
class BucketEntry:
    """Bytes `start..stop` of the flattened tensor `name`, at `offset` of the bucket's memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class WeightBucket:
    """One piece of a publication. `memory` is the handle of a shared block, or a uint8 tensor in this process."""

    version: int
    index: int
    is_last: bool
    entries: tuple[BucketEntry, ...]
    memory: str | Tensor


@dataclass
class Piece:
    """Entries of one bucket with the tensors that they are cut from, before they are copied anywhere."""

    entries: list[tuple[BucketEntry, Tensor]]
    num_bytes: int = 0

    def copy_to(self, memory: Tensor) -> None:
        """Copy all bytes into `memory` (uint8)."""
        for entry, tensor in self.entries:
            size = entry.stop - entry.start
            memory[entry.offset : entry.offset + size].copy_(_bytes(tensor)[entry.start : entry.stop])


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Piece]:
    """Cut named tensors into pieces of at most `bucket_bytes`, in order; holds one piece's tensors at a time.

    Raises:
        InputError: `bucket_bytes` is no integer of at least 1.
    """
    require_whole("bucket_bytes", bucket_bytes, 1, InputError)
    piece = Piece([])
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        start = 0
        while start < size or size == 0:
            offset = -(-piece.num_bytes // ALIGNMENT) * ALIGNMENT
            if offset >= bucket_bytes:
                yield piece
                piece, offset = Piece([]), 0
            stop = min(size, start + bucket_bytes - offset)
            entry = BucketEntry(name, tensor.dtype, tuple(tensor.shape), start, stop, offset)
            piece.entries.append((entry, tensor))
            piece.num_bytes = offset + stop - start
            start = stop
            if size == 0:
                break
    if piece.entries:
        yield piece


class WeightReceiver:
    """Copies buckets into `model`, by the names of its `state_dict`.

    A tensor that is not laid out as it is published (transposed, sliced, lazily conjugated) is written once all of it
    has arrived. A publication that broke off is forgotten when the next one begins.

    Args:
        model: takes what is published.
        casts: what is floating-point may be published in another floating dtype than the model's, and is rounded.

    Raises:
        UnsupportedModelError: elements of a tensor share memory, so that it cannot hold what is published.
    """

    def __init__(self, model: nn.Module, *, casts: bool = False) -> None:
        self._casts = casts
        self._targets: dict[str, Tensor] = dict(model.state_dict())
        for name, target in self._targets.items():
            _refuse_overlap(name, target)
        self._arrived: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        """Bytes by name: of what came so far, and of the whole."""
        self._staged: dict[str, Tensor] = {}
        self._next: tuple[int, int] | None = None
        """(version, index) of the bucket that goes on with what has begun."""

    def take(self, bucket: WeightBucket, memory: Tensor) -> None:
        """Copy one bucket out of `memory` (uint8).

        Raises:
            StateMismatchError: a bucket out of order, a name that the model lacks or of another shape or dtype (nothing
                of the bucket is copied), or, with the last bucket, names that never came.
        """
        if bucket.index and (bucket.version, bucket.index) != self._next:
            raise StateMismatchError(
                f"bucket {bucket.index} of version {bucket.version} came where (version, bucket) {self._next} was to "
                "follow; publish a version from its first bucket on, each bucket once"
            )
        for entry in bucket.entries:
            self._check(entry, bucket.version)
        if bucket.index == 0:
            self._arrived.clear()
            self._staged.clear()
        self._next = (bucket.version, bucket.index + 1)
        for entry in bucket.entries:
            self._write(entry, memory[entry.offset : entry.offset + entry.stop - entry.start])
        if bucket.is_last:
            self._next = None
            self._check_complete(bucket.version)

    def _write(self, entry: BucketEntry, piece: Tensor) -> None:
        target = self._targets[entry.name]
        self._arrived[entry.name] = self._arrived.get(entry.name, 0) + len(piece)
        self._sizes[entry.name] = target.numel() * entry.dtype.itemsize
        if _is_plain(target) and target.dtype == entry.dtype:
            _bytes(target)[entry.start : entry.stop].copy_(piece)
            return
        staged = self._staged.get(entry.name)
        if staged is None:
            staged = torch.empty(target.shape, dtype=entry.dtype, device=target.device)
            self._staged[entry.name] = staged
        _bytes(staged)[entry.start : entry.stop].copy_(piece)
        if self._arrived[entry.name] == self._sizes[entry.name]:
            with torch.no_grad():
                target.copy_(self._staged.pop(entry.name))

    def _check(self, entry: BucketEntry, version: int) -> None:
        target = self._targets.get(entry.name)
        if target is None:
            raise StateMismatchError(
                f"version {version}: published {entry.name!r}, which this model does not have; it has "
                f"{sorted(self._targets)}"
            )
        casts = self._casts and target.is_floating_point() and entry.dtype.is_floating_point
        if tuple(target.shape) != entry.shape or not (casts or target.dtype == entry.dtype):
            raise StateMismatchError(
                f"version {version}: {entry.name!r} was published as {entry.dtype} {entry.shape}, this model expects "
                f"{target.dtype} {tuple(target.shape)}; were local shards published instead of full tensors?"
            )

    def _check_complete(self, version: int) -> None:
        """A tied tensor arrives under its first name only; all names of its memory are then complete."""
        whole = {_identity(self._targets[name]) for name, size in self._arrived.items() if size == self._sizes[name]}
        missing = sorted(name for name, target in self._targets.items() if _identity(target) not in whole)
        if missing:
            raise StateMismatchError(f"version {version} was published without all of {missing}; publish every tensor")


def _bytes(tensor: Tensor) -> Tensor:
    """The values of a tensor as uint8: its memory if it is plain, else a copy in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _refuse_overlap(name: str, tensor: Tensor) -> None:
    """Sorted by stride, every step must pass over all that the smaller steps reach."""
    if tensor.is_contiguous() or not tensor.numel():
        return
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reached:
            raise UnsupportedModelError(
                f"{name!r} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: some of its elements share "
                "memory, so it cannot hold weights that are published; clone it before the engine gets the model"
            )
        reached += stride * (size - 1)


def _identity(tensor: Tensor) -> Any:
    return (tensor.data_ptr(), tuple(tensor.shape)) if tensor.numel() else id(tensor)
