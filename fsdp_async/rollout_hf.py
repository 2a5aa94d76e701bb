"""The transformers engine: a child process, or a thread for notebooks and debuggers.

Owns how a worker is started and ended, and how messages travel to it and back. What they say is `engine_proxy.py`'s.
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
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_async.engine_proxy import Ended, EngineProxy, worker_spec
from fsdp_async.engine_worker import (
    Command,
    Failed,
    WorkerSpec,
    run_worker,
)
from fsdp_async.rollout import RolloutConfig

CLOSE_TIMEOUT_S = 5.0


class ProcessEngine(EngineProxy):
    """An engine in a spawned child with one thread; ends by itself when this process does."""

    def __init__(
        self,
        model_builder: Callable[[], nn.Module],
        config: RolloutConfig,
        *,
        seed: int,
        name: str = "engine-0",
        record_dir: Path | None = None,
        log: Path | None = None,
    ) -> None:
        super().__init__(config, name)
        self._spec = worker_spec(model_builder, config, seed, record_dir, log)
        self._start_worker()

    def _start_worker(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_child_main, args=(self._spec, theirs), name=self.name, daemon=True)
        with _signals_held():
            self._process.start()
        theirs.close()
        # A pipe blocks when it is full; with a thread at each end of it the trainer never does.
        self._threads = [
            threading.Thread(target=target, args=(self._connection, box), name=f"{self.name}-{what}", daemon=True)
            for what, target, box in (
                ("reader", self._read_pipe, self._inbox),
                ("writer", self._write_pipe, self._outbox),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the child."""
        return self._process.pid

    def _stop_worker(self) -> None:
        """By request, then by force; one that fell silent is not asked."""
        if self._failure is None and time.monotonic() - self._last_sign_s < self._config.answer_timeout_s:
            self._outbox.put(Command("close"))
            self._process.join(CLOSE_TIMEOUT_S)
        self._outbox.put(None)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        for thread in self._threads:
            thread.join()
        self._connection.close()
        self._process.close()

    def _how_it_ended(self) -> str:
        self._process.join(CLOSE_TIMEOUT_S)
        code = self._process.exitcode
        by = f" (signal {signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"process {self._process.pid} exited with code {code}{by} and left no traceback"

    @staticmethod
    def _read_pipe(connection: Connection, inbox: queue.SimpleQueue[tuple[float, Any]]) -> None:
        try:
            while True:
                message = connection.recv()
                inbox.put((time.monotonic(), message))
        except (EOFError, OSError):
            inbox.put((time.monotonic(), Ended()))

    def _write_pipe(self, connection: Connection, outbox: queue.SimpleQueue[Any]) -> None:
        while (message := outbox.get()) is not None:
            try:
                connection.send(message)
            except OSError:
                # The child is gone; the reading thread says so.
                return
            except Exception:  # noqa: BLE001 - the edge of the thread: what cannot be sent must be heard of
                self._inbox.put((time.monotonic(), Failed(traceback.format_exc())))


class ThreadEngine(EngineProxy):
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
        log: Path | None = None,
    ) -> None:
        super().__init__(config, name)
        self._spec = worker_spec(model_builder, config, seed, record_dir, log)
        self._start_worker()

    def _start_worker(self) -> None:
        model = self._spec.model_builder()
        spec = replace(self._spec, model_builder=lambda: model)
        channel = _ThreadChannel(self._inbox, self._outbox)
        self._thread = threading.Thread(target=self._work, args=(spec, channel), name=self.name, daemon=True)
        self._thread.start()

    def _stop_worker(self) -> None:
        """After the token in hand; a thread that is stuck is left to the end of the process."""
        self._outbox.put(Command("close"))
        self._thread.join(CLOSE_TIMEOUT_S)

    def _how_it_ended(self) -> str:
        return "its thread returned without an error"

    @staticmethod
    def _work(spec: WorkerSpec, channel: _ThreadChannel) -> None:
        run_worker(spec, channel)
        channel.send(Ended())


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
    """Hold back stop signals while a child starts: it would be left half started, and print a traceback.

    The child inherits that Ctrl-C is blocked, until it can ignore it.
    """
    # Started with the first child otherwise, and lets signals through again when it has been.
    resource_tracker.ensure_running()
    held: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # What this thread blocks may be given to another one, and Python's handler then runs here all the same.
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(handler := signal.getsignal(stop)):
                handlers[stop] = handler
                signal.signal(stop, lambda number, frame: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def _child_main(spec: WorkerSpec, connection: Connection) -> None:
    # Ctrl-C reaches the whole process group; the trainer decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with contextlib.closing(connection):
        run_worker(spec, _PipeChannel(connection))
