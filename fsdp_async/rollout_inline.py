"""The transformers engine in the caller's own thread, for whoever stands in a debugger.

Owns when it works: at once, whenever it is given something. Prompts are answered where they are submitted, under the
weights published last, so that runs are the same each time, and a breakpoint anywhere stops everything.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_async.engine_proxy import EngineProxy, worker_spec
from fsdp_async.engine_worker import Worker
from fsdp_async.rollout import RolloutConfig


class InlineEngine(EngineProxy):
    """No process, no thread, no time limit; what the model raises goes through. Nothing can interrupt a response."""

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
        self._worker = Worker(self._spec, _Desk(self._inbox, self._outbox))

    def _stop_worker(self) -> None:
        self._worker.close()

    def _send(self, message: Any) -> None:
        super()._send(message)
        self._worker.work()

    def _silent_s(self) -> float:
        # It works whenever it is asked to, and whoever looks at things in a debugger has all the time there is.
        return 0.0


class _Desk:
    """What is sent lies on it until it is taken."""

    def __init__(self, inbox: queue.SimpleQueue[tuple[float, Any]], outbox: queue.SimpleQueue[Any]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, message: Any) -> None:
        self._inbox.put((time.monotonic(), message))

    def receive(self, timeout_s: float) -> Any | None:
        try:
            return self._outbox.get_nowait()
        except queue.Empty:
            return None
