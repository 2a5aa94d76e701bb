"""Files that are whole or absent.

Owns the one way in which a file, or a directory, that matters is written: under a temporary name beside its place,
flushed to disk, renamed. A failure leaves the old one, if any, and no temporary one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from fsdp_async.errors import OutputError

REMEDY = "free space or choose another place; what was there before is untouched"


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON (no NaN), indented.

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file of `data`.

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    _replace(path, lambda temporary: temporary.write_bytes(data))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file of `tensors` (CPU; names that share memory are each written whole).

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    contiguous = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    _replace(path, lambda temporary: save_file(contiguous, temporary))


def write_model(path: Path, model: nn.Module) -> None:
    """Write the state dict of an unsharded `model` as safetensors, tied tensors once.

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    _replace(path, lambda temporary: save_model(model, str(temporary)))


def write_model_at(directory_fd: int, name: str, model: nn.Module) -> None:
    """Like `write_model`, into an open directory, which may have been renamed since it was opened.

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    write_model(Path(os.readlink(f"/proc/self/fd/{directory_fd}")) / name, model)


def write_directory(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a new directory, and put it in the place of `path` when it is whole.

    What a killed writer left beside the place is taken away, or put back if it is the only whole one. For one writer at
    a time.

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    new, old = (path.with_name(f".{path.name}.{word}") for word in ("new", "old"))
    try:
        if old.exists() and not path.exists():
            os.rename(old, path)
        for leaving in (new, old):
            shutil.rmtree(leaving, ignore_errors=True)
        new.mkdir(parents=True)
        write(new)
        for file in new.rglob("*"):
            if file.is_file():
                _settle(file)
        if path.exists():
            put_in_place(new, path, aside=old.name)
        else:
            os.rename(new, path)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        code = error.errno if isinstance(error, OSError) else errno.EIO
        raise OutputError(code, f"{path} was not written: {error}; {REMEDY}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(new: Path, target: Path, *, aside: str) -> None:
    """Give `new` the name of `target`, which gets the name `aside`: two renames; if the second fails, none."""
    old = target.with_name(aside)
    os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(old, target)
        raise


def _settle(file: Path) -> None:
    """Give a whole file its rights and bring it to the disk; safetensors makes files for their owner alone."""
    with file.open("rb") as handle:
        os.fchmod(handle.fileno(), 0o666 & ~_umask())
        os.fsync(handle.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        _settle(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        code = error.errno if isinstance(error, OSError) else errno.EIO
        raise OutputError(code, f"{path} was not written: {error}; {REMEDY}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
