"""Where events go: a JSONL file, TensorBoard, logging libraries.

Owns the form in which numbers are kept. A JSONL line is whole or absent. It decides nothing about what is logged.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

from torch.utils.tensorboard import SummaryWriter

from fsdp_async.backends import require_package
from fsdp_async.checks import require_choice
from fsdp_async.errors import ConfigError, InputError, OutputError
from fsdp_async.files import REMEDY, write_bytes
from fsdp_async.library_logger import LibraryLogger
from fsdp_async.scalars import scalars

WandbMode = Literal["offline", "online"]


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """`metrics.jsonl` is always written, for the summary rests on it; TensorBoard, W&B and trackio on request.

    W&B and trackio run in processes of their own, which neither slow nor end the run; their files lie in its directory,
    and a resumed run is the same run to them. `project` is what they call the project.
    """

    tensorboard: bool = True
    wandb: WandbMode | None = None
    trackio: bool = False
    project: str = "fsdp_async"

    def __post_init__(self) -> None:
        if self.wandb is not None:
            require_choice("logging.wandb", self.wandb, get_args(WandbMode))
        if not self.project:
            raise ConfigError("logging.project is empty; name a project")
        if self.project != LoggingConfig.project and not self.libraries:
            raise ConfigError(
                f"logging.project={self.project} has no effect without logging.wandb or logging.trackio; leave it out"
            )

    @property
    def libraries(self) -> list[str]:
        """Those that run in processes of their own."""
        return ["wandb"] * (self.wandb is not None) + ["trackio"] * self.trackio


class Logger(Protocol):
    """Takes events; `settle` says that the run directory has got its final name."""

    def log(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Keep one event."""
        ...

    def settle(self, directory: Path) -> None:
        """The directory will not be renamed any more."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Flush and let go; `failed` is whether the run ended with an error. Idempotent."""
        ...


class JsonlLogger:
    """One JSON object a line: event, step, values. Numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def log(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one line.

        Raises:
            OutputError: the line could not be written whole; the file ends with the line before it.
        """
        record = _finite({"event": event, "step": step, **values})
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        # Asked anew each time: after a failure the position lies beyond the end that the file was cut back to.
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "the disk took only a part of the line")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise OutputError(error.errno, f"{self._path}: {error.strerror or error}; {REMEDY}") from error

    def settle(self, directory: Path) -> None:
        """Nothing to do: an open file follows its directory."""

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger:
    """Numbers of events as scalars `event/key`.

    TensorBoard opens its file by name at every flush, so scalars wait until the directory has its final name.
    """

    def __init__(self, *, resumed_from: int | None = None) -> None:
        # What was logged of later steps is hidden: they are taken again.
        self._purge_step = None if resumed_from is None else resumed_from + 1
        self._writer: SummaryWriter | None = None
        self._waiting: list[tuple[str, float, int]] = []

    def log(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Keep the scalars of one event.

        Raises:
            OutputError: the event file could not be written.
        """
        self._waiting += [(f"{event}/{name}", value, step) for name, value in scalars(values)]
        if self._writer is not None:
            self._write_waiting(self._writer)

    def settle(self, directory: Path) -> None:
        """Open the event file below `directory` and write what has waited.

        Raises:
            OutputError: the event file could not be written.
        """
        if self._writer is None:
            with self._named(directory / "tensorboard"):
                self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=self._purge_step)
        self._write_waiting(self._writer)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close; nothing to do after a failed write, which was reported.

        Raises:
            OutputError: the last scalars could not be written.
        """
        if self._writer is not None:
            with self._named(Path(self._writer.log_dir)):
                self._writer.close()
            self._writer = None

    def _write_waiting(self, writer: SummaryWriter) -> None:
        with self._named(Path(writer.log_dir)):
            for name, value, step in self._waiting:
                writer.add_scalar(name, value, step)
        self._waiting.clear()

    @contextlib.contextmanager
    def _named(self, path: Path) -> Iterator[None]:
        """Turn a failure of the writer (its thread's failure surfaces at the next call) into one that names `path`."""
        try:
            yield
        except OSError as error:
            self._writer = None  # its thread has ended; closing it would fail once more
            raise OutputError(error.errno, f"{path}: {error.strerror or error}; {REMEDY}") from error


class Loggers:
    """All configured loggers as one; a context manager that closes them.

    `resumed_from` is the step that a resumed run goes on from; `settings` are the run's, for libraries that show them.
    """

    def __init__(
        self,
        config: LoggingConfig,
        directory: Path,
        *,
        resumed_from: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._loggers: list[Logger] = [JsonlLogger(directory / "metrics.jsonl")]
        if config.tensorboard:
            self._loggers.append(TensorBoardLogger(resumed_from=resumed_from))
        options = {"project": config.project, "mode": config.wandb, "settings": _finite(settings or {})}
        for name in config.libraries:
            self._loggers.append(LibraryLogger(name, require_package(name), options))

    def log(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Hand one event to every logger.

        Raises:
            InputError: a value under a name that the record itself uses.
            OutputError: a logger could not write.
        """
        if taken := {"event", "step"} & values.keys():
            raise InputError(f"event {event!r}: the names {sorted(taken)} belong to the record; rename these values")
        for logger in self._loggers:
            logger.log(event, step, values)

    def settle(self, directory: Path) -> None:
        """Tell every logger the final directory."""
        for logger in self._loggers:
            logger.settle(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        failed = bool(exc_info) and exc_info[0] is not None
        with contextlib.ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close, failed=failed)


def rewind_jsonl(path: Path, num_lines: int) -> list[dict[str, Any]]:
    """Cut a file back to its first `num_lines` and return them; the rest goes to `NAME.discarded.jsonl`.

    Raises:
        InputError: there are fewer whole lines.
        OutputError: a file could not be written; the old one is as it was.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if len(lines) < num_lines:
        raise InputError(f"{path} has {len(lines)} lines, {num_lines} were there when the checkpoint was made")
    if len(lines) > num_lines:
        try:
            with path.with_suffix(".discarded.jsonl").open("ab") as discarded:
                discarded.writelines(lines[num_lines:])
        except OSError as error:
            raise OutputError(error.errno, f"{path}: {error.strerror}; {REMEDY}") from error
        write_bytes(path, b"".join(lines[:num_lines]))
    return read_jsonl(path) if num_lines else []


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file.

    Raises:
        InputError: a line that is no JSON object, named by its number.
    """
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:  # not JSON, or torn inside a character
            raise InputError(f"{path}, line {number}: torn or not JSON ({error})") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}: {record!r:.80} is no JSON object")
        records.append(record)
    return records


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
