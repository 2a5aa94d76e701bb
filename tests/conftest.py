"""What every test gets: one thread, and a check that it leaves the process as it found it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)


# pytest's own, and the cache directory that torch's optimizers name in passing.
NOT_OURS = ("PYTEST_", "TORCHINDUCTOR_")


THREAD_END_S = 2.0


def _environment():
    return {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    """Fail a test that leaks a thread, an environment variable or a process group."""
    threads = set(threading.enumerate())
    environment = _environment()
    initialized = dist.is_initialized()
    yield
    new = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in new:
        thread.join(THREAD_END_S)  # one that was told to end may not have got round to it
    leaked = [thread.name for thread in new if thread.is_alive()]
    assert not leaked, f"threads left running: {leaked}"
    after = _environment()
    assert after == environment, f"environment changed: {set(after.items()) ^ set(environment.items())}"
    assert dist.is_initialized() == initialized, "a process group was left initialised or destroyed"


@pytest.fixture
def single_rank():
    """A gloo process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
