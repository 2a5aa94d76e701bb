"""The transformers engine: a child process, or a thread for notebooks and debuggers.

Owns the trainer's side of an engine: it starts and ends the worker, hands commands over, and turns silence and death
into errors that name the engine and what was waited for. It never blocks for longer than it was asked to.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_async.buckets import WeightBucket
from fsdp_async.engine_worker import Command, Failed, Groups, Loaded, Ready, Submit, WorkerSpec, run_worker
from fsdp_async.errors import EngineDiedError, EngineTimeoutError, InputError
from fsdp_async.rollout import RolloutConfig, SamplingParams
from fsdp_async.types import Prompt, ResponseGroup

CLOSE_TIMEOUT_S = 5.0


class _Ended:
    """Last message of every worker: nothing comes after it."""


class _Proxy:
    """What both engines share: books about a worker that answers by messages."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        self._config = config
        self.name = name
        self._inbox: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        self._groups: list[ResponseGroup] = []
        self._spans: list[tuple[float, float]] = []
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

    def submit(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Queue prompts under the version handed over last.

        Raises:
            InputError: no version was ever handed over.
        """
        if self._published is None:
            raise InputError(f"{self.name}: submit before the first load; publish version 0 first")
        self._check()
        self._num_outstanding += len(prompts)
        self._send(Submit(tuple(prompts), params, self._published))

    def poll(self, timeout_s: float) -> list[ResponseGroup]:
        """Finished groups; waits up to `timeout_s` for the first one."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._read(0.0 if self._groups else max(0.0, deadline_s - time.monotonic()))
            if self._groups or time.monotonic() >= deadline_s:
                self._check()
                groups, self._groups = self._groups, []
                self._num_outstanding -= len(groups)
                return groups

    def pause(self) -> None:
        """Generate nothing more after the chunk in hand."""
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

    def _send(self, message: Any) -> None:
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
                self._spans.append(message.span)
            case Loaded():
                self._loaded = (message.version, message.bucket)
                self._spans.append(message.span)
                if message.is_last:
                    self._version = message.version
            case Failed():
                self._failure = message.trace
            case _Ended() if not self._is_closed:
                self._failure = self._failure or self._how_it_ended()

    def _check(self) -> None:
        """Raise if the engine is dead, silent or closed."""
        if self._is_closed:
            raise EngineDiedError(f"{self.name} was closed")
        self._read(0.0)
        if self._failure is not None:
            raise EngineDiedError(f"{self.name} ended: {self._failure}")
        silent_s = time.monotonic() - self._last_sign_s
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


class ProcessEngine(_Proxy):
    """An engine in a spawned child with one thread; ends by itself when this process does."""

    def __init__(
        self,
        model_builder: Callable[[], nn.Module],
        config: RolloutConfig,
        *,
        seed: int,
        name: str = "engine-0",
        record_dir: Path | None = None,
    ) -> None:
        super().__init__(config, name)
        spec = WorkerSpec(model_builder, seed, config.prompts_per_chunk, record_dir)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_child_main, args=(spec, theirs), name=name, daemon=True)
        with _signals_held():
            self._process.start()
        theirs.close()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A pipe blocks when it is full; with a thread at each end of it the trainer never does.
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{target.__name__}", daemon=True)
            for target in (self._read_pipe, self._write_pipe)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the child."""
        return self._process.pid

    def close(self) -> None:
        """End the child: by request, then by force. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._outbox.put(Command("close"))
        self._outbox.put(None)
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        for thread in self._threads:
            thread.join()
        self._connection.close()
        self._process.close()

    def _send(self, message: Any) -> None:
        self._outbox.put(message)

    def _how_it_ended(self) -> str:
        self._process.join(CLOSE_TIMEOUT_S)
        code = self._process.exitcode
        by = f" (signal {signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"process {self._process.pid} exited with code {code}{by} and left no traceback"

    def _read_pipe(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                self._inbox.put((time.monotonic(), message))
        except (EOFError, OSError):
            self._inbox.put((time.monotonic(), _Ended()))

    def _write_pipe(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                # The child is gone; the reading thread says so.
                return
            except Exception:  # noqa: BLE001 - the edge of the thread: what cannot be sent must be heard of
                self._inbox.put((time.monotonic(), Failed(traceback.format_exc())))


class ThreadEngine(_Proxy):
    """An engine in a thread of this process. Shares its CPU time; its thread leaves global random state alone.

    The model is built before the thread starts: initialisation draws from the global generator, and two threads that
    draw from it at once both get other numbers than their seeds promise. What `model_builder` raises is raised here.
    """

    def __init__(
        self,
        model_builder: Callable[[], nn.Module],
        config: RolloutConfig,
        *,
        seed: int,
        name: str = "engine-0",
        record_dir: Path | None = None,
    ) -> None:
        super().__init__(config, name)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        model = model_builder()
        spec = WorkerSpec(lambda: model, seed, config.prompts_per_chunk, record_dir)
        self._thread = threading.Thread(target=self._work, args=(spec,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after the token in hand; one that is stuck is left to the end of the process. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._outbox.put(Command("close"))
            self._thread.join(CLOSE_TIMEOUT_S)

    def _send(self, message: Any) -> None:
        self._outbox.put(message)

    def _how_it_ended(self) -> str:
        return "its thread returned without an error"

    def _work(self, spec: WorkerSpec) -> None:
        run_worker(spec, _ThreadChannel(self._inbox, self._outbox))
        self._inbox.put((time.monotonic(), _Ended()))


class _ThreadChannel:
    """The worker's end of two queues."""

    def __init__(self, inbox: queue.SimpleQueue[tuple[float, Any]], outbox: queue.SimpleQueue[Any]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, message: Any) -> None:
        self._inbox.put((time.monotonic(), message))

    def receive(self, timeout_s: float) -> Any | None:
        try:
            return self._outbox.get(timeout=timeout_s) if timeout_s else self._outbox.get_nowait()
        except queue.Empty:
            return None


class _PipeChannel:
    """The worker's end of a pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def receive(self, timeout_s: float) -> Any | None:
        return self._connection.recv() if self._connection.poll(timeout_s) else None


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold back Ctrl-C while a child starts; it inherits this, and would print a traceback until it can ignore it."""
    # Started with the first child otherwise, and lets signals through again when it has been.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child_main(spec: WorkerSpec, connection: Connection) -> None:
    # Ctrl-C reaches the whole process group; the trainer decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with contextlib.closing(connection):
        run_worker(spec, _PipeChannel(connection))
