"""The cache in a loop of Accelerate, as the example shows it; and that what the example says of Accelerate is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "cache_in_accelerate.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _run(*command):
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in launched and not k.startswith("ACCELERATE_")}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # what is checked is said of CPUs
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("launcher", "setting"),
    [([sys.executable], "type: NO, ranks 1"), (TORCHRUN, "type: MULTI_CPU, ranks 2")],
    ids=["one process", "two ranks under DDP"],
)
def test_old_versions_are_seen_and_training_is_what_it_is_without_visits(launcher, setting):
    output = _run(*launcher, str(EXAMPLE))
    assert setting in output
    assert "versions [4, 5, 6], live_version 6" in output
    assert float(re.search(r"2 steps ago: (\S+)", output)[1]) > 0.05, "two steps of training raise the log-prob"
    assert "bit for bit: True" in output


def test_on_cpus_accelerate_leaves_its_fsdp_plugin_out():
    """If this fails, Accelerate has learnt FSDP2 on CPUs: the example should use it, and its text is no longer true."""
    code = (
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin as Plugin\n"
        "accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=2))\n"
        "print(accelerator.distributed_type.value, accelerator.is_fsdp2)"
    )
    assert _run(sys.executable, "-c", code).split() == ["NO", "False"]
