"""The process in which a reward function runs that may hang, die or raise anything.

`scoring.py` starts this file as a script. It imports the standard library alone, so that a process that had to be
killed is replaced in milliseconds, and it answers each request with a kind and a value, whatever the function did. It
ends, with every process that the function started, when the process that started it ends. Messages: see `serve`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import pickle
import reprlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

MAX_TEXT = 500
Function = Callable[[str, str, dict[str, Any]], Any]


def serve(connection: Connection) -> None:
    """Take (search path, function), send ("ready", "") or ("missing", why), then answer requests until nobody asks.

    A request is the pickle of the function's arguments; see `answer`.
    """
    search_path, function = connection.recv()
    sys.path[:] = search_path
    try:
        score = load(function)
    except BaseException as error:  # noqa: BLE001 - the edge of the process: the module of a user may raise anything
        connection.send(("missing", describe(error)))
        return
    connection.send(("ready", ""))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(answer(score, connection.recv_bytes()))


def load(function: str) -> Function:
    """The function that "package.module:name" or "file.py:name" names.

    Raises:
        ImportError, FileNotFoundError, LookupError, TypeError: there is no such module, file or name, or the name is
            no function. Whatever the module raises when it is imported goes through.
    """
    where, _, name = function.rpartition(":")
    module = _module_of_file(where) if where.endswith(".py") else importlib.import_module(where)
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise LookupError(f"{where} has no {name!r}; it has {', '.join(known) or 'no function'}")
    score = getattr(module, name)
    if not callable(score):
        raise TypeError(f"{function} is {reprlib.repr(score)}, no function")
    return score  # type: ignore[no-any-return]


def _module_of_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no file {path}")
    # Files beside it can be imported, and shadow nothing.
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("fsdp_async_reward", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def answer(score: Function, request: bytes) -> tuple[str, Any]:
    """("score", a finite float), or ("raised" or "not_a_number", what happened)."""
    served_by = os.getpid()
    try:
        value = score(*pickle.loads(request))
    except BaseException as error:  # noqa: BLE001 - sys.exit in a reward is a failure of the reward, too
        _end_if_forked(served_by)
        return "raised", describe(error)
    _end_if_forked(served_by)
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # noqa: BLE001 - whatever its __float__ raises
        number = math.nan
    if math.isfinite(number):
        return "score", number
    return "not_a_number", f"it returned {reprlib.repr(value)} ({type(value).__name__})"


def _end_if_forked(served_by: int) -> None:
    """A child that a reward forked must not answer, too: every later answer would be another response's."""
    if os.getpid() != served_by:
        os._exit(1)


def describe(error: BaseException) -> str:
    """Type, message and place of an error in one line."""
    text = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{text[:MAX_TEXT]}{place}"


def _end_with_parent(lifeline: int) -> None:
    """Nothing is ever written to the lifeline; it ends when the process at its other end does."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve on the connection whose descriptor is the only argument; standard input is the lifeline."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # standard output may be a live view
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    line = int(sys.argv[1])
    os.set_inheritable(line, False)
    serve(Connection(line))


if __name__ == "__main__":
    main()
