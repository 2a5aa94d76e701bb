"""The working side of the transformers engine, in a child process or a thread.

Owns the model, the waiting prompts and the loop: take commands, copy weights, generate a chunk, report. Weights are
taken between two tokens (`interrupt`; what was begun goes on or begins anew) or between two chunks. It gives a sign of
life at least each `BEAT_S`, also between tokens, and tells now and then how far it has come, so that little is lost
when it dies. It knows the channel only as something to send to and receive from.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fsdp_async.audit import GroupLog
from fsdp_async.buckets import WeightBucket, WeightReceiver
from fsdp_async.files import write_model_at
from fsdp_async.generation import Generation
from fsdp_async.rollout import SamplingParams
from fsdp_async.shared_block import open_block
from fsdp_async.types import GroupKey, PartialGroup, Prompt, ResponseGroup

BEAT_S = 1.0
PROGRESS_S = 10.0
Span = tuple[float, float]


@dataclass(frozen=True)
class Submit:
    """Prompts to respond to; groups carry `version` as submitted version."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    version: int
    partials: Mapping[GroupKey, PartialGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """pause | resume | close."""

    name: str


@dataclass(frozen=True)
class Ready:
    """The model is built."""


@dataclass(frozen=True)
class Beat:
    """A sign of life."""


@dataclass(frozen=True)
class Progress:
    """What there is of unfinished groups."""

    partials: Mapping[GroupKey, PartialGroup]


@dataclass(frozen=True)
class Groups:
    """A finished chunk and when it was worked on."""

    groups: tuple[ResponseGroup, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Loaded:
    """A bucket was copied and when."""

    version: int
    bucket: int
    is_last: bool
    span: Span


@dataclass(frozen=True)
class Failed:
    """The worker ends because of this."""

    trace: str


class Channel(Protocol):
    """The worker's end of the line; `receive` raises EOFError when nobody is at the other end any more."""

    def send(self, message: Any) -> None:
        """Give a message to the trainer's side."""
        ...

    def receive(self, timeout_s: float) -> Any | None:
        """The next message, or None after `timeout_s`."""
        ...


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is built from; picklable.

    `record_dir` None keeps no weights, `log` None no list of groups; `casts` where the model has another dtype than the
    trainer's weights.
    """

    model_builder: Callable[[], nn.Module]
    seed: int
    prompts_per_chunk: int
    record_dir: Path | None
    interrupt: bool = True
    partial: bool = True
    log: Path | None = None
    casts: bool = False


class _ClosedError(Exception):
    """The trainer's side asked the worker to end, or is gone."""


def run_worker(spec: WorkerSpec, channel: Channel) -> None:
    """Serve until closed; an error is reported with its traceback before the worker ends."""
    try:
        worker = Worker(spec, channel)
        with contextlib.closing(worker):
            worker.serve()
    except (_ClosedError, EOFError, ConnectionError):
        return
    except Exception:  # noqa: BLE001 - the edge of the worker: whatever it was, the trainer's side must hear of it
        with contextlib.suppress(OSError):
            channel.send(Failed(traceback.format_exc()))


class Worker:
    """Takes what comes from `channel`, one message or one chunk at a time."""

    def __init__(self, spec: WorkerSpec, channel: Channel) -> None:
        self._spec = spec
        self._channel = channel
        self._model = spec.model_builder().eval()
        self._receiver = WeightReceiver(self._model, casts=spec.casts)
        self._waiting: deque[tuple[Prompt, Submit]] = deque()
        self._version: int | None = None
        self._is_paused = False
        self._unhandled: deque[Any] = deque()
        self._last_beat_s = self._last_progress_s = time.monotonic()
        self._record_fd = None if spec.record_dir is None else _open_directory(spec.record_dir)
        self._log = None if spec.log is None else GroupLog(spec.log)
        channel.send(Ready())

    def serve(self) -> None:
        """Work for ever; ends by what the channel raises, or `close`."""
        while True:
            if not self._work_once(BEAT_S):
                self._beat()

    def work(self) -> None:
        """Do all that there is to do now."""
        while self._work_once(0.0):
            pass

    def close(self) -> None:
        """Let go of files."""
        if self._record_fd is not None:
            os.close(self._record_fd)
        if self._log is not None:
            self._log.close()

    def _work_once(self, patience_s: float) -> bool:
        """Handle a message or generate a chunk; False where there was neither for `patience_s`."""
        message = self._next_message(patience_s)
        if message is not None:
            self._handle(message)
        elif self._can_generate():
            self._generate()
        else:
            return False
        return True

    def _next_message(self, patience_s: float) -> Any | None:
        if self._unhandled:
            return self._unhandled.popleft()
        return self._channel.receive(0.0 if self._can_generate() else patience_s)

    def _can_generate(self) -> bool:
        return bool(self._waiting) and self._version is not None and not self._is_paused

    def _handle(self, message: Any) -> None:
        match message:
            case Submit():
                self._waiting.extend((prompt, message) for prompt in message.prompts)
            case WeightBucket():
                self._load(message)
            case Command("pause" | "resume" as name):
                self._is_paused = name == "pause"
            case Command("close"):
                raise _ClosedError

    def _load(self, bucket: WeightBucket) -> None:
        start_s = time.monotonic()
        # Between the first bucket and the last the weights are of no version.
        self._version = None
        with torch.no_grad():
            take_bucket(self._receiver, bucket)
        if bucket.is_last:
            self._version = bucket.version
            if self._record_fd is not None:
                write_model_at(self._record_fd, f"v{bucket.version:06d}.safetensors", self._model)
        self._channel.send(Loaded(bucket.version, bucket.index, bucket.is_last, (start_s, time.monotonic())))

    def _generate(self) -> None:
        chunk = self._next_chunk()
        generation = Generation(
            self._model,
            [prompt for prompt, _ in chunk],
            chunk[0][1].params,
            seed=self._spec.seed,
            partials={p.key: order.partials[p.key] for p, order in chunk if p.key in order.partials},
        )
        spans: list[Span] = []
        start_s = time.monotonic()
        while not generation.is_done:
            if self._between_tokens(generation):
                generation.step(self._current_version)
            else:
                spans.append((start_s, time.monotonic()))
                self._wait_to_go_on(generation)
                start_s = time.monotonic()
        spans.append((start_s, time.monotonic()))
        stamped = tuple(
            replace(group, submitted_version=order.version)
            for group, (_, order) in zip(generation.groups(0), chunk, strict=True)
        )
        if self._log is not None:
            self._log.append(None, stamped)
        self._channel.send(Groups(stamped, tuple(spans)))

    def _next_chunk(self) -> list[tuple[Prompt, Submit]]:
        """The oldest prompts that are sampled in the same way."""
        params = self._waiting[0][1].params
        chunk: list[tuple[Prompt, Submit]] = []
        while self._waiting and len(chunk) < self._spec.prompts_per_chunk and self._waiting[0][1].params == params:
            chunk.append(self._waiting.popleft())
        return chunk

    @property
    def _current_version(self) -> int:
        assert self._version is not None, "tokens are drawn only under a whole version"
        return self._version

    @property
    def _goes_on(self) -> bool:
        return self._version is not None and not self._is_paused

    def _between_tokens(self, generation: Generation) -> bool:
        """Take what has arrived; False where the chunk cannot go on before something else does."""
        while self._goes_on and (message := self._channel.receive(0.0)) is not None:
            self._take_between_tokens(message, generation)
        self._tell_progress(generation)
        self._beat()
        return self._goes_on

    def _wait_to_go_on(self, generation: Generation) -> None:
        while not self._goes_on:
            message = self._channel.receive(BEAT_S)
            if message is not None:
                self._take_between_tokens(message, generation)
            self._beat()

    def _take_between_tokens(self, message: Any, generation: Generation) -> None:
        if not isinstance(message, WeightBucket):
            self._handle(message)
        elif not self._spec.interrupt:
            self._unhandled.append(message)
        else:
            self._load(message)
            if message.is_last and self._spec.partial:
                generation.weights_changed()
            elif message.is_last:
                generation.restart()

    def _tell_progress(self, generation: Generation) -> None:
        now_s = time.monotonic()
        if self._spec.partial and now_s - self._last_progress_s >= PROGRESS_S:
            self._last_progress_s = now_s
            self._channel.send(Progress(generation.partials()))

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_beat_s >= BEAT_S / 2:
            self._last_beat_s = now_s
            self._channel.send(Beat())


def _open_directory(path: Path) -> int:
    """A handle that follows the directory when it is renamed."""
    path.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def take_bucket(receiver: WeightReceiver, bucket: WeightBucket) -> None:
    """Copy `bucket` out of its memory, in this process or shared."""
    if isinstance(bucket.memory, Tensor):
        receiver.take(bucket, bucket.memory)
        return
    with open_block(bucket.memory) as memory:
        receiver.take(bucket, memory)
