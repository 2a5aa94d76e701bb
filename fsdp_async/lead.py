"""One rank knows, all ranks act.

Owns how rank 0, which alone has engines, queue and prompts, tells every other rank what comes next, so that all of them
enter the same collectives in the same order. It knows nothing of what it carries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_async.errors import RankFailedError

T = TypeVar("T")


class Lead:
    """Rank 0 of `group` and those who follow it; a process alone (None) leads itself.

    All methods are collective.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)

    @property
    def is_lead(self) -> bool:
        """Whether this rank is the one that knows."""
        return self.rank == 0

    def ask(self, question: Callable[[], T]) -> T:
        """The lead's answer, on every rank; only the lead runs `question`.

        Raises:
            Exception: on the lead, whatever `question` raised.
            RankFailedError: on the others, with its text.
        """
        if self.group is None:
            return question()
        if not self.is_lead:
            heard: T = self._hear()
            return heard
        try:
            answer = question()
        except BaseException as error:
            self._tell(None, f"{type(error).__name__}: {error}")
            raise
        self._tell(answer, None)
        return answer

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order, on every rank."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def _tell(self, answer: object, failure: str | None) -> None:
        assert self.group is not None
        dist.broadcast_object_list([answer, failure], group=self.group, group_src=0)

    def _hear(self) -> Any:
        heard: list[Any] = [None, None]
        dist.broadcast_object_list(heard, group=self.group, group_src=0)
        if heard[1] is not None:
            raise RankFailedError(f"rank 0 ended the run: {heard[1]}")
        return heard[0]
