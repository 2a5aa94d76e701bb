"""The example of the README must run as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "cache_in_own_loop.py"


def test_the_example_runs_and_shows_an_old_version_beside_the_live_weights():
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "versions [6, 7, 8, 9]" in result.stdout
    assert "after restore: live_version 7" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith("mean log-prob"))
    old, live = (float(word) for word in line.replace(",", " ").split() if word.startswith("-"))
    assert live > old + 0.05, "training must have moved the live weights away from the old version"
