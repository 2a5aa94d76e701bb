"""The examples that train must run as they stand, in seconds, in whatever directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "reward"), [("custom_reward", "custom_reward.py:reward"), ("jsonl_task", "share of positions")]
)
def test_it_trains_and_its_reward_varies(tmp_path, name, reward):
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert next(line for line in result.stdout.splitlines() if line.startswith("reward: ")).count(reward) == 1
    run = tmp_path / "outputs" / "examples" / name
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], summary["num_batches"]) == ("completed", 10)
    assert summary["num_optimizer_steps"] > 0, "no group had rewards that vary: there was nothing to learn from"
