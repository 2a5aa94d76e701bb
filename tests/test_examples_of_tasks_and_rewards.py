"""The examples that train must run as they stand, in seconds, in whatever directory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

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


def test_the_example_of_a_model_exports_what_it_trained_and_asks_it(tmp_path):
    command = [sys.executable, str(EXAMPLES / "own_model.py"), "trainer.num_batches=4"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    place = tmp_path / "outputs" / "examples"
    summary = json.loads((place / "own_model" / "summary.json").read_text())
    assert (summary["outcome"], summary["num_batches"]) == ("completed", 4)
    assert summary["num_optimizer_steps"] > 0, "no group had rewards that vary: there was nothing to learn from"
    before, after = (load_file(place / name / "model.safetensors") for name in ("tiny_qwen3", "own_model/policy"))
    assert before.keys() == after.keys()
    assert not any(before[name].equal(after[name]) for name in before if "proj" in name)
    answers = re.findall(r"^Is \d more or less than \d\? (.*) \(right: (?:more|less)\)$", result.stdout, re.MULTILINE)
    assert len(answers) == 8
    assert set(answers) & {"more", "less"}, "it has learned at least which words to say"
