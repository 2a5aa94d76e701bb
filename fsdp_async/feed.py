"""What stands between the engines and the loop.

Owns, on the rank that has engines: admission, the way of a group from prompt to scored and queued, publication, and
what happens when an engine dies. An engine that failed is noticed wherever it is spoken to and told of in one place,
`poll`, because starting it again needs every rank's part of the weights. It promises that a prompt which an engine took
with it is issued again, under the same identity, and that nothing finished is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from fsdp_async.errors import EngineError, InputError
from fsdp_async.rewards import Reward, score_group
from fsdp_async.rollout import RolloutEngine, SamplingParams
from fsdp_async.sample_queue import SampleQueue
from fsdp_async.types import PartialGroup, Prompt, ResponseGroup
from fsdp_async.weight_sync import WeightPublisher

POLL_S = 0.2


@dataclass(frozen=True)
class EngineLost:
    """The engine failed and may be started again."""

    cause: str


@dataclass(frozen=True)
class Restarted:
    """An engine was started again; counts of groups and of the tokens that were kept."""

    cause: str
    num_restarts: int
    num_reissued_groups: int
    num_kept_tokens: int


class RolloutFeed:
    """See the module docstring.

    Args:
        engine: answers prompts.
        publisher: sends weights to it.
        queue: orders and counts groups.
        prompts: what to ask next.
        reward: scores responses.
        sampling: how responses are drawn.
        max_restarts: how often an engine may be started again before the next batch is taken.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        publisher: WeightPublisher,
        queue: SampleQueue,
        prompts: Iterator[Prompt],
        reward: Reward,
        sampling: SamplingParams,
        *,
        max_restarts: int = 0,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.publisher = publisher
        self.queue = queue
        self.prompts = prompts
        self.reward = reward
        self.sampling = sampling
        self.num_restarts = 0
        self._max_restarts = max_restarts
        self._num_restarts_in_a_row = 0
        self._failure: EngineError | None = None

    @property
    def reward_failures(self) -> dict[str, int]:
        """Responses that could not be scored, by kind; empty for a reward that does not count them."""
        return dict(getattr(self.reward, "failures", {}))

    def submit(self, version: int, num_batches_left: int) -> None:
        """Hand the engine as many prompts as staleness, capacity and the rest of the run admit.

        Raises:
            InputError: the stream of prompts ended before the run.
        """
        num_wanted = self._num_wanted(version, num_batches_left)
        prompts = list(islice(self.prompts, num_wanted))
        if len(prompts) < num_wanted:
            raise InputError(
                f"the stream of prompts ended: {len(prompts)} of {num_wanted} that are still wanted were there; "
                "give an endless stream (epochs number its rounds), or fewer trainer.num_batches"
            )
        if prompts:
            self.queue.submit(prompts, self.sampling.num_samples, version)
            self._order(prompts)

    def poll(self, num_groups: int) -> list[ResponseGroup] | EngineLost | None:
        """The oldest `num_groups` groups, once they are here; None after a while without them.

        Raises:
            EngineDiedError, EngineTimeoutError: the engine failed once more than it may be started again.
        """
        try:
            self._take_in(POLL_S if not self.queue.ready(num_groups) else 0.0)
            if self._failure is not None:
                raise self._failure
        except EngineError as error:
            if self._num_restarts_in_a_row >= self._max_restarts:
                raise
            self._failure = error
            return EngineLost(str(error))
        if not self.queue.ready(num_groups):
            return None
        self._num_restarts_in_a_row = 0
        return self.queue.take(num_groups)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send a version. An engine that fails meanwhile is told of by the next `poll`; all of `tensors` is read."""
        try:
            self.publisher.publish(version, tensors)
        except EngineError as error:
            self._failure = error
        # On several ranks every tensor is gathered from all of them, whatever became of the publication.
        deque(tensors, maxlen=0)

    def flush(self) -> None:
        """Wait until the engine holds the version published last; one that fails has nothing left to do: no error."""
        try:
            self.publisher.flush()
        except EngineError as error:
            self._failure = error

    def restart(self) -> Mapping[Any, PartialGroup]:
        """Start the failed engine again, without weights; what it had told of unfinished groups."""
        self.num_restarts += 1
        self._num_restarts_in_a_row += 1
        partials = self.engine.restart()
        self.publisher.forget(self.engine)
        # What had been finished is not to be issued again; one that is dead once more is told of by the next poll.
        with suppress(EngineError):
            self._take_in(0.0)
        return partials

    def reissue(self, partials: Mapping[Any, PartialGroup], retained: Collection[int]) -> Restarted:
        """Order again what is in flight; responses go on from `partials` where all their versions are retained."""
        cause, self._failure = str(self._failure), None
        prompts = self.queue.reissue()
        keys = {prompt.key for prompt in prompts}
        kept = {
            key: group
            for key, group in partials.items()
            if key in keys and all(span.version in retained for part in group for span in part.version_spans)
        }
        if prompts:
            self._order(prompts, kept)
        num_tokens = sum(len(part.token_ids) for group in kept.values() for part in group)
        return Restarted(cause, self.num_restarts, len(prompts), num_tokens)

    def _num_wanted(self, version: int, num_batches_left: int) -> int:
        needed = num_batches_left * self.queue.groups_per_batch - self.queue.num_outstanding
        return max(0, min(needed, self.queue.num_admissible(version)))

    def _order(self, prompts: list[Prompt], partials: Mapping[Any, PartialGroup] | None = None) -> None:
        try:
            self.engine.submit(prompts, self.sampling, partials)
        except EngineError as error:
            # They are in flight, and will be issued again.
            self._failure = error

    def _take_in(self, timeout_s: float) -> None:
        for group in self.engine.poll(timeout_s):
            self.queue.put(score_group(group, self.reward))
