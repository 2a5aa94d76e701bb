"""Facts about a live model: its tensors, the local shard of each, and how to bring FSDP to rest.

Owns: enumerating parameters and buffers (tied ones once), the layout that two states must share, the
writable local view of a tensor, resharding, and reading full tensors one at a time.

Promises: nothing here writes a weight; every view it hands out aliases the storage that FSDP2 all-gathers
from; a tensor that cannot be handled is refused by name.

Does not: store copies (`arena`), decide when to copy (`state_cache`), or know the optimizer.

[Note: training-safe copies]
Four facts make it safe to overwrite live weights for a while and put them back, also between a forward and
its backward:

1. FSDP2 computes with *unsharded* copies and re-gathers them from the local shards. `to_local()` under
   no_grad aliases a shard's storage, so a plain `copy_` into it is seen by the next all-gather. But a module
   with `reshard_after_forward=False` (the root, by default) keeps its unsharded copy, which would be stale:
   hence `settle` before every read or write. The backward gathers again and frees again, as it always does.
2. An all-gather that was started early (`unshard(async_op=True)`, explicit prefetch, a forward that raised
   half way) holds old values and is used by the next forward. No public call shows it; `reset_iter_state`
   on the root drops it, ends a failed forward, and costs microseconds. Between a forward and its backward
   it only drops the order of the backward's prefetch, not a number. It would drop sums that HSDP keeps
   between micro-batches, so with more than one mesh axis it is called only after a failure.
3. Autograd counts in-place writes and refuses a backward after one, even if the bytes are back. Writes go
   through `.data`, which has a counter of its own: safe because every visit puts the bytes back, and because
   the body of a visit runs under no_grad, so no graph can hold on to a visited version. `restore` changes the
   weights for good and is counted: a backward of a plain module's older graph is refused by autograd.
4. Autocast caches casts of the weights for the length of its context, under no_grad too: a visit empties
   that cache on both sides.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_async.errors import StateMismatchError, UnsupportedModelError

Kind = Literal["parameter", "buffer"]


@dataclass(frozen=True)
class TensorSpec:
    """What must agree before bytes move between a stored and a live tensor. Shapes in elements."""

    fqn: str
    kind: Kind
    dtype: torch.dtype
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    mesh: str | None
    placements: tuple[str, ...] | None


@dataclass(frozen=True)
class Layout:
    """The distinct tensors of a model in a fixed order (parameters, then buffers) and who shares them.

    `aliases` holds (name, first name) of every tied parameter or shared buffer.
    """

    tensors: tuple[TensorSpec, ...]
    num_parameters: int
    aliases: tuple[tuple[str, str], ...]

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """The parameters' part of `tensors`."""
        return self.tensors[: self.num_parameters]

    def check(self, live: Layout, label: str) -> None:
        """Refuse a live model that cannot take this stored state.

        Args:
            live: layout of the live model now.
            label: names the stored state, such as "version 3".

        Raises:
            StateMismatchError: names label, fqn, what was expected (stored) and what was found (live).
        """
        if self == live:
            return
        self._check_sharing(live, label)
        stored_by_name = {spec.fqn: spec for spec in self.tensors}
        live_by_name = {spec.fqn: spec for spec in live.tensors}
        for fqn, spec in stored_by_name.items():
            _check_spec(spec, live_by_name.get(fqn), label)
        extra = [spec for fqn, spec in live_by_name.items() if fqn not in stored_by_name]
        if extra:
            raise StateMismatchError(
                f"{label} has no {extra[0].kind} {extra[0].fqn!r}: expected {len(self.tensors)} tensors as stored, "
                f"found {len(live.tensors)} in the live model (extra: {[s.fqn for s in extra[:5]]}); "
                "snapshot again after changing the model's structure"
            )
        raise StateMismatchError(
            f"{label}: the order of tensors changed: expected {[s.fqn for s in self.tensors[:3]]}..., "
            f"found {[s.fqn for s in live.tensors[:3]]}...; build the model the same way"
        )

    def _check_sharing(self, live: Layout, label: str) -> None:
        """Refuse names that exist on both sides and share their tensor with others than before."""
        before, after = dict(self.aliases), dict(live.aliases)
        known = {spec.fqn for spec in self.tensors} | before.keys()
        found = {spec.fqn for spec in live.tensors} | after.keys()
        for name in sorted(known & found):
            if before.get(name) != after.get(name):
                raise StateMismatchError(
                    f"{label}: tensor {name!r}: expected {_sharing(before.get(name))}, found "
                    f"{_sharing(after.get(name))} in the live model; nothing was written. Tie or untie weights before "
                    "the first snapshot"
                )


def _sharing(first: str | None) -> str:
    return f"shared with {first!r}" if first else "of its own"


def check_sharded(live: LiveState, sharded: Container[str]) -> None:
    """Refuse a parameter that is named in `sharded` and is a plain tensor: copying it would copy the wrong thing.

    Raises:
        StateMismatchError: names it.
    """
    for spec in live.layout.parameters:
        if spec.placements is None and spec.fqn in sharded:
            raise StateMismatchError(
                f"parameter {spec.fqn!r} should be sharded and is not, also after resharding every FSDP module: a "
                "forward is running or has failed; call reset_iter_state() on the root module first"
            )


def _check_spec(stored: TensorSpec, live: TensorSpec | None, label: str) -> None:
    if live is None:
        raise StateMismatchError(
            f"{label}: {stored.kind} {stored.fqn!r} is missing: expected {stored.dtype} {stored.shape}, "
            "found no tensor of that name in the live model; snapshot again after changing the model's structure"
        )
    if stored.placements is not None and live.placements is None:
        raise StateMismatchError(
            f"{label}: {stored.kind} {stored.fqn!r} should be sharded and is not: expected placements "
            f"{stored.placements}, found a plain tensor of shape {live.shape}, also after resharding every FSDP "
            "module; a forward is running or failed: call reset_iter_state() on the root module"
        )
    for field in ("kind", "shape", "dtype", "mesh", "placements", "local_shape"):
        expected, found = getattr(stored, field), getattr(live, field)
        if expected != found:
            raise StateMismatchError(
                f"{label}: {stored.kind} {stored.fqn!r}: expected {field} {expected}, found {found} in the live "
                "model; nothing was written. A version fits only the model it was taken from"
            )


@dataclass(frozen=True)
class BufferSlot:
    """A distinct live buffer object and every (module, attribute) it is registered under."""

    tensor: Tensor
    owners: tuple[tuple[nn.Module, str], ...]

    @property
    def is_overlapping(self) -> bool:
        """True for expanded buffers (stride 0): they cannot be written in place, only replaced."""
        return any(step == 0 and size > 1 for size, step in zip(self.tensor.shape, self.tensor.stride(), strict=True))


@dataclass(frozen=True)
class LiveState:
    """One look at a settled model. Views alias live storage and are valid until tensors are replaced."""

    layout: Layout
    owners: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    buffers: tuple[BufferSlot, ...]

    @property
    def counted_parameters(self) -> list[Tensor]:
        """Like `parameters`, but autograd sees the writes: for changes that stay (fact 3 of the note)."""
        return [
            view if isinstance(owner, DTensor) else owner.detach()
            for owner, view in zip(self.owners, self.parameters, strict=True)
        ]

    @property
    def all_owners(self) -> list[Tensor]:
        """The distinct live tensors, parameters and buffers, in layout order."""
        return [*self.owners, *(slot.tensor for slot in self.buffers)]

    def dress(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """`views` (one a tensor of the layout, on the CPU) by name, sharded like the live tensors; they stay views."""
        return {
            spec.fqn: _sharded_like(owner, view)
            for spec, owner, view in zip(self.layout.tensors, self.all_owners, views, strict=True)
        }

    @property
    def buffer_views(self) -> list[Tensor]:
        """Local views of the distinct buffers, in layout order."""
        return [local_view(slot.tensor) for slot in self.buffers]


def local_view(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`: same storage, no graph, a version counter of its own.

    See [Note: training-safe copies], fact 3, for why `.data`.
    """
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data


def _sharded_like(owner: Tensor, view: Tensor) -> Tensor:
    if not isinstance(owner, DTensor):
        return view
    mesh = owner.device_mesh
    if mesh.device_type != view.device.type:
        # from_local would copy to the mesh's device.
        mesh = _host_mesh(mesh)
    return DTensor.from_local(view, mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride())


@lru_cache(maxsize=8)
def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def check_supported(model: nn.Module) -> None:
    """Refuse what cannot be cached.

    Raises:
        UnsupportedModelError: for FSDP1, with what to do instead.
    """
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedModelError(
                f"module {name or '<root>'!r} is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters "
                "have no per-parameter shards; shard with torch.distributed.fsdp.fully_shard (FSDP2) instead: "
                "fully_shard each block, then the root"
            )


def settle(model: nn.Module, *, after_failure: bool = False) -> None:
    """Bring every FSDP2 module to rest: sharded, no forward under way, no all-gather in flight.

    A no-op for plain modules. Not to be called from inside a forward or backward of `model`.
    See [Note: training-safe copies], facts 1 and 2.

    Args:
        model: the module tree; roots may lie anywhere in it, and it may hold several.
        after_failure: a forward may have raised; end it even where that costs HSDP's partial sums.
    """
    # reshard() is not recursive.
    sharded_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded_modules:
        module.reshard()
    if sharded_modules and (after_failure or _every_mesh_has_one_axis(model)):
        _reset_roots(model)


def _every_mesh_has_one_axis(model: nn.Module) -> bool:
    return all(p.device_mesh.ndim == 1 for p in model.parameters() if isinstance(p, DTensor))


def _reset_roots(module: nn.Module) -> None:
    """Call `reset_iter_state` on every FSDP root; which module is one is decided by the first forward."""
    if isinstance(module, FSDPModule):
        try:
            module.reset_iter_state()
        except (RuntimeError, AttributeError):
            # RuntimeError: not a root. AttributeError: no forward has run yet, so there is nothing to reset
            # here, but a submodule may have run on its own.
            pass
        else:
            return
    for child in module.children():
        _reset_roots(child)


def capture(model: nn.Module) -> LiveState:
    """Look at a settled model: its layout and the local views of its distinct tensors.

    Derived afresh each time (about 10 us a tensor): the first forward, `load_state_dict(assign=True)` and
    `.to()` give tensors new storage, and a stale view would be written in silence.

    Raises:
        UnsupportedModelError: a tensor on the meta device, an inference tensor, a sparse or wrapped one.
    """
    meshes: dict[int, str] = {}
    specs: list[TensorSpec] = []
    aliases: list[tuple[str, str]] = []
    first_names: dict[int, str] = {}
    owners: list[Tensor] = []
    parameters: list[Tensor] = []
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first_names:
            aliases.append((fqn, first_names[id(parameter)]))
            continue
        first_names[id(parameter)] = fqn
        view = local_view(parameter)
        specs.append(_spec(fqn, "parameter", parameter, view, meshes))
        owners.append(parameter)
        parameters.append(view)
    buffers: list[BufferSlot] = []
    for names, slot in _buffer_slots(model):
        specs.append(_spec(names[0], "buffer", slot.tensor, local_view(slot.tensor), meshes))
        aliases.extend((name, names[0]) for name in names[1:])
        buffers.append(slot)
    layout = Layout(tuple(specs), len(parameters), tuple(aliases))
    return LiveState(layout, tuple(owners), tuple(parameters), tuple(buffers))


def _buffer_slots(model: nn.Module) -> list[tuple[list[str], BufferSlot]]:
    found: dict[int, tuple[list[str], Tensor, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            names, _, owners = found.setdefault(id(buffer), ([], buffer, []))
            names.append(f"{prefix}.{name}" if prefix else name)
            owners.append((module, name))
    return [(names, BufferSlot(buffer, tuple(owners))) for names, buffer, owners in found.values()]


def _spec(fqn: str, kind: Kind, tensor: Tensor, view: Tensor, meshes: dict[int, str]) -> TensorSpec:
    if type(view) is not Tensor or view.is_meta or view.is_inference() or view.layout is not torch.strided:
        raise UnsupportedModelError(
            f"{kind} {fqn!r} is a {type(view).__name__} on {view.device}, layout {view.layout}, inference="
            f"{view.is_inference()}; the cache handles dense tensors with storage that were made outside "
            "inference_mode: materialise the model first (to_empty and load, or build it under no_grad)"
        )
    mesh: str | None = None
    placements: tuple[str, ...] | None = None
    if isinstance(tensor, DTensor):
        mesh = meshes.get(id(tensor.device_mesh))
        if mesh is None:
            mesh = meshes.setdefault(id(tensor.device_mesh), _mesh_name(tensor.device_mesh))
        placements = tuple(map(repr, tensor.placements))
    return TensorSpec(fqn, kind, tensor.dtype, tuple(tensor.shape), tuple(view.shape), mesh, placements)


def _mesh_name(mesh: DeviceMesh) -> str:
    return f"{mesh.device_type}{mesh.mesh_dim_names or ''}{mesh.mesh.tolist()}"


def ranks_of(model: nn.Module) -> list[int]:
    """The global ranks that must act together on `model`: those of its meshes and of a DDP wrapper.

    Returns:
        Sorted ranks; empty for a model of this process alone.
    """
    ranks: set[int] = set()
    for tensor in model.parameters():
        if isinstance(tensor, DTensor):
            ranks.update(tensor.device_mesh.mesh.flatten().tolist())
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks.update(torch.distributed.get_process_group_ranks(module.process_group))
    return sorted(ranks) if len(ranks) > 1 else []


def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state dict, unsharded, one at a time.

    Collective: every rank of the model's meshes must iterate to the end, in step. Safe right after a forward.
    Tied names appear once, under the first; persistent buffers are included.

    Args:
        model: plain or sharded; one-process models need no process group.

    Yields:
        (state-dict name, full tensor). A tensor may alias live storage (it does for a plain module, and for
        one rank): read or copy it before the next optimizer step.
    """
    settle(model)
    seen: set[int] = set()
    # keep_vars hands out the objects themselves, so that tied tensors are recognised by identity; addresses
    # would not do: all empty shards have the same one, and ranks would skip different tensors.
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        with torch.no_grad():
            full = value.full_tensor() if isinstance(value, DTensor) else value
        yield name, full.detach()
