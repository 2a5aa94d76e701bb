"""The process in which a logging library runs: `python -P logger_worker.py BACKEND`.

Owns the other end of `library_logger.py`'s pipe. The first line of standard input says what to open, each further one
is an event; when the pipe ends, because the run did, the backend finishes, in bounded time. It imports nothing of the
package, which would take seconds, and is run by its path.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import sys
import threading
import time
from typing import Any

MAX_WAITING = 1000


def main(backend_path: str) -> int:
    """Hand events to `open_run(options)`'s result (`log(step, numbers)`, `finish()`) until the pipe ends."""
    waiting: queue.Queue[Any] = queue.Queue(MAX_WAITING)
    options = json.loads(sys.stdin.buffer.readline())
    # For libraries that look for their place when they are imported.
    os.environ["FSDP_ASYNC_RUN_DIRECTORY"] = options["directory"]
    threading.Thread(target=_read, args=(waiting, float(options["finish_s"])), daemon=True).start()
    spec = importlib.util.spec_from_file_location("backend", backend_path)
    assert spec is not None
    assert spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    run = backend.open_run(options)
    while (event := waiting.get()) is not None:
        run.log(event["step"], event["numbers"])
    run.finish()
    return 0


def _read(waiting: queue.Queue[Any], finish_s: float) -> None:
    for line in sys.stdin.buffer:
        # Killed in the middle of a line, the run leaves it torn.
        if line.endswith(b"\n"):
            waiting.put(json.loads(line))
    threading.Thread(target=_end, args=(finish_s,), daemon=True).start()
    waiting.put(None)


def _end(finish_s: float) -> None:
    """Nobody is left who could end a library that hangs."""
    time.sleep(finish_s)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
