"""The directory of one run.

Owns who may write where. A directory belongs to one living run at a time (a lock that the system frees when its holder
dies); a directory that holds another run's results is refused, or, with `overwrite`, kept in place until the new run
has taken its first step and then moved aside.
"""

from __future__ import annotations

import fcntl
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Self

from fsdp_async.errors import OutputError, RunDirectoryError
from fsdp_async.files import put_in_place

RECORD = "run.json"
LIBRARIES = ("fsdp-async", "torch", "transformers", "safetensors", "hydra-core", "pydantic", "numpy")


class RunDirectory:
    """A context manager that holds the lock of `target`; with `resume` what is there stays and is gone on with.

    Raises:
        RunDirectoryError: in use by a living run, or not empty without `overwrite`, or no directory.
        OutputError: the place cannot be written.
    """

    def __init__(self, target: Path, *, overwrite: bool, resume: bool = False) -> None:
        # Resolved, so that one directory has one lock whatever name leads to it.
        self._target = target.resolve()
        self._overwrite = overwrite
        self._resume = resume
        self._lock: IO[str] | None = None
        self._staging: Path | None = None

    @property
    def path(self) -> Path:
        """Where to write now."""
        return self._staging or self._target

    @property
    def is_kept(self) -> bool:
        """Whether results stay when the lock is gone: not those of a run that never took the old one's place."""
        return self._staging is None

    def __enter__(self) -> Self:
        if not self._target.name:
            raise RunDirectoryError(f"run.output_dir={self._target} is the root of a file system; name a directory")
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _acquire(self._target)
            self._prepare()
        except RunDirectoryError:
            self._release()
            raise
        except OSError as error:
            self._release()
            raise OutputError(
                error.errno, f"run.output_dir={self._target}: {error.strerror}; choose a place that can be written"
            ) from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
        self._release()

    def promote(self) -> None:
        """Give the run its final place; what was there moves to `NAME.old-TIME`. Only once, later calls do nothing.

        Raises:
            OutputError: a rename failed; what was there is in its place.
        """
        if self._staging is None:
            return
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        try:
            put_in_place(self._staging, self._target, aside=f"{self._target.name}.old-{moment}")
        except OSError as error:
            raise OutputError(
                error.errno, f"{self._staging} could not take the place of {self._target}: {error.strerror}; what was "
                "there before is untouched; choose another run.output_dir"
            ) from error  # fmt: skip
        self._staging = None

    def _prepare(self) -> None:
        staging = self._target.with_name(f".{self._target.name}.new")
        # Under the lock nobody living can own it: it is what a killed run left.
        shutil.rmtree(staging, ignore_errors=True)
        if self._target.exists() and not self._target.is_dir():
            raise RunDirectoryError(f"run.output_dir={self._target} is a file; choose another name")
        if not self._target.exists() or not any(self._target.iterdir()):
            self._target.mkdir(exist_ok=True)
            return
        if self._resume:
            return
        if not self._overwrite:
            raise RunDirectoryError(
                f"run.output_dir={self._target} is not empty; choose another directory, or run.overwrite=true to have "
                "it moved aside once the new run has taken its first step"
            )
        self._refuse_to_move()
        staging.mkdir()
        self._staging = staging

    def _refuse_to_move(self) -> None:
        """Only a run's own directory is moved aside, and only when nobody is at work in it."""
        if self._target in (here := Path.cwd(), *here.parents):
            raise RunDirectoryError(
                f"run.output_dir={self._target} is or holds the current directory {here}, which will not be moved "
                "aside; name a directory below it"
            )
        if not (self._target / RECORD).is_file():
            raise RunDirectoryError(
                f"run.output_dir={self._target} holds no run (no {RECORD}) but other files, which will not be moved "
                "aside; choose another directory"
            )
        for lock in self._target.rglob(".*.lock"):
            with lock.open("r") as handle:
                if not _lock(handle):
                    raise RunDirectoryError(
                        f"run.output_dir={self._target} holds a living run (process {handle.read().strip()}, "
                        f"{lock}); stop it or choose another directory"
                    )

    def _release(self) -> None:
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None


def _acquire(target: Path) -> IO[str]:
    path = target.with_name(f".{target.name}.lock")
    while True:
        handle = path.open("a+")
        if not _lock(handle):
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            handle.close()
            raise RunDirectoryError(
                f"run.output_dir={target} is in use by a living run (process {owner}); stop it or choose another "
                "directory"
            )
        # The holder before us may have removed the file between our open and our lock: then we hold a lock on nothing.
        if _is_at(handle, path):
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            return handle
        handle.close()


def _lock(handle: IO[str]) -> bool:
    """Whether the file could be locked; freed when it is closed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(handle: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def run_record(config: Mapping[str, Any], *, seeds: Mapping[str, int], plan_lines: Sequence[str]) -> dict[str, Any]:
    """What was run, by which code, on what: config, commit, library versions, seeds, effective plan."""
    return {
        "config": strict(config),
        "seeds": dict(seeds),
        "plan": list(plan_lines),
        "commit": _commit(Path(__file__)),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "started": datetime.now(UTC).isoformat(),
    }


def strict(value: Any) -> Any:
    """`value` with infinite numbers as text, for JSON has none; `parse_config` reads them back."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _version(library: str) -> str | None:
    """None for a library that is not installed, as this package in a bare checkout."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _commit(source: Path) -> str | None:
    """Commit of the checkout that `source` belongs to, with "-dirty" where it was edited; None elsewhere.

    A package installed below somebody's repository lies in a checkout that knows nothing of it: not its commit.
    """
    try:
        _git(source, "ls-files", "--error-unmatch", source.name)
        return _git(source, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(source: Path, *arguments: str) -> str:
    # No optional locks: a run must not get into the way of a git that the user runs at the same time.
    command = ["git", "--no-optional-locks", *arguments]
    done = subprocess.run(
        command, cwd=source.resolve().parent, capture_output=True, text=True, timeout=10, check=True
    )  # fmt: skip
    return done.stdout.strip()
