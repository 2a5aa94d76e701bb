"""Prompts of your own: write a JSONL file, train on it for a few steps. Seconds on a laptop's CPU.

python examples/jsonl_task.py [KEY=VALUE ...]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from fsdp_async.cli import main

DIRECTORY = Path("outputs/examples")


def write_prompts(path: Path) -> None:
    """Sums of two digits, shuffled: the last `task.eval_items` lines are for evaluation."""
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(10) for b in range(10)]
    random.Random(0).shuffle(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


TRAIN = [
    "train", "task=jsonl", f"task.path={DIRECTORY / 'sums.jsonl'}", "task.eval_items=16", "rewards=graded",
    "rollout=thread", "model.hidden_size=64", "model.num_layers=2",
    "warm_start.num_steps=60", f"warm_start.directory={DIRECTORY / 'warm_start'}", "logging.tensorboard=false",
    "trainer.num_batches=10", "trainer.groups_per_batch=8", "queue.capacity_groups=16",
    f"run.output_dir={DIRECTORY / 'jsonl_task'}", "run.overwrite=true",
]  # fmt: skip

if __name__ == "__main__":
    write_prompts(DIRECTORY / "sums.jsonl")
    sys.exit(main([*TRAIN, *sys.argv[1:]]))
