"""What a set of named tensors holds: its fingerprint, and how two of them differ.

Owns the definition of a fingerprint, which knows nothing of ranks, devices or files, and the comparison of two states.
Tensors are asked for one at a time, whole, in order of names, so that one of them must fit into memory and not all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_async.errors import InputError

NUM_SHOWN = 20


class LazyTensors(Mapping[str, Tensor]):
    """Whole tensors on the CPU by name, each made when it is asked for, and not kept. Names come sorted.

    Args:
        makers: by name, what makes the tensor; may be collective, so that ranks ask for the same names in one order.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = dict(sorted(makers.items()))

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 of each tensor's dtype, shape and bytes, by name; `str` is one digest of them all."""

    digests: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        whole = hashlib.sha256()
        for name, digest in self.digests:
            whole.update(f"{len(name)}:{name}:{digest};".encode())
        return whole.hexdigest()

    def differing(self, other: Fingerprint) -> list[str]:
        """Sorted names of tensors that differ or that only one of the two has."""
        mine, theirs = dict(self.digests), dict(other.digests)
        return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def fingerprint_of(tensors: Mapping[str, Tensor]) -> Fingerprint:
    """The same for the same names, dtypes, shapes and bits: -0.0 is not 0.0, and one NaN is not another."""
    return Fingerprint(tuple((name, digest_of(tensors[name])) for name in sorted(tensors)))


@dataclass(frozen=True)
class TensorDifference:
    """Elements of which any bit differs, and the largest |a - b| among them (nan: a NaN stands on one side only)."""

    name: str
    num_different: int
    num_elements: int
    max_abs: float


@dataclass(frozen=True)
class StateDifference:
    """What distinguishes state `a` from state `b`.

    `changed` is sorted by `max_abs`, largest first (nan before all); `other_form` holds names with another shape or
    dtype.
    """

    changed: tuple[TensorDifference, ...]
    num_equal: int
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    other_form: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.only_in_a or self.only_in_b or self.other_form)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, num_shown: int | None = NUM_SHOWN) -> list[str]:
        """For people; None shows all tensors."""
        num_tensors = len(self.changed) + self.num_equal
        lines = [f"{len(self.changed)} of {num_tensors} tensors differ" if self.changed else "no tensor differs"]
        width = max((len(row.name) for row in self.changed[:num_shown]), default=0)
        for row in self.changed[:num_shown]:
            share = f"{row.num_different:,} of {row.num_elements:,}"
            amount = "NaN on one side" if math.isnan(row.max_abs) else f"by at most {row.max_abs:.3g}"
            lines.append(f"  {row.name:<{width}}  {share:>24} elements, {amount}")
        if hidden := len(self.changed[num_shown:] if num_shown is not None else ()):
            lines.append(f"  and {hidden} more, by less")
        for words, names in (
            ("only in a", self.only_in_a),
            ("only in b", self.only_in_b),
            ("of another shape or dtype", self.other_form),
        ):
            if names:
                shown = names if num_shown is None else names[:num_shown]
                lines.append(f"{len(names)} {words}: {', '.join(shown)}{', ...' if len(names) > len(shown) else ''}")
        return lines


def difference_of(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> StateDifference:
    """Compare tensor by tensor; each name is asked for once on either side, in order."""
    changed: list[TensorDifference] = []
    other_form: list[str] = []
    num_equal = 0
    common = sorted(a.keys() & b.keys())
    for name in common:
        left, right = a[name], b[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            other_form.append(name)
        elif (row := _compare(name, left, right)) is not None:
            changed.append(row)
        else:
            num_equal += 1
    changed.sort(key=lambda row: (not math.isnan(row.max_abs), -row.max_abs, row.name))
    only_in_a, only_in_b = (tuple(sorted(x.keys() - y.keys())) for x, y in ((a, b), (b, a)))
    return StateDifference(tuple(changed), num_equal, only_in_a, only_in_b, tuple(other_form))


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes [numel, itemsize] of a CPU tensor of any dtype, uint8."""
    if tensor.device.type != "cpu":
        raise InputError(f"a tensor on {tensor.device} has no bytes here; move it to the CPU")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), tensor.dtype.itemsize)


def digest_of(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(bits_of(tensor).numpy().data)
    return digest.hexdigest()


def _compare(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    differs = (bits_of(a) != bits_of(b)).any(dim=1)
    num_different = int(differs.sum())
    if not num_different:
        return None
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    left, right = (x.reshape(-1)[differs].to(wide) for x in (a, b))
    both_nan = left.isnan() & right.isnan()
    gaps = (left - right).abs().masked_fill(both_nan, 0.0)
    return TensorDifference(name, num_different, a.numel(), float(gaps.max()))
