"""Training on several ranks is training on one, faster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import run_distributed
from test_resume import checkpoint_tensors, small_config
from test_run import Quiet

from fsdp_async.batching import shard_rows
from fsdp_async.run import run_training

DEADLINE_S = 120.0
SYNCHRONOUS = {"max_staleness": 0, "num_batches": 4, "eval_every": 2, "groups_per_batch": 6, "mini_batches": 2}


def _train(rank, world_size, directory, sections):
    """Rank 0's events, and its last checkpoint's tensors as numpy."""
    config = small_config(Path(directory), **sections)
    run_training(config, Quiet())
    run = Path(config.run.output_dir)
    if rank:
        return None
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    checkpoint = max((run / "checkpoints").iterdir())
    return records, {name: tensor.float().numpy() for name, tensor in checkpoint_tensors(checkpoint).items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same stream on one, two and four ranks; anchor `current`, so that every factor and collective is there."""
    sections = {
        "trainer": SYNCHRONOUS | {"anchor": "current", "micro_batch_tokens": 60},
        "queue": {"capacity_groups": 6},
        "optim": {"lr": 1e-3, "eps": 1e-3},
        "run": {"record_batches": True},
        "checkpoint": {"every": 4, "keep": 1},
    }
    found = {}
    for world_size in (1, 2, 4):
        directory = tmp_path_factory.mktemp("ranks") / str(world_size)
        sections["run"] = {"record_batches": True, "output_dir": str(directory / "run")}
        found[world_size] = run_distributed(_train, world_size, str(directory), sections)[0]
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_ranks_report_the_statistics_of_one(runs, world_size):
    alone, shared = (runs[n][0] for n in (1, world_size))
    assert [(r["event"], r["step"]) for r in alone] == [(r["event"], r["step"]) for r in shared]
    for one, many in zip(alone, shared, strict=True):
        assert one["ledger"] == many["ledger"]
        if one["event"] == "evaluation":
            assert one["accuracy"] == many["accuracy"]
        if one["event"] != "step":
            continue
        for key in ("reward_mean", "num_tokens", "staleness_total", "num_zero_variance_groups", "num_optimizer_steps"):
            assert one[key] == many[key], key
        assert one["kept_fraction"] == many["kept_fraction"]
        # A weight beside an edge may fall into the next bin by rounding.
        mine, theirs = one["weight_histogram"], many["weight_histogram"]
        assert sum(mine) == sum(theirs) > 0
        assert sum(abs(a - b) for a, b in zip(mine, theirs, strict=True)) <= 2
        assert one["grad_norm"] == pytest.approx(many["grad_norm"], rel=1e-4)
        for name, (total, count) in one["factors"].items():
            assert many["factors"][name][1] == count
            assert many["factors"][name][0] == pytest.approx(total, rel=1e-3, abs=1e-9)
        for group in ("correction", "update"):
            assert one[group].keys() == many[group].keys()
            for name, value in one[group].items():
                assert many[group][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert sum(r["num_optimizer_steps"] for r in alone if r["event"] == "step") >= 6


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_ranks_reach_the_weights_of_one(runs, world_size):
    alone, shared = (runs[n][1] for n in (1, world_size))
    weights = [name for name in alone if name.startswith("model.")]
    assert len(weights) > 10
    moved = max(abs(alone[n] - alone[n].mean()).max() for n in weights)
    assert moved > 0
    for name in weights:
        # eps=1e-3 keeps Adam from turning rounding into steps; what is left is float32 sums in another order.
        assert abs(alone[name] - shared[name]).max() < 2e-5, name


def test_ranks_hold_whole_groups_and_about_as_many_tokens():
    from builders import random_batch

    batch = random_batch(num_groups=12, group_size=3)
    shares = shard_rows(batch, 4)
    assert sorted(torch.cat(shares).tolist()) == list(range(36))
    owners = [{*batch.group_ids[rows].tolist()} for rows in shares]
    assert all(len(groups) == 3 for groups in owners)
    tokens = [int(batch.attention_mask[rows].sum()) for rows in shares]
    assert max(tokens) <= 1.25 * min(tokens)
    # Every mini-batch of consecutive groups is spread over all ranks.
    assert all(len(groups & set(range(start, start + 4))) == 1 for groups in owners for start in (0, 4, 8))
    assert [len(rows) for rows in shard_rows(random_batch(num_groups=1, group_size=2), 2)] == [2, 0]


def _torchrun(tmp_path, *overrides):
    quick = [
        "experiment=demo", "trainer.groups_per_batch=4", "trainer.group_size=2", "queue.capacity_groups=6",
        "task.num_digits=2", "task.eval_items=8", "warm_start.num_steps=2", "optim.warmup_steps=1",
        "model.hidden_size=32", "model.num_layers=1", "logging.tensorboard=false", "optim.schedule=constant",
        "checkpoint.every=2", f"run.output_dir={tmp_path / 'run'}", f"warm_start.directory={tmp_path / 'warm'}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fsdp_async.cli", "train"]
    return subprocess.Popen(
        [*command, *quick, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _family(process):
    """pid -> rank (None for an engine) of everything below the launcher."""
    found, parents = {}, {process.pid}
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    for _ in range(4):
        for entry in entries:
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                environment = dict(
                    item.split("=", 1) for item in (entry / "environ").read_text().split("\0") if "=" in item
                )
            except OSError:
                continue
            if parent in parents and int(entry.name) not in found:
                found[int(entry.name)] = int(environment["RANK"]) if parent == process.pid else None
        parents |= set(found)
    return found


def _steps(tmp_path, event="step"):
    path = tmp_path / "run" / "metrics.jsonl"
    return sum(json.loads(line)["event"] == event for line in path.read_text().splitlines()) if path.exists() else 0


def _wait_for(condition, process, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, f"ended before {what}:\n{process.stdout.read()}"
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.05)


def _gone(pids):
    deadline = time.monotonic() + DEADLINE_S
    while left := [pid for pid in pids if _is_running(pid)]:
        assert time.monotonic() < deadline, f"{left} outlived the run"
        time.sleep(0.05)


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("victim", ["rank 1", "launcher"])
def test_a_rank_or_the_launcher_that_is_killed_ends_all_and_leaves_a_checkpoint_to_go_on_from(tmp_path, victim):
    process = _torchrun(tmp_path, "trainer.num_batches=100000")
    _wait_for(lambda: _steps(tmp_path, "checkpoint") >= 2, process, "checkpoints")
    family = _family(process)
    assert sorted(rank for rank in family.values() if rank is not None) == [0, 1]
    os.kill(process.pid if victim == "launcher" else next(p for p, r in family.items() if r == 1), signal.SIGKILL)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    _gone(family)
    if victim == "launcher":
        return
    # Which of the two depends on where rank 0 was: in a collective of training, or in an agreement of the cache.
    assert re.search(r"rank 0 (lost another rank|asked for .* ranks \[1\] did not join)", output), output
    done = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    again = _torchrun(tmp_path, f"trainer.num_batches={done + 3}", "run.resume=auto")
    output, _ = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["num_batches"]) == ("completed", done + 3)
    assert summary["samples_dropped"] == 0
