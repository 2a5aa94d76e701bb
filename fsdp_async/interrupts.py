"""Signals that wait.

Owns one thing: while weights are not where they belong, a Ctrl-C (or any other handler that raises) must not cut in
between two statements. Python runs handlers in the main thread alone, so that is the only thread where it has to be
done; elsewhere nothing is held.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


class HeldSignals:
    """A context manager under which Python's handlers wait for its end, but for the time in which `is_open` is True.

    Set `is_open` by plain assignment: CPython looks for signals at calls and jumps, not at stores, so that no signal
    comes between the end of an open part and the statement that closes it.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._handlers: dict[int, Any] = {}
        self._waiting: list[int] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in HELD:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_open = False
        try:
            self._give_back()
        except BaseException:
            self._give_back()  # what one that was given back had cut short
            raise
        while self._waiting:
            signal.raise_signal(self._waiting.pop(0))

    def _give_back(self) -> None:
        """Ctrl-C's handler, which raises, was taken first and is given back last."""
        while self._handlers:
            number = next(reversed(self._handlers))
            signal.signal(number, self._handlers[number])
            del self._handlers[number]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_open:
            self._handlers[number](number, frame)
        elif number not in self._waiting:
            self._waiting.append(number)
