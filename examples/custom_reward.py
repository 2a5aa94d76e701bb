"""A reward of your own: a function in a file, named by the file and its name. Seconds on a laptop's CPU.

python examples/custom_reward.py [KEY=VALUE ...]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fsdp_async.cli import main


def reward(prompt_text: str, response_text: str, info: Mapping[str, Any]) -> float:
    """1 for the right answer, half for digits that at least ascend; "31>" wants "13".

    It runs in a process of its own. If it raises, hangs or returns NaN, the response gets rewards.failure_value.
    """
    if response_text == info["answer"]:
        return 1.0
    return 0.5 if response_text.isdigit() and list(response_text) == sorted(response_text) else 0.0


TRAIN = [
    "train", "rewards=python", f"rewards.function='{__file__}:reward'",
    "rollout=thread", "task.num_digits=2", "task.eval_items=32", "model.hidden_size=64", "model.num_layers=2",
    "warm_start.num_steps=60", "warm_start.directory=outputs/examples/warm_start", "logging.tensorboard=false",
    "trainer.num_batches=10", "trainer.groups_per_batch=8", "queue.capacity_groups=16",
    "run.output_dir=outputs/examples/custom_reward", "run.overwrite=true",
]  # fmt: skip

if __name__ == "__main__":
    sys.exit(main([*TRAIN, *sys.argv[1:]]))
