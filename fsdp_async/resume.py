"""Going on from a checkpoint.

Owns the choice of the checkpoint, what may have changed in the config since, and what a run keeps beyond its tensors.
It does not know how a checkpoint lies on disk (`checkpoint.py`).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_async.checkpoint import (
    CHECKPOINTS,
    STATE,
    checkpoints_directory,
    checkpoints_in,
    newest_checkpoint,
    read_state,
    what_is_wrong,
)
from fsdp_async.config import Config
from fsdp_async.errors import CheckpointError
from fsdp_async.policy_files import open_policy
from fsdp_async.recorder import SUMMARY
from fsdp_async.run_dir import strict

OLD_SHAPE = "its weights have the old shape"
FROZEN = {
    "model": OLD_SHAPE,
    "task": "the stream would ask other questions under the same names",
    "warm_start": "it has no effect, since weights come from the checkpoint",
    "run.seed": "it orders the stream, of which a part has been asked already",
    "trainer.group_size": "groups that are queued or in flight have the old size",
    "trainer.groups_per_batch": "admission has reckoned with the old one",
    "trainer.sync_every": "versions have been counted by the old one",
}
"""What cannot change, and why. A directory of the policy may move: what is compared is in it."""
MOVABLE = ("model.path",)

UNSHOWN = ("run.output_dir", "run.resume", "run.overwrite")


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on. `changes` and `problems` are sentences for people."""

    path: Path
    state: Mapping[str, Any]
    changes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def step(self) -> int:
        """Batches trained so far."""
        return int(self.state["step"])

    def is_complete(self, config: Config) -> bool:
        """Nothing is left to do, unless `trainer.num_batches` is raised."""
        return self.step >= config.trainer.num_batches

    def summary(self) -> dict[str, Any]:
        """What the run of the checkpoint ended with; empty where it did not write it."""
        path = self.path.parent.parent / SUMMARY
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return summary

    @property
    def lines(self) -> list[str]:
        """For the plan."""
        changed = "; ".join(self.changes) if self.changes else "nothing"
        return [
            *(f"unusable checkpoint: {problem}" for problem in self.problems),
            f"resume: after step {self.step}, from {self.path}; changed since then: {changed}",
        ]


def find_resumption(config: Config) -> Resumption | None:
    """The checkpoint that `config.run.resume` asks for; None for a run that starts anew.

    Raises:
        CheckpointError: a named place holds no whole checkpoint, or what cannot change has changed.
    """
    wanted = config.run.resume
    if wanted is None:
        return None
    directory = Path(config.run.output_dir) / CHECKPOINTS
    if wanted != "auto":
        directory = checkpoints_directory(Path(wanted))
    if (directory / STATE).exists() or not (directory.is_dir() or wanted == "auto"):
        path, problems = _named(directory)
    else:
        path, problems = newest_checkpoint(directory)
    if path is None:
        if wanted == "auto" and not problems:
            return None
        found = "; ".join(problems) or "there is none"
        raise CheckpointError(
            f"run.resume={wanted}: no whole checkpoint in {directory}: {found}; start anew without it"
        )
    state = read_state(path)
    changes = config_changes(state["config"], strict(asdict(config)))
    _refuse_frozen(changes, path)
    if state["task_digest"] != task_digest(config):
        raise CheckpointError(
            f"{config.task.path} was edited since {path} was made: {FROZEN['task']}; use the old file"
        )
    _refuse_other_policy(state.get("policy"), policy_identity(config), config.model.path, path)
    shown = tuple(f"{key} {old} -> {new}" for key, (old, new) in changes.items() if key not in UNSHOWN)
    return Resumption(path, state, shown, tuple(problems))


def goes_on_in_place(config: Config) -> bool:
    """Whether the run's own directory holds the checkpoint that is asked for."""
    wanted, own = config.run.resume, Path(config.run.output_dir)
    if wanted is None or not checkpoints_in(own / CHECKPOINTS):
        return False
    return wanted == "auto" or own.resolve() in (Path(wanted).resolve(), *Path(wanted).resolve().parents)


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Path of each key that differs -> (old, new); a key that one of them lacks is None there."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*old, *new}):
        a, b, path = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changes |= config_changes(a, b, f"{path}.")
        elif a != b:
            changes[path] = (a, b)
    return changes


def task_digest(config: Config) -> str | None:
    """Of the file that the task reads; None for one that reads none."""
    path = config.task.path
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


def policy_identity(config: Config) -> dict[str, Any] | None:
    """Of the directory that holds the policy; None for one that is built from sizes."""
    path = config.model.path
    return None if path is None else open_policy(path).identity


def generators() -> dict[str, Any]:
    """The global generators of Python and NumPy, plain; torch's is a tensor and lies with the others."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [*random.getstate()[:2], random.getstate()[2]],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def set_generators(state: Mapping[str, Any]) -> None:
    """Put back what `generators` told."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _named(path: Path) -> tuple[Path | None, list[str]]:
    if not path.is_dir():
        return None, [f"{path} is no directory"]
    problem = what_is_wrong(path)
    if problem is None:
        return path, []
    others = [str(other) for other in checkpoints_in(path.parent) if other != path]
    return None, [f"{path}: {problem} (others there: {', '.join(others) or 'none'})"]


def _refuse_frozen(changes: Mapping[str, tuple[Any, Any]], path: Path) -> None:
    for key, (old, new) in changes.items():
        if key in MOVABLE:
            continue
        for frozen, reason in FROZEN.items():
            if key == frozen or key.startswith(f"{frozen}."):
                raise CheckpointError(
                    f"{key}={new}, but {path} was made with {old}, which cannot change: {reason}; set it back, or "
                    "start a new run"
                )


def _refuse_other_policy(
    old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, model_path: str | None, path: Path
) -> None:
    if old is None and new is None:
        return
    if old is None or new is None:
        made = "from sizes" if old is None else "from a directory"
        raise CheckpointError(
            f"model.path={model_path}, but {path} was made with a policy {made}, which cannot change: {OLD_SHAPE}; set "
            "it back, or start a new run"
        )
    if changes := config_changes(old["config"], new["config"]):
        told = ", ".join(f"{key}={now} instead of {before}" for key, (before, now) in changes.items())
        raise CheckpointError(
            f"model.path={model_path} does not hold what {path} was made with: {told}, which cannot change, because "
            "the weights were trained with it; give a directory with the same config.json, or start a new run"
        )
    if old["vocabulary"] != new["vocabulary"]:
        raise CheckpointError(
            f"model.path={model_path}: the tokenizer is another one than {path} was made with, which cannot change: "
            "its tokens would mean other texts; give a directory with the same tokenizer, or start a new run"
        )
