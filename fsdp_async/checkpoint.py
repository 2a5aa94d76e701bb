"""Whole-run checkpoints: everything that a run needs to go on, whole or absent.

    checkpoints/.step_000100.tmp/   tensors/  model, optimizer, retained versions, generators (DCP, all ranks)
                                    state.json  loop, queue, stream, config (rank 0)
                                    manifest.json  size and CRC-32 of every file, written last
    checkpoints/step_000100/        the same, after one rename

Owns the form on disk, the copy that a save waits for, the writing that it does not wait for, and which checkpoints are
kept. It promises that a directory without the word tmp in its name is whole unless somebody damaged it, which
`newest_checkpoint` notices; and that there is never fewer than one whole one once there was one. What the state means
is known to `run.py`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fsdp_async.errors import CheckpointError, ConfigError, OutputError
from fsdp_async.files import REMEDY, write_json
from fsdp_async.lead import Lead

FORMAT = 1
CHECKPOINTS = "checkpoints"
STATE, MANIFEST, TENSORS = "state.json", "manifest.json", "tensors"
PREFIX, SUFFIX = "step_", ".tmp"
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint after each `every` batches, at the end, and when the run is stopped; the last `keep` stay.

    `every=0` keeps none at all.
    """

    every: int = 50
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ConfigError(f"checkpoint.every={self.every}, keep={self.keep}: need every >= 0 and keep >= 1")
        if self.every == 0 and self.keep != CheckpointConfig.keep:
            raise ConfigError(f"checkpoint.keep={self.keep} has no effect with checkpoint.every=0; leave it out")


class CheckpointWriter:
    """Writes checkpoints below a directory while training goes on. All methods are collective.

    Args:
        directory: where they go, asked for at each save.
        config: when, and how many stay.
        lead: rank 0 writes what is no tensor, and commits.
        tensors: everything sharded, as DCP takes it.
        state: everything else, plain; asked on rank 0.
    """

    def __init__(
        self,
        directory: Callable[[], Path],
        config: CheckpointConfig,
        lead: Lead,
        tensors: Callable[[], dict[str, Any]],
        state: Callable[[], dict[str, Any]],
    ) -> None:
        self._directory = directory
        self._config = config
        self._lead = lead
        self._tensors = tensors
        self._state = state
        # Written from a thread of its own, beside the collectives of training.
        self._group = dist.new_group(backend="gloo", group_desc="fsdp_async checkpoint")
        self._pending: _Pending | None = None
        self._finished: list[tuple[int, Mapping[str, Any]]] = []
        self._last_committed: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` batches."""
        return self._config.every > 0 and step % self._config.every == 0

    def save(self, step: int, loop: Mapping[str, Any]) -> None:
        """Copy everything and return; waits for the save before, if that is still being written.

        Raises:
            OutputError: this one or the one before could not be written; older ones are untouched.
        """
        self.wait()
        start_s = time.monotonic()
        place = self._lead.ask(lambda: self._begin(step, loop))
        if place is None:
            return
        self._pending = _Pending(step, place, staged(self._tensors()), self._group)
        self._pending.start(time.monotonic() - start_s, keep=self._config.keep if self._lead.is_lead else None)

    def finished(self) -> list[tuple[int, Mapping[str, Any]]]:
        """(step, values) of what was committed since the last call; values in seconds and bytes."""
        pending = self._pending
        if pending is not None and self._lead.ask(lambda: pending.is_over):
            self.wait()
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> None:
        """Until what was begun is committed.

        Raises:
            OutputError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            outcomes = self._lead.gather(pending.join())
            if failures := [outcome for outcome in outcomes if isinstance(outcome, str)]:
                raise OutputError(errno.EIO, f"checkpoint {pending.place} was not written: {failures[0]}; {REMEDY}")
            assert isinstance(outcomes[0], dict)
            self._finished.append((pending.step, outcomes[0]))
            self._last_committed = pending.step

    def _begin(self, step: int, loop: Mapping[str, Any]) -> Path | None:
        """The directory to write to; None where this step is kept already."""
        directory = self._directory()
        name = f"{PREFIX}{step:06d}"
        place = directory / f".{name}{SUFFIX}"
        if (directory / name).exists():
            # Reading every byte takes long when a signal has come, and what was just written is whole.
            if step == self._last_committed or what_is_wrong(directory / name) is None:
                return None
            # The run went on from an older one, and has come here again.
            (directory / name).rename(place.with_name(f".{name}.damaged{SUFFIX}"))
        remove_leavings(directory)
        try:
            (place / TENSORS).mkdir(parents=True)
        except OSError as error:
            raise _not_written(place, error) from error
        write_json_loosely(place / STATE, {"format": FORMAT, "step": step, "loop": dict(loop), **self._state()})
        return place


class _Pending:
    """A checkpoint that is being written, on this rank."""

    def __init__(self, step: int, place: Path, tensors: dict[str, Any], group: ProcessGroup) -> None:
        self.step = step
        self.place = place
        self._tensors = tensors
        self._group = group
        self._outcome: dict[str, Any] | str = "its thread ended"
        self._thread: Thread | None = None

    @property
    def is_over(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def start(self, blocked_s: float, *, keep: int | None) -> None:
        """Write in a thread, and (`keep` is not None) commit."""
        self._thread = Thread(target=self._write, args=(blocked_s, keep), name="checkpoint", daemon=True)
        self._thread.start()

    def join(self) -> dict[str, Any] | str:
        """Wait; what was committed, or why it was not."""
        assert self._thread is not None
        self._thread.join()
        return self._outcome

    def _write(self, blocked_s: float, keep: int | None) -> None:
        start_s = time.monotonic()
        try:
            save(self._tensors, checkpoint_id=self.place / TENSORS, process_group=self._group)
            self._outcome = {}
            if keep is not None:
                num_bytes, path = _commit(self.place, keep)
                self._outcome = {"blocked_s": blocked_s, "num_bytes": num_bytes, "path": str(path)}
                self._outcome["write_s"] = time.monotonic() - start_s
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the edge of the thread: whoever waits must hear of it
            self._outcome = f"{type(error).__name__}: {error}"


def staged(value: Any) -> Any:
    """A copy, in host memory, of a tree of mappings, sequences and tensors; later training does not reach it."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: staged(item) for key, item in value.items()}
    return [staged(item) for item in value] if isinstance(value, list | tuple) else value


def newest_checkpoint(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint below `directory`, and what is wrong with newer ones."""
    problems: list[str] = []
    for path in reversed(checkpoints_in(directory)):
        if (problem := what_is_wrong(path)) is None:
            return path, problems
        problems.append(f"{path}: {problem}")
    return None, problems


def checkpoints_directory(place: Path) -> Path:
    """Where the checkpoints of a run at `place` lie; `place` itself where it is no run's directory."""
    return place / CHECKPOINTS if (place / CHECKPOINTS).is_dir() else place


def checkpoints_in(directory: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    found = directory.glob(f"{PREFIX}*") if directory.is_dir() else ()
    return sorted((path for path in found if path.name.removeprefix(PREFIX).isdigit()), key=_step_of)


def what_is_wrong(path: Path) -> str | None:
    """Why a checkpoint cannot be used; None for a whole one. Reads every byte."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            return f"{MANIFEST} cannot be read: it is no mapping"
        for name, (size, checksum) in manifest.items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} bytes instead of {size}: truncated"
            if _checksum(path / name) != checksum:
                return f"{name} is damaged: its checksum is not that of the manifest"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError) as error:
        return f"cannot be read ({error})"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The part of a whole checkpoint that is no tensor.

    Raises:
        CheckpointError: it is of another format.
    """
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')}, this version of the package reads {FORMAT}; use the version "
            "that wrote it"
        )
    return state


def load_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Fill `tensors` (as they were given to the writer) in place. Collective over all ranks.

    Raises:
        CheckpointError: a name, shape or dtype that the checkpoint does not have.
    """
    try:
        load(tensors, checkpoint_id=path / TENSORS)
    except (CheckpointException, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not fit this run: {error}") from error


def remove_leavings(directory: Path) -> None:
    """Remove what a killed run had not committed."""
    for path in directory.glob(f".{PREFIX}*{SUFFIX}") if directory.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, oldest first; each vanishes by one rename."""
    for path in checkpoints_in(directory)[:-keep]:
        doomed = path.with_name(f".{path.name}{SUFFIX}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def write_json_loosely(path: Path, value: Any) -> None:
    """Write JSON that only this package reads: NaN and infinities are allowed, as in a log-prob of -inf."""
    path.write_text(json.dumps(value), encoding="utf-8")


def _commit(place: Path, keep: int) -> tuple[int, Path]:
    num_bytes = _seal(place)
    path = place.with_name(place.name.removeprefix(".").removesuffix(SUFFIX))
    os.rename(place, path)
    _sync_directory(path.parent)
    prune(path.parent, keep)
    return num_bytes, path


def _seal(place: Path) -> int:
    """Write the manifest, all on disk; returns the bytes of all files."""
    files = sorted(path for path in place.rglob("*") if path.is_file())
    manifest = {}
    for path in files:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        manifest[str(path.relative_to(place))] = [path.stat().st_size, _checksum(path)]
    write_json(place / MANIFEST, manifest)
    _sync_directory(place)
    return sum(size for size, _ in manifest.values())


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def _not_written(place: Path, error: BaseException) -> OutputError:
    code = error.errno if isinstance(error, OSError) else errno.EIO
    return OutputError(code, f"checkpoint {place} was not written: {error}; {REMEDY}")
