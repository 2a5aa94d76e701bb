"""What can be asked of retained states without visiting one: their tensors, fingerprints and differences.

Owns reading, and promises that it writes nothing live and leaves train/eval flags and random state alone. Whole tensors
are gathered one at a time over the mesh that they are sharded on, so that the answers do not depend on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_async.contents import Fingerprint, LazyTensors, StateDifference, difference_of, fingerprint_of
from fsdp_async.dtensor_io import LiveState
from fsdp_async.errors import StateMismatchError
from fsdp_async.version_store import LIVE, Key, VersionStore

NUM_NAMED = 5


class ReadableStates(ABC):
    """The reading half of `StateCache`. `version` is one that is retained, a name, or "live"."""

    _store: VersionStore

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: versions {self._store.versions}, names {self._store.names}>"

    @abstractmethod
    def settled(self, operation: str, versions: Sequence[Key] = ()) -> AbstractContextManager[LiveState]:
        """The live state, with no snapshot waiting to be copied; inside, nothing else happens to the cache. Collective.

        Args:
            operation: in words, the same on all ranks.
            versions: that must be retained and fit the live model, on all ranks.
        """

    def tensors(self) -> dict[Key, dict[str, Tensor]]:
        """Every retained state as views by name, sharded like the live tensors; for writing, and valid until dropped.

        Lazy snapshots are copied first. Collective.

        Raises:
            StateInUseError: inside a visit.
        """
        with self.settled("tensors") as live:
            return {state.key: live.dress(state.arena.views) for state in self._store.states}

    def fingerprint(self, version: Key) -> Fingerprint:
        """SHA-256 of every parameter and buffer; `str` of it is one digest. Collective.

        It does not depend on sharding, ranks, device or process. Tied tensors count once, under their first name. A
        buffer that is not sharded is this rank's own.

        Raises:
            UnknownVersionError: it is not retained.
            StateInUseError: inside a visit.
            RankDisagreementError: ranks asked for different things, failed, or did not arrive.
        """
        with self.settled(f"fingerprint({version!r})", _stored(version)) as live:
            return fingerprint_of(self._whole(version, live))

    def verify(self, version: Key, expected: Fingerprint | str) -> None:
        """Check that `version` still is what it was when `expected` was taken. Collective.

        Raises:
            StateMismatchError: it is not; a `Fingerprint` lets it name the tensors, its string does not.
            UnknownVersionError, StateInUseError, RankDisagreementError: as `fingerprint`.
        """
        found = self.fingerprint(version)
        if str(found) == str(expected):
            return
        which = "some tensor" if isinstance(expected, str) else ", ".join(found.differing(expected)[:NUM_NAMED])
        raise StateMismatchError(
            f"{version!r} has fingerprint {found}, expected {expected}: changed is {which}. Its memory was written to, "
            "or it is a state of another run; drop it, and take it again from weights that you trust"
        )

    def diff(self, a: Key, b: Key = LIVE) -> StateDifference:
        """How `a` and `b` differ, tensor by tensor: how many elements, by how much; print it. Collective.

        Raises:
            UnknownVersionError: one of them is not retained.
            StateInUseError: inside a visit.
            RankDisagreementError: ranks asked for different things, failed, or did not arrive.
        """
        with self.settled(f"diff({a!r}, {b!r})", _stored(a, b)) as live:
            return difference_of(self._whole(a, live), self._whole(b, live))

    def _whole(self, version: Key, live: LiveState) -> Mapping[str, Tensor]:
        """Every tensor of a state, unsharded, on the CPU."""
        is_live = version == LIVE
        views = [*live.parameters, *live.buffer_views] if is_live else self._store.get(version).arena.views
        return LazyTensors({
            spec.fqn: partial(_gathered, owner, view)
            for spec, owner, view in zip(live.layout.tensors, live.all_owners, views, strict=True)
        })  # fmt: skip


def _stored(*versions: Key) -> list[Key]:
    return [version for version in versions if version != LIVE]


def _gathered(owner: Tensor, view: Tensor) -> Tensor:
    """The whole of what `view`, on any device, is this rank's part of, on the CPU."""
    if isinstance(owner, DTensor):
        with torch.no_grad():
            # Moved to the mesh's device, whose process group can gather it.
            mesh, placements = owner.device_mesh, owner.placements
            shards = DTensor.from_local(
                view, mesh, placements, run_check=False, shape=owner.shape, stride=owner.stride()
            )
            view = shards.full_tensor()
    return view.detach().cpu()
