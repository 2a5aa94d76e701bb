"""Logging libraries that can neither slow a run nor end it.

Owns the run's end of a pipe to a process in which one library runs (`logger_worker.py`). What the library does, how
long it takes and how it fails stays there: the pipe never blocks the run, what does not fit is dropped and counted, and
a process that ended is warned of once. The process ends with the run, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_async.files import write_json
from fsdp_async.scalars import scalars

MAX_PENDING_BYTES = 1 << 22
FINISH_S = 30.0
IDENTITY = "logged_as.json"


class LibraryLogger:
    """A `Logger` behind which a library runs in a process of its own.

    Args:
        library: for messages, and for the file beside the run that takes the library's own output.
        backend: the file with `open_run`; see `logger_worker.py`.
        options: for `open_run`, as JSON; name, id and directory of the run are added.
        finish_s: how long the library may take at the end.
    """

    def __init__(self, library: str, backend: Path, options: Mapping[str, Any], *, finish_s: float = FINISH_S) -> None:
        self._library, self._backend, self._options, self._finish_s = library, backend, dict(options), finish_s
        self._pending = bytearray()
        self._num_dropped = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._log_path = Path()

    @property
    def pid(self) -> int | None:
        """Of the library's process, where there is one."""
        return None if self._process is None else self._process.pid

    def log(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Hand over the numbers of one event, without waiting."""
        if self._is_over:
            return
        numbers = {f"{event}/{name}": value for name, value in scalars(values)}
        line = json.dumps({"step": step, "numbers": numbers}).encode() + b"\n"
        if len(self._pending) + len(line) > MAX_PENDING_BYTES:
            self._num_dropped += 1
            if self._num_dropped == 1:
                self._warn("it is too slow, so that events are dropped from now on; how many is said at the end")
        else:
            self._pending += line
        self._write()

    def settle(self, directory: Path) -> None:
        """Start the library for the run in `directory`, which has its final name."""
        if self._process is not None or self._is_over:
            return
        self._log_path = directory / f"{self._library}.log"
        try:
            self._start(directory)
        except OSError as error:
            self._give_up(f"it could not be started ({error})")
            return
        os.set_blocking(self._pipe, False)
        self._write()

    def _start(self, directory: Path) -> None:
        """Raises OSError where there is no room for a file or a process."""
        options = {**self._options, **run_identity(directory), "directory": str(directory)}
        self._pending[:0] = json.dumps({**options, "finish_s": self._finish_s}).encode() + b"\n"
        worker = Path(__file__).with_name("logger_worker.py")
        with self._log_path.open("ab") as log:
            # A session of its own: Ctrl-C is the run's, and the pipe says when that has ended. No path of this package:
            # its `types.py` would stand before the standard library's.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(worker), str(self._backend)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def close(self, *, failed: bool = False) -> None:
        """Hand over what is left and how the run ended, and let the library finish, in bounded time; idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if not self._is_over:
            self._pending += json.dumps({"exit_code": int(failed)}).encode() + b"\n"
            self._write()
        deadline = time.monotonic() + self._finish_s
        while self._pending and not self._is_over and time.monotonic() < deadline:
            select.select([], [self._pipe], [], max(0.0, deadline - time.monotonic()))
            self._write()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()) + 1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code and not self._is_over:
            self._warn(f"it did not finish within {self._finish_s:g} s, or failed")
        if self._num_dropped:
            self._warn(f"{self._num_dropped} events were dropped in all, because it was too slow")

    @property
    def _pipe(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def _write(self) -> None:
        """As much of what waits as the pipe takes now."""
        if self._process is None:
            return
        try:
            while self._pending:
                del self._pending[: os.write(self._pipe, self._pending[: 1 << 16])]
        except BlockingIOError:
            return
        except OSError:
            self._give_up("it ended")

    def _give_up(self, why: str) -> None:
        self._is_over = True
        self._pending.clear()
        self._warn(why)

    def _warn(self, what: str) -> None:
        text = (
            f"{self._library}: {what}; the run goes on without it, and metrics.jsonl has everything. "
            f"See {self._log_path}"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def run_identity(directory: Path) -> dict[str, str]:
    """Id and name by which libraries know the run in `directory`; made when they are asked for first.

    They stay what they are when the run is resumed, also where its directory was renamed.

    Raises:
        OutputError: the file could not be written.
    """
    path = directory / IDENTITY
    if path.exists():
        kept: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return {"name": directory.name, **kept}
    identity = {"id": uuid.uuid4().hex[:12], "name": directory.name}
    write_json(path, identity)
    return identity
