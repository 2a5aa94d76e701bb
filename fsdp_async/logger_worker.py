"""The process in which a logging library runs: `python -P logger_worker.py BACKEND`.

Owns the other end of `library_logger.py`'s pipe. The first line of standard input says what to open, each further one
is an event, and the last says how the run ended; without it the run was killed. When the pipe ends, the backend
finishes, in bounded time. It imports nothing of the package, which would take seconds, and is run by its path.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import select
import sys
import threading
import time
from typing import Any

MAX_WAITING = 1000
KILLED = 255
NICENESS = 10


def main(backend_path: str) -> int:
    """Hand events to `open_run(options)`'s result (`log(step, numbers)`, `finish(exit_code)`) until the pipe ends."""
    # The run comes first where there are not enough cores for both.
    os.nice(NICENESS)
    waiting: queue.Queue[Any] = queue.Queue(MAX_WAITING)
    options = json.loads(sys.stdin.buffer.readline())
    # For libraries that look for their place when they are imported.
    os.environ["FSDP_ASYNC_RUN_DIRECTORY"] = options["directory"]
    threading.Thread(target=_end_with_run, args=(float(options["finish_s"]),), daemon=True).start()
    threading.Thread(target=_read, args=(waiting,), daemon=True).start()
    spec = importlib.util.spec_from_file_location("backend", backend_path)
    assert spec is not None
    assert spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    run = backend.open_run(options)
    while "exit_code" not in (event := waiting.get()):
        run.log(event["step"], event["numbers"])
    run.finish(event["exit_code"])
    return 0


def _read(waiting: queue.Queue[Any]) -> None:
    for line in sys.stdin.buffer:
        # Killed in the middle of a line, the run leaves it torn.
        if line.endswith(b"\n"):
            waiting.put(json.loads(line))
    waiting.put({"exit_code": KILLED})


def _end_with_run(finish_s: float) -> None:
    """Nobody is left who could end a library that hangs.

    Asks whether the other end of the pipe is closed; the reader does not come to its end while nobody takes events.
    """
    hung_up = select.poll()
    hung_up.register(sys.stdin.fileno(), 0)
    hung_up.poll()
    time.sleep(finish_s)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
