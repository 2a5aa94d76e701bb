"""Rewards that may fail.

Owns the reward whose function runs in a process of its own: it gives each response a time limit, replaces a process
that hangs or dies, counts failures by kind, and ends the run when they are too many. What the function computes is not
its business; the working side is `scoring_worker.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsdp_async import scoring_worker
from fsdp_async.errors import ConfigError, RewardError
from fsdp_async.types import Prompt, Response

START_TIMEOUT_S = 120.0


class TextSource(Protocol):
    """Who knows the words: a task."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without the end."""
        ...

    def scoring_info(self, prompt_id: str) -> Mapping[str, Any]:
        """What a reward function may know of a prompt; picklable."""
        ...


@dataclass(frozen=True)
class Limits:
    """`timeout_s` for one response; more than `max_failures` in all are an error; a failure scores `failure_value`."""

    timeout_s: float
    max_failures: int
    failure_value: float


def reward_arguments(source: TextSource, prompt: Prompt, response: Response) -> tuple[str, str, dict[str, Any]]:
    """What a reward function is called with: texts of prompt and response, and `info`."""
    info = {
        **source.scoring_info(prompt.prompt_id),
        "prompt_id": prompt.prompt_id,
        "sample_index": response.sample_index,
        "finish_reason": response.finish_reason,
    }
    return source.decode(prompt.token_ids), source.decode(response.token_ids), info


class ProcessReward:
    """`function(prompt_text, response_text, info) -> float`, run in a process of its own.

    `info` is what the task tells (`answer`, for instance) plus `prompt_id`, `sample_index` and `finish_reason`. One
    response is scored at a time, so a run waits for its reward at most (max_failures + 1) * timeout_s in vain.
    Failures are `raised`, `timed_out`, `not_a_number` (NaN, infinite, or no number at all) and `died` (the process
    ended). Standard output of the function goes to standard error.

    Args:
        function: "package.module:name" (the working directory is searched, too) or "file.py:name".
        source: the texts.
        limits: what is allowed.

    Raises:
        ConfigError: the function cannot be imported; names what is missing.
    """

    def __init__(self, function: str, source: TextSource, limits: Limits) -> None:
        self._function = function
        self._source = source
        self._limits = limits
        self._failures: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._is_closed = False
        self._worker: _Worker | None = _Worker(function)

    @property
    def failures(self) -> dict[str, int]:
        """How many responses could not be scored, by kind; kinds that never occurred are left out."""
        return dict(self._failures)

    @property
    def first_failures(self) -> dict[str, str]:
        """The first message of each kind: which response and what happened."""
        return dict(self._first)

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None while there is none."""
        return None if self._worker is None else self._worker.pid

    def score(self, prompt: Prompt, response: Response) -> float:
        """The function's value; `failure_value` where it failed.

        Raises:
            RewardError: more than `max_failures` failed, or the reward is closed.
        """
        value = self.try_score(prompt, response)
        return self._limits.failure_value if value is None else value

    def try_score(self, prompt: Prompt, response: Response) -> float | None:
        """The function's value; None where it failed, which is counted.

        Raises:
            RewardError: see `score`.
        """
        if self._is_closed:
            raise RewardError(f"rewards: {self._function} was closed and scores nothing any more")
        kind, value = self._ask(prompt, response)
        if kind == "score":
            return float(value)
        self._count(kind, f"{response.prompt_id!r}[{response.sample_index}] {kind}: {value}")
        return None

    def close(self) -> None:
        """Kill the process and whatever it started. Idempotent."""
        self._is_closed = True
        self._end_worker()

    def _ask(self, prompt: Prompt, response: Response) -> tuple[str, Any]:
        arguments = reward_arguments(self._source, prompt, response)
        try:
            request = pickle.dumps(arguments)
        except Exception as error:  # noqa: BLE001 - whatever an object in `info` raises when it is to be sent
            return "raised", f"its arguments cannot be sent to its process: {scoring_worker.describe(error)}"
        worker = self._worker = self._worker or self._start_again()
        try:
            return worker.ask(request, self._limits.timeout_s)
        except TimeoutError:
            self._end_worker()
            return "timed_out", f"no value within rewards.timeout_s={self._limits.timeout_s:g}"
        except (EOFError, OSError, pickle.UnpicklingError):
            return "died", f"its process ended with code {self._end_worker()}"
        except BaseException:  # interrupted: an answer that comes later would be taken for the next one
            self._end_worker()
            raise

    def _count(self, kind: str, message: str) -> None:
        self._failures[kind] += 1
        self._first.setdefault(kind, message)
        total, allowed = self._failures.total(), self._limits.max_failures
        if total > allowed:
            counts = ", ".join(f"{number} {name}" for name, number in self._failures.items())
            raise RewardError(
                f"{self._function} failed on {total} responses ({counts}), above rewards.max_failures={allowed}; the "
                f"last: {message}. First of each kind: {'; '.join(self._first.values())}. Mend the function, or raise "
                "rewards.max_failures"
            )

    def _start_again(self) -> _Worker:
        try:
            return _Worker(self._function)
        except ConfigError as error:
            raise RewardError(f"the reward's process had to be started again and could not: {error}") from error

    def _end_worker(self) -> int | None:
        worker, self._worker = self._worker, None
        return None if worker is None else worker.kill()


class _Worker:
    """One process of `scoring_worker.py` and the line to it. In a session of its own: Ctrl-C does not reach it."""

    def __init__(self, function: str) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # -P: the directory of the script is no place to import from; it holds a types.py.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(scoring_worker.__file__).resolve()), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.pid = self._process.pid
        try:
            kind, why = self._first_word(function)
        except BaseException:
            self.kill()
            raise
        if kind != "ready":
            self.kill()
            raise ConfigError(f"rewards.function={function}: {why}; name a function that can be imported")

    def ask(self, request: bytes, timeout_s: float) -> tuple[str, Any]:
        """The worker's answer.

        Raises:
            TimeoutError: none within `timeout_s`.
            EOFError, OSError: the process ended.
        """
        self._connection.send_bytes(request)
        return self._receive(timeout_s)

    def kill(self) -> int:
        """End the process and its children; returns its exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left of it
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return code

    def _first_word(self, function: str) -> tuple[str, Any]:
        try:
            self._connection.send(([*sys.path, os.getcwd()], function))
            return self._receive(START_TIMEOUT_S)
        except TimeoutError:
            return "missing", f"its module was not imported within {START_TIMEOUT_S:g} s"
        except (EOFError, OSError):
            return "missing", "its process ended while it imported the module"

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        kind, value = self._connection.recv()
        return kind, value
