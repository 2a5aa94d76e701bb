"""The trainer's side of an engine that works elsewhere and answers by messages.

Owns the books: what was handed over, what came back, when the last sign of life came, and turns silence and death into
errors that name the engine and what was waited for. It never blocks for longer than it was asked to. How a worker is
started and ended, and how messages travel, is for `rollout_hf.py`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_async.buckets import WeightBucket
from fsdp_async.devices import PlacedBuilder
from fsdp_async.engine_worker import Command, Failed, Groups, Loaded, Progress, Ready, Submit, WorkerSpec
from fsdp_async.errors import EngineDiedError, EngineTimeoutError, InputError
from fsdp_async.rollout import RolloutConfig, SamplingParams
from fsdp_async.types import GroupKey, PartialGroup, Prompt, ResponseGroup


class Ended:
    """Last message of every worker: nothing comes after it."""


class EngineProxy:
    """What both engines share: books about a worker that answers by messages."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        self._config = config
        self.name = name
        self._groups: list[ResponseGroup] = []
        self._spans: list[tuple[float, float]] = []
        self._forget_worker()

    def _forget_worker(self) -> None:
        """Books of a worker that has not been heard of; groups that are finished stay."""
        # A new one: what an old worker still says is for nobody.
        self._inbox: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._partials: dict[GroupKey, PartialGroup] = {}
        self._version: int | None = None
        self._loaded: tuple[int, int] = (-1, -1)
        self._published: int | None = None
        self._num_outstanding = 0
        self._is_ready = False
        self._is_closed = False
        self._failure: str | None = None
        self._last_sign_s = time.monotonic()

    @property
    def version(self) -> int | None:
        """The last version whose weights the engine itself said it holds."""
        self._read(0.0)
        return self._version

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        partials: Mapping[GroupKey, PartialGroup] | None = None,
    ) -> None:
        """Queue prompts under the version handed over last.

        Raises:
            InputError: no version was ever handed over.
            EngineError: the engine failed, which may be why.
        """
        self._check()
        if self._published is None:
            raise InputError(f"{self.name}: submit before the first load; publish version 0 first")
        self._num_outstanding += len(prompts)
        self._send(Submit(tuple(prompts), params, self._published, dict(partials or {})))

    def poll(self, timeout_s: float) -> list[ResponseGroup]:
        """Finished groups; waits up to `timeout_s` for the first one."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._read(0.0 if self._groups else max(0.0, deadline_s - time.monotonic()))
            if not self._groups:
                self._check()
            if self._groups or time.monotonic() >= deadline_s:
                groups, self._groups = self._groups, []
                self._num_outstanding -= len(groups)
                return groups

    def pause(self) -> None:
        """Generate nothing more after the token in hand."""
        self._send(Command("pause"))

    def resume(self) -> None:
        """Generate again."""
        self._send(Command("resume"))

    def load(self, version: int, source: WeightBucket) -> None:
        """Hand over one bucket of weights."""
        self._check()
        self._published = version
        self._send(source)

    def wait_loaded(self, version: int, bucket: int, timeout_s: float) -> None:
        """Wait until the engine has copied that bucket.

        Raises:
            EngineTimeoutError: not within `timeout_s` (while the engine starts: within its start timeout).
        """
        deadline_s = time.monotonic() + timeout_s
        while self._loaded < (version, bucket):
            self._read(0.1)
            self._check()
            if self._is_ready and time.monotonic() > deadline_s:
                raise EngineTimeoutError(
                    f"{self.name} confirmed bucket {self._loaded[1]} of version {self._loaded[0]} last, and has "
                    f"{self._num_outstanding} prompts to respond to"
                )
            if not self._is_ready:
                deadline_s = time.monotonic() + timeout_s

    def drain_busy_spans(self) -> list[tuple[float, float]]:
        """Spans of real work heard of since the last call."""
        self._read(0.0)
        spans, self._spans = self._spans, []
        return spans

    def state_dict(self) -> Mapping[str, Any]:
        """Nothing: responses depend on weights, seed and prompt alone."""
        return {}

    def restart(self) -> Mapping[GroupKey, PartialGroup]:
        """End the worker, dead or not, and start another; returns what there was of unfinished groups."""
        self._read(0.0)
        self._stop_worker()
        partials = self._partials
        self._forget_worker()
        self._start_worker()
        return partials

    def close(self) -> None:
        """End the worker. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._stop_worker()

    def _send(self, message: Any) -> None:
        self._outbox.put(message)

    def _start_worker(self) -> None:
        raise NotImplementedError

    def _stop_worker(self) -> None:
        raise NotImplementedError

    def _how_it_ended(self) -> str:
        raise NotImplementedError

    def _read(self, timeout_s: float) -> None:
        """Take in what has arrived; waits up to `timeout_s` for the first message."""
        try:
            at_s, message = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while True:
                self._take_in(at_s, message)
                at_s, message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _take_in(self, at_s: float, message: Any) -> None:
        self._last_sign_s = at_s
        match message:
            case Ready():
                self._is_ready = True
            case Groups():
                self._groups.extend(message.groups)
                self._spans.extend(message.spans)
                for group in message.groups:
                    self._partials.pop(group.prompt.key, None)
            case Progress():
                self._partials.update(message.partials)
            case Loaded():
                self._loaded = (message.version, message.bucket)
                self._spans.append(message.span)
                if message.is_last:
                    self._version = message.version
            case Failed():
                self._failure = message.trace
            case Ended() if not self._is_closed:
                self._failure = self._failure or self._how_it_ended()

    def _silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._last_sign_s

    def _check(self) -> None:
        """Raise if the engine is dead, silent or closed."""
        if self._is_closed:
            raise EngineDiedError(f"{self.name} was closed")
        self._read(0.0)
        if self._failure is not None:
            raise EngineDiedError(f"{self.name} ended: {self._failure}")
        silent_s = self._silent_s()
        if not self._is_ready and silent_s > self._config.start_timeout_s:
            raise EngineTimeoutError(
                f"{self.name} did not start within {self._config.start_timeout_s:g} s (rollout.start_timeout_s); it is "
                "importing its libraries or building its model"
            )
        if self._is_ready and silent_s > self._config.answer_timeout_s:
            raise EngineTimeoutError(
                f"{self.name} gave no sign of life for {silent_s:.1f} s (rollout.answer_timeout_s="
                f"{self._config.answer_timeout_s:g}) while the trainer waits for {self._num_outstanding} groups; it is "
                "stopped or deadlocked"
            )


def worker_spec(
    model_builder: Callable[[], nn.Module],
    config: RolloutConfig,
    seed: int,
    record_dir: Path | None,
    log: Path | None = None,
) -> WorkerSpec:
    """What a worker needs of the settings; `partial` unset means true."""
    return WorkerSpec(
        model_builder=model_builder,
        seed=seed,
        prompts_per_chunk=config.prompts_per_chunk,
        record_dir=record_dir,
        interrupt=config.interrupt,
        partial=config.partial is not False,
        log=log,
        casts=isinstance(model_builder, PlacedBuilder),
    )
