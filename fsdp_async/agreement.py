"""Ranks that must act together say what they are about to do, and compare.

Owns: a CPU process group beside the model's (messages never interleave with the model's collectives; agreements over
the same ranks share it and are told apart by number), one small all-gather per operation, and the errors that come of
it.

Promises: either every rank proceeds with the same operation on the same version, or every rank that arrived
raises; a failure of one rank becomes an error on all instead of a hang; ranks that do not arrive are given up
after `timeout_s`, and the agreement is then broken for good, because ranks may differ by an operation.

Does not: undo anything (callers compare before they write) or move tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_async.errors import FsdpAsyncError, InputError, RankDisagreementError

T = TypeVar("T")

MESSAGE_BYTES = 4096
"""Fixed, so that one all-gather is enough. Longer texts are cut."""

MAX_TEXT_CHARS = 300
"""Of operation and error each: JSON takes at most 6 bytes a character, and both must fit."""


_groups: dict[tuple[tuple[int, ...], float], dist.ProcessGroup] = {}
"""Groups by ranks and timeout; kept until the world ends. See `_group_of`."""

_num_agreements: dict[tuple[tuple[int, ...], float], int] = {}
"""How many agreements each of those groups has served."""


def _group_of(ranks: tuple[int, ...], timeout_s: float) -> dist.ProcessGroup:
    """The group of `ranks`, made once and never destroyed.

    Making a group while the last one is being destroyed can fail in gloo with "connection closed by peer". PyTorch
    names a group of a part of the world by its ranks and the number of groups, so that a second one after the first
    was destroyed would meet the first one's addresses in the store, too.
    """
    group = _groups.get((ranks, timeout_s))
    if group is None or not _is_alive(group):
        made = dist.new_group(
            list(ranks), timedelta(seconds=timeout_s), "gloo", group_desc="fsdp_async agreement",
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )  # fmt: skip
        if not isinstance(made, dist.ProcessGroup):
            raise InputError(f"rank {dist.get_rank()} is none of the ranks {list(ranks)} that hold the model")
        group = _groups[ranks, timeout_s] = made
        _num_agreements[ranks, timeout_s] = 0
    return group


def _is_alive(group: dist.ProcessGroup) -> bool:
    """False once the world that the group belonged to was destroyed."""
    if not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


class RankAgreement:
    """Compares operations over `ranks`; does nothing for a process on its own.

    Collective: all of `ranks` construct it together.

    Args:
        ranks: global ranks, sorted; fewer than two mean "alone".
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, ranks: list[int], timeout_s: float) -> None:
        self.ranks = ranks
        self._timeout_s = timeout_s
        self._broken: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._number = 0
        if len(ranks) > 1:
            key = (tuple(ranks), timeout_s)
            self._group = _group_of(*key)
            self._number = _num_agreements[key] = _num_agreements[key] + 1

    def compare(self, operation: str, error: Exception | None = None) -> None:
        """Proceed only if all ranks are about to do `operation` and none has failed.

        Args:
            operation: what this rank is about to do, with its arguments; its first 300 characters count.
            error: why this rank cannot.

        Raises:
            Exception: `error` itself, if all ranks asked for the same.
            RankDisagreementError: ranks differ, another rank failed, or did not arrive within the timeout.
        """
        if self._group is None:
            if error is not None:
                raise error
            return
        reason = None if error is None else f"{type(error).__name__}: {error}"[:MAX_TEXT_CHARS]
        mine = {"operation": operation[:MAX_TEXT_CHARS], "error": reason, "number": str(self._number)}
        told = self._exchange(mine, operation)
        if len({(message["operation"], message["number"]) for message in told}) > 1:
            several = len({message["number"] for message in told}) > 1
            asked = "; ".join(
                f"rank {r}: {m['operation']}" + (f" of cache {m['number']}" if several else "")
                for r, m in zip(self.ranks, told, strict=True)
            )
            raise RankDisagreementError(
                f"ranks asked for different things: {asked}. Nothing was changed. Visits, snapshots and restores are "
                "collective: call them on every rank, in the same order, with the same version"
            ) from error
        if error is not None:
            raise error
        failed = [f"rank {r}: {m['error']}" for r, m in zip(self.ranks, told, strict=True) if m["error"]]
        if failed:
            raise RankDisagreementError(f"{operation} failed on {'; '.join(failed)}. Nothing was changed on this rank")

    def prepare(self, operation: str, prepare: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run `prepare`, which writes nothing live, and go on only if every rank could, for the same operation.

        Args:
            operation: see `compare`.
            prepare: what may fail on this rank alone: look-ups, checks, allocation.
            undo: gives back what `prepare` took, if the ranks do not agree.

        Raises:
            RankDisagreementError: as `compare`.
        """
        try:
            prepared = prepare()
        except (FsdpAsyncError, RuntimeError) as error:
            self.compare(operation, error)
            raise
        try:
            self.compare(operation)
        except BaseException:
            if undo is not None:
                undo(prepared)
            raise
        return prepared

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The CPU group; None for a process alone. Others may use it between operations, in step on all ranks."""
        return self._group

    def close(self) -> None:
        """Leave the group to the next agreement over these ranks; idempotent."""
        self._group = None

    def _exchange(self, message: dict[str, str | None], operation: str) -> list[dict[str, str | None]]:
        if self._broken is not None:
            raise RankDisagreementError(f"{operation} refused: an earlier operation was not joined: {self._broken}")
        text = json.dumps(message, ensure_ascii=False).encode(errors="replace")
        mine = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in self.ranks]
        try:
            dist.all_gather(gathered, mine, group=self._group)
        except RuntimeError as error:
            raise self._break(operation) from error
        return [json.loads(each.numpy().tobytes().rstrip(b"\0")) for each in gathered]

    def _break(self, operation: str) -> RankDisagreementError:
        others = [rank for rank in self.ranks if rank != dist.get_rank()]
        self._broken = (
            f"rank {dist.get_rank()} asked for {operation}, and at least one of ranks {others} did not join within "
            f"{self._timeout_s} s or ended. The run cannot go on: ranks may hold different weights. Look at the "
            "other ranks' logs, end the run, and resume from a checkpoint"
        )
        return RankDisagreementError(self._broken)
