"""Runs whose rewards fail, or come from a library."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import test_run
from reasoning_gym import create_dataset
from test_run import SMALL, Quiet

from fsdp_async.config import parse_config
from fsdp_async.errors import ConfigError, RewardError
from fsdp_async.run import run_training
from fsdp_async.tasks import build_task

FAULTY = """
import threading
seen = []
def score(prompt_text, response_text, info):
    seen.append(info)
    if len(seen) == 2:
        raise ValueError("no")
    if len(seen) == 3:
        return float("nan")
    if len(seen) == 4:
        threading.Event().wait()
    return float(response_text[:1] == info["answer"][:1])
"""


def _faulty(directory, **options):
    (directory / "faulty.py").write_text(FAULTY)
    rewards = {"kind": "python", "function": f"{directory / 'faulty.py'}:score", "timeout_s": 1.0, **options}
    rollout = {"engine": "thread", "record_weights": False}
    trainer = {"num_batches": 1}
    return parse_config({"rewards": rewards} | {
        name: SMALL.get(name, {}) | section for name, section in {
            "run": {"output_dir": str(directory / "run")}, "model": {}, "task": {}, "queue": {}, "optim": {},
            "warm_start": {"directory": str(directory / "warm_start")}, "rollout": rollout, "trainer": trainer,
        }.items()
    })  # fmt: skip


def test_rewards_that_raise_hang_or_return_nan_do_not_end_the_run_before_they_are_too_many(tmp_path):
    view = Quiet()
    summary = run_training(_faulty(tmp_path, max_failures=1000), view)
    assert summary["outcome"] == "completed"
    reward = view.trainer.parts.feed.reward
    # 16 responses; the function fails on its 2nd, 3rd and 4th, is then started anew, and fails so again.
    assert reward.failures == {"raised": 4, "not_a_number": 4, "timed_out": 4}
    assert "ValueError: no" in reward.first_failures["raised"]
    assert reward.pid is None, "closed with the run"


def test_too_many_failures_end_the_run_with_what_failed_and_leave_a_summary(tmp_path):
    with pytest.raises(RewardError, match=r"faulty.py:score failed on 2 responses \(1 raised, 1 not_a_number\)"):
        run_training(_faulty(tmp_path, max_failures=1), Quiet())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "failed"


def test_a_function_that_is_missing_is_heard_of_before_anything_is_written(tmp_path):
    config = _faulty(tmp_path)
    (tmp_path / "faulty.py").unlink()
    with pytest.raises(ConfigError, match=r"no file .*faulty\.py"):
        run_training(config, Quiet())
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_a_dataset_of_reasoning_gym_is_scored_by_it(tmp_path):
    config = test_run._config(
        tmp_path,
        run={"record_batches": True},
        task={"kind": "reasoning_gym", "name": "basic_arithmetic", "num_digits": 4, "eval_items": 16,
              "max_prompt_tokens": 32, "dataset": {"size": 100, "min_terms": 2, "max_terms": 2, "max_digits": 1,
              "allow_parentheses": False}},
        rewards={"kind": "reasoning_gym"},
        rollout={"engine": "thread", "record_weights": False},
        trainer={"num_batches": 2},
    )  # fmt: skip
    assert run_training(config, Quiet())["outcome"] == "completed"
    task = build_task(config.task, seed=0)
    prompts = {prompt.token_ids: prompt for prompt in islice(task.prompts(), 100)}
    (first, *_), dataset = (
        test_run._batches(tmp_path / "run"),
        create_dataset("basic_arithmetic", **config.task.dataset, seed=0),
    )
    for row, reward in enumerate(first["rewards"].tolist()):
        asked = first["input_ids"][row][first["attention_mask"][row].bool()].tolist()
        length = int(first["response_mask"][row].sum())
        entry = task.scoring_info(prompts[tuple(asked[:-length])].prompt_id)["entry"]
        expected = dataset.score_answer(answer=task.decode(tuple(asked[-length:])), entry=entry)
        assert reward == pytest.approx(expected, abs=1e-7), "rewards are kept as float32"
