"""Memory that processes of one machine share and that outlives none of them.

Owns blocks without a name: an anonymous file (`memfd_create`), which others open through its creator's entry in /proc.
Nothing lies in /dev/shm, so that its size does not matter (containers often have 64 MB), and whoever is killed, even
with every helper process, leaves nothing behind. Where the system has no memfd, named segments of the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
from torch import Tensor

from fsdp_async.errors import OutputError

HAS_MEMFD = hasattr(os, "memfd_create")


class SharedBlock:
    """A block of `num_bytes`; its creator frees it.

    Raises:
        OutputError: the machine does not give the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.capacity = num_bytes
        try:
            self._memory = _Anonymous(num_bytes) if HAS_MEMFD else _Named(num_bytes)
        except (OSError, OverflowError) as error:
            code = error.errno if isinstance(error, OSError) else None
            raise OutputError(
                code, f"{num_bytes} bytes of shared memory could not be had ({error}); lower rollout.bucket_bytes"
            ) from error

    @property
    def handle(self) -> str:
        """What another process passes to `open_block`."""
        return self._memory.handle

    def memory(self) -> Tensor:
        """The block as a uint8 tensor; the view must be gone before `free`."""
        return torch.frombuffer(self._memory.buffer, dtype=torch.uint8)

    def free(self) -> None:
        """Give it back."""
        self._memory.free()


@contextlib.contextmanager
def open_block(handle: str) -> Iterator[Tensor]:
    """Another process's block as a uint8 tensor, which must not outlive the body."""
    if not HAS_MEMFD:
        segment = SharedMemory(handle)
        try:
            yield torch.frombuffer(segment.buf, dtype=torch.uint8)
        finally:
            segment.close()
        return
    descriptor = os.open(handle, os.O_RDWR)
    try:
        buffer = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    # Unmapped when the last view is gone: a view that is left, as in a traceback, must not be an error of its own.
    yield torch.frombuffer(buffer, dtype=torch.uint8)


class _Anonymous:
    def __init__(self, num_bytes: int) -> None:
        # Such a file has no limit of its own, and whoever fills memory with it is killed.
        if num_bytes > (free := _available_bytes()):
            raise OSError(errno.ENOMEM, f"{free} are available")
        self._descriptor = os.memfd_create("fsdp_async", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, num_bytes)
            self.buffer = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.handle = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def free(self) -> None:
        os.close(self._descriptor)
        self.buffer.close()


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError(errno.ENOSYS, "/proc/meminfo does not say how much memory is available")


class _Named:
    def __init__(self, num_bytes: int) -> None:
        self._segment = SharedMemory(create=True, size=num_bytes)
        self.buffer = self._segment.buf
        self.handle = self._segment.name

    def free(self) -> None:
        self._segment.close()
        self._segment.unlink()
