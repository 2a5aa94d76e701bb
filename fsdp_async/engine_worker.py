"""The working side of the transformers engine, in a child process or a thread.

Owns the model, the waiting prompts and the loop: take commands, copy weights, generate a chunk, report. Weights are
taken between chunks, so that every response has one version. It gives a sign of life at least each `BEAT_S`, also
between the tokens of a chunk. It knows the channel only as something to send to and receive from.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fsdp_async.buckets import WeightBucket, WeightReceiver
from fsdp_async.files import write_model_at
from fsdp_async.generation import generate
from fsdp_async.rollout import SamplingParams
from fsdp_async.types import Prompt, ResponseGroup

BEAT_S = 1.0
Span = tuple[float, float]


@dataclass(frozen=True)
class Submit:
    """Prompts to respond to; groups carry `version` as submitted version."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    version: int


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
class Groups:
    """A finished chunk and when it was worked on."""

    groups: tuple[ResponseGroup, ...]
    span: Span


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
    """What a worker is built from; picklable. `record_dir` None keeps no weights."""

    model_builder: Callable[[], nn.Module]
    seed: int
    prompts_per_chunk: int
    record_dir: Path | None


class _ClosedError(Exception):
    """The trainer's side asked the worker to end, or is gone."""


def run_worker(spec: WorkerSpec, channel: Channel) -> None:
    """Serve until closed; an error is reported with its traceback before the worker ends."""
    try:
        _Worker(spec, channel).serve()
    except (_ClosedError, EOFError, ConnectionError):
        return
    except Exception:  # noqa: BLE001 - the edge of the worker: whatever it was, the trainer's side must hear of it
        with contextlib.suppress(OSError):
            channel.send(Failed(traceback.format_exc()))


class _Worker:
    def __init__(self, spec: WorkerSpec, channel: Channel) -> None:
        self._spec = spec
        self._channel = channel
        self._model = spec.model_builder().eval()
        self._receiver = WeightReceiver(self._model)
        self._waiting: deque[tuple[Prompt, Submit]] = deque()
        self._version: int | None = None
        self._is_paused = False
        self._unhandled: deque[Any] = deque()
        self._last_beat_s = time.monotonic()
        self._record_fd = None if spec.record_dir is None else _open_directory(spec.record_dir)
        channel.send(Ready())

    def serve(self) -> None:
        try:
            while True:
                message = self._next_message()
                if message is not None:
                    self._handle(message)
                elif self._can_generate():
                    self._generate()
                else:
                    self._beat()
        finally:
            if self._record_fd is not None:
                os.close(self._record_fd)

    def _next_message(self) -> Any | None:
        if self._unhandled:
            return self._unhandled.popleft()
        return self._channel.receive(0.0 if self._can_generate() else BEAT_S)

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
        assert self._version is not None
        start_s = time.monotonic()
        chunk = self._next_chunk()
        groups = generate(
            self._model,
            [prompt for prompt, _ in chunk],
            chunk[0][1].params,
            version=self._version,
            seed=self._spec.seed,
            on_step=self._between_steps,
        )
        stamped = tuple(
            replace(group, submitted_version=order.version) for group, (_, order) in zip(groups, chunk, strict=True)
        )
        self._channel.send(Groups(stamped, (start_s, time.monotonic())))

    def _next_chunk(self) -> list[tuple[Prompt, Submit]]:
        """The oldest prompts that are sampled in the same way."""
        params = self._waiting[0][1].params
        chunk: list[tuple[Prompt, Submit]] = []
        while self._waiting and len(chunk) < self._spec.prompts_per_chunk and self._waiting[0][1].params == params:
            chunk.append(self._waiting.popleft())
        return chunk

    def _between_steps(self) -> None:
        """Notice the end of the trainer's side within a token; everything else waits for the end of the chunk."""
        while (message := self._channel.receive(0.0)) is not None:
            if message == Command("close"):
                raise _ClosedError
            self._unhandled.append(message)
        self._beat()

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
    segment = SharedMemory(bucket.memory)
    try:
        memory = torch.frombuffer(segment.buf, dtype=torch.uint8)
        receiver.take(bucket, memory)
        # The view must be gone before the segment can be closed.
        del memory
    finally:
        segment.close()
