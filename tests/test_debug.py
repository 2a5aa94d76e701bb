"""`trainer.debug=true`: one process, one thread, the same each time, and a debugger that can stop it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from builders import response
from safetensors.torch import load_file
from test_run import SMALL, Quiet

from fsdp_async.config import parse_config
from fsdp_async.errors import ConfigError, RewardError
from fsdp_async.rewards import RewardConfig, build_reward
from fsdp_async.run import run_training
from fsdp_async.tasks import TaskConfig, build_task

SEEN = []


def note_where(prompt_text, response_text, info):
    """A reward that notes who calls it and what runs beside it."""
    SEEN.append((os.getpid(), threading.current_thread() is threading.main_thread(), _children()))
    return float(response_text[:1] == info["answer"][:1])


def _children():
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return [child for task in tasks for child in (task / "children").read_text().split()]


def _config(directory, name, **sections):
    paths = {
        "run": {"output_dir": str(directory / name)},
        "warm_start": {"directory": str(directory / "warm_start")},
        "logging": {"tensorboard": False},
    }
    names = SMALL.keys() | sections.keys() | paths.keys()
    return parse_config({n: SMALL.get(n, {}) | paths.get(n, {}) | sections.get(n, {}) for n in names})


def _batches(directory):
    return [load_file(path) for path in sorted((directory / "batches").glob("*.safetensors"))]


def _equal(a, b):
    assert len(a) == len(b) > 0
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def debugged(tmp_path_factory):
    """A run with stale samples and a reward function, twice."""
    directory = tmp_path_factory.mktemp("debug")
    SEEN.clear()
    summaries, before = [], _children()  # such as Python's own resource tracker, which an earlier test may have started
    for name in ("first", "second"):
        config = _config(
            directory, name, trainer={"debug": True}, rewards={"kind": "python", "function": "test_debug:note_where"}
        )
        summaries.append(run_training(config, Quiet()))
    return directory, summaries, before


def test_everything_runs_in_this_process_and_thread_without_children(debugged):
    _, _, children_before = debugged
    seen = sys.modules["test_debug"].SEEN
    assert len(seen) >= 2 * 8 * 16
    assert set(map(str, seen)) == {str((os.getpid(), True, children_before))}


def test_two_runs_are_the_same_bit_for_bit(debugged):
    directory, _, _ = debugged
    assert _equal(_batches(directory / "first"), _batches(directory / "second"))


def test_samples_are_stale_as_in_an_asynchronous_run(debugged):
    _, (summary, _), _ = debugged
    assert summary["outcome"] == "completed"
    assert summary["staleness_max"] >= 1
    assert summary["samples_consumed"] == summary["samples_submitted"] == 8 * 16
    assert 0 <= summary["mismatch_kl_k3_mean"] < 1e-9


def test_the_synchronous_loop_is_that_of_a_run_with_processes(tmp_path):
    synchronous = {"max_staleness": 0, "num_batches": 3}
    run_training(_config(tmp_path, "debug", trainer={**synchronous, "debug": True}), Quiet())
    run_training(_config(tmp_path, "process", trainer=synchronous), Quiet())
    assert _equal(_batches(tmp_path / "debug"), _batches(tmp_path / "process"))


def test_algorithms_are_deterministic_only_while_it_lasts(debugged):
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_error_of_a_reward_goes_through_to_where_it_was_raised():
    task = build_task(TaskConfig(), seed=0)
    reward = build_reward(RewardConfig(kind="python", function="test_debug:raise_it"), task, inline=True)
    prompt = task.eval_prompts()[0]
    with pytest.raises(ZeroDivisionError):
        reward.score(prompt, _response(prompt))


def raise_it(prompt_text, response_text, info):
    return 1 / 0


def no_number(prompt_text, response_text, info):
    return "right"


def test_a_reward_without_a_number_is_named():
    task = build_task(TaskConfig(), seed=0)
    reward = build_reward(RewardConfig(kind="python", function="test_debug:no_number"), task, inline=True)
    prompt = task.eval_prompts()[0]
    with pytest.raises(RewardError, match=r"no_number returned 'right' for 'sort/\d+'\[0\]; return a number"):
        reward.score(prompt, _response(prompt))


def test_a_function_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"rewards\.function=test_debug:nothing: .*has no 'nothing'"):
        build_reward(
            RewardConfig(kind="python", function="test_debug:nothing"), build_task(TaskConfig(), seed=0), inline=True
        )


def _response(prompt):
    return response(prompt.prompt_id, 0, (3, 4))


def test_several_ranks_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"trainer\.debug=true on 2 ranks: .* start it without torchrun"):
        run_training(_config(tmp_path, "run", trainer={"debug": True}), Quiet())
    assert not (tmp_path / "run").exists()


COMMAND = [
    "train", "trainer.debug=true", "trainer.num_batches=2", "trainer.groups_per_batch=2", "trainer.group_size=2",
    "task.num_digits=2", "task.eval_items=4", "warm_start.num_steps=0", "queue.capacity_groups=2",
    "trainer.mini_batches=1", "rewards=python", "rewards.function=stop_here.py:reward", "run.output_dir=run",
    "logging.tensorboard=false",
]  # fmt: skip


def _run(directory, body, keys=""):
    (directory / "stop_here.py").write_text(f"def reward(prompt_text, response_text, info):\n{body}")
    return subprocess.run(
        [sys.executable, "-m", "fsdp_async", *COMMAND],
        cwd=directory, input=keys, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_a_breakpoint_in_a_reward_stops_there_and_the_run_goes_on(tmp_path):
    body = (
        "    if not hasattr(reward, 'stopped'):\n        reward.stopped = True\n        breakpoint()\n"
        "    return float(len(response_text) % 2)\n"
    )
    done = _run(tmp_path, body, keys="p 'answer is ' + info['answer']\nc\n")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'answer is " in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_batches"] == 2


def test_an_error_shows_the_whole_way_to_it(tmp_path):
    done = _run(tmp_path, "    return info['no such key']\n")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "stop_here.py" in done.stderr
    assert "KeyError: 'no such key'" in done.stderr
