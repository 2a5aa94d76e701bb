"""A checkpoint, looked at without a run: what is in it, and how two of them differ.

Owns the reading of single tensors out of checkpoints and safetensors files, in this process alone. Writes nothing. A
place is a run's directory (its newest checkpoint), a checkpoint, or a safetensors file; `PLACE@VERSION` is a version
or named state that a checkpoint retains, `PLACE` alone the live model.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from fsdp_async.checkpoint import (
    MANIFEST,
    TENSORS,
    checkpoints_directory,
    checkpoints_in,
    newest_checkpoint,
    read_state,
    what_is_wrong,
)
from fsdp_async.contents import Fingerprint, LazyTensors, difference_of, digest_of
from fsdp_async.errors import CheckpointError

MODEL, VERSIONS = "model", "versions"


class StoredCheckpoint:
    """A whole checkpoint on disk; its tensors are read one at a time.

    Raises:
        CheckpointError: it is not whole.
    """

    def __init__(self, path: Path) -> None:
        if (problem := what_is_wrong(path)) is not None:
            raise CheckpointError(f"{path}: {problem}; take another checkpoint of the run")
        self.path = path
        self.state: dict[str, Any] = read_state(path)
        self._metadata = FileSystemReader(path / TENSORS).read_metadata()

    @property
    def versions(self) -> list[str]:
        """Retained versions, then named states, as words."""
        return [str(key) for key in self.state["versions"]]

    def tensors(self, version: str | None) -> Mapping[str, Tensor]:
        """Whole tensors of a retained state by name; None for the live model.

        Raises:
            CheckpointError: it is not retained; says what is.
        """
        prefix = (MODEL,) if version is None else (VERSIONS, version)
        if version is not None and version not in self.versions:
            raise CheckpointError(f"{self.path} holds no version {version!r}; it holds {self.versions} and the model")
        return LazyTensors({
            ".".join(map(str, path[len(prefix) :])): partial(self._read, key)
            for key, path in self._paths().items()
            if path[: len(prefix)] == prefix
        })  # fmt: skip

    def nbytes(self) -> Counter[str]:
        """Bytes of tensors by part: model, optimizer, versions, generators."""
        found: Counter[str] = Counter()
        for key, path in self._paths().items():
            stored = self._metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            found[str(path[0])] += prod(stored.size) * stored.properties.dtype.itemsize
        return found

    def _paths(self) -> dict[str, tuple[Any, ...]]:
        """Where each tensor was in the tree that was written."""
        stored, paths = self._metadata.state_dict_metadata, self._metadata.planner_data
        return {key: paths[key] for key, value in stored.items() if isinstance(value, TensorStorageMetadata)}

    def _read(self, key: str) -> Tensor:
        stored = self._metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        tensors = {key: torch.empty(stored.size, dtype=stored.properties.dtype)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(tensors, checkpoint_id=self.path / TENSORS, no_dist=True)
        return tensors[key]


def inspect_lines(path: Path) -> list[str]:
    """What lies at `path`: whole or not, step, versions, bytes, fingerprints.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    if path.is_file():
        return [f"{path}: safetensors", _content_line("tensors", _safetensors(path))]
    lines = []
    if not (path / MANIFEST).is_file():
        found = checkpoints_in(checkpoints_directory(path))
        lines = [f"{place}: {what_is_wrong(place) or 'whole'}" for place in found]
    checkpoint = StoredCheckpoint(checkpoint_at(path))
    loop, nbytes = checkpoint.state["loop"], checkpoint.nbytes()
    live = "the live weights are those" if loop["live_is_published"] else "the live weights are newer"
    return [
        *lines,
        f"{checkpoint.path}: after {checkpoint.state['step']} batches on {checkpoint.state['num_ranks']} rank(s)",
        f"published last: version {loop['version']}; {live}",
        "bytes: " + ", ".join(f"{part} {nbytes[part]:,}" for part in sorted(nbytes)),
        _content_line("model", checkpoint.tensors(None)),
        *(_content_line(f"version {version}", checkpoint.tensors(version)) for version in checkpoint.versions),
    ]


def diff_lines(a: str, b: str) -> list[str]:
    """Which tensors differ between places `a` and `b`, how many of their elements, and by how much.

    Raises:
        CheckpointError: there is no such checkpoint, file or version, or it is damaged.
    """
    return [f"a: {a}", f"b: {b}", *difference_of(_tensors_at(a), _tensors_at(b)).lines(num_shown=None)]


def _content_line(label: str, tensors: Mapping[str, Tensor]) -> str:
    # Each is read from the disk whenever it is asked for.
    digests, num_elements = [], 0
    for name in sorted(tensors):
        tensor = tensors[name]
        digests.append((name, digest_of(tensor)))
        num_elements += tensor.numel()
    return f"{label}: {len(tensors)} tensors, {num_elements:,} elements, fingerprint {Fingerprint(tuple(digests))}"


def _tensors_at(place: str) -> Mapping[str, Tensor]:
    # A directory may have an @ in its name.
    path, version = Path(place), None
    if not path.exists() and "@" in place:
        name, _, version = place.rpartition("@")
        path = Path(name)
    if path.is_file():
        if version is not None:
            raise CheckpointError(f"{path} is a file with one state; leave out @{version}")
        return _safetensors(path)
    return StoredCheckpoint(checkpoint_at(path)).tensors(version)


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest whole one of the run at `path`.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).is_file() or path in checkpoints_in(path.parent):
        return path
    newest, problems = newest_checkpoint(checkpoints_directory(path))
    if newest is not None:
        return newest
    why = f"none is whole: {'; '.join(problems)}" if problems else "give a run's directory, a checkpoint, or a file"
    raise CheckpointError(f"{path}: no checkpoint here; {why}")


def _safetensors(path: Path) -> Mapping[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return LazyTensors({name: partial(_read_one, path, name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: no whole safetensors file ({error})") from error


def _read_one(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
