"""A replayed batch must give what the run itself computed."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_run import SMALL, Quiet

from fsdp_async.assembly import checked_task
from fsdp_async.config import parse_config
from fsdp_async.errors import InputError
from fsdp_async.inspection import StoredCheckpoint
from fsdp_async.metrics import kl_k3
from fsdp_async.run import run_training

EXAMPLE = Path(__file__).parents[1] / "examples" / "replay_batch.py"
FP32_TOLERANCE = 2e-5  # the same function on differently composed micro-batches


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three batches with stale samples, whose anchor is the live policy, and a checkpoint after each."""
    directory = tmp_path_factory.mktemp("replay")
    sections = SMALL | {
        "run": {"record_batches": True, "output_dir": str(directory / "run")},
        "warm_start": SMALL["warm_start"] | {"directory": str(directory / "warm_start")},
        "trainer": SMALL["trainer"] | {"anchor": "current", "num_batches": 4, "debug": True},
        "checkpoint": {"every": 1, "keep": 4},
        "logging": {"tensorboard": False},
    }
    run_training(parse_config(sections), Quiet())
    return directory / "run"


def _replay(example, run, step, checkpoint, version=None, anchor=None):
    recorded = load_file(run / "batches" / f"step_{step:06d}.safetensors")
    config = parse_config(json.loads((run / "run.json").read_text())["config"])
    stored = StoredCheckpoint(run / "checkpoints" / f"step_{checkpoint:06d}")
    return recorded, example["replay"](recorded, config, checked_task(config), stored, version, anchor)


def test_the_checkpoint_before_the_step_gives_the_policies_of_the_step(example, run):
    recorded, replayed = _replay(example, run, 3, 2)
    mask = recorded["response_mask"]
    assert len(replayed.batch.sampled_versions) > 1
    assert torch.equal(replayed.mask, mask), "all its versions are retained"
    for found, expected in (
        (replayed.behaviour, "behaviour_log_prob"),
        (replayed.policy, "old_log_prob"),  # the live weights when the batch was taken
        (replayed.anchor, "old_log_prob"),
        (replayed.mu, "rollout_log_prob"),
    ):
        torch.testing.assert_close(found[mask], recorded[expected][mask], rtol=0, atol=FP32_TOLERANCE)
    assert (replayed.behaviour - replayed.policy)[mask].abs().max() > 100 * FP32_TOLERANCE, "the weights have aged"


def test_a_state_of_the_checkpoint_takes_the_place_of_the_anchor_or_the_policy(example, run):
    _, live = _replay(example, run, 3, 2, anchor="live")
    assert torch.equal(live.anchor, live.policy)
    oldest = str(live.batch.sampled_versions[0])
    _, old = _replay(example, run, 3, 2, version=oldest)
    where = old.batch.versions == int(oldest)
    torch.testing.assert_close(old.policy[where], old.behaviour[where], rtol=0, atol=FP32_TOLERANCE)


def test_tokens_of_versions_that_are_not_retained_are_left_out(example, run):
    _, replayed = _replay(example, run, 3, 3)
    versions = StoredCheckpoint(run / "checkpoints" / "step_000003").versions
    held = [version for version in replayed.batch.sampled_versions if str(version) in versions]
    assert 0 < int(replayed.mask.sum()) < int(replayed.batch.response_mask.sum())
    assert sorted(set(replayed.batch.versions[replayed.mask].tolist())) == held
    with pytest.raises(InputError, match=r"was sampled by versions \[0\], .* take the checkpoint before the step"):
        _replay(example, run, 1, 4)


def test_the_printed_numbers_are_those_of_the_factors(example, run):
    recorded, replayed = _replay(example, run, 3, 2, anchor="0")
    rows = {line.split()[0]: line.split() for line in example["report"](replayed) if "pi" in line}
    mask = recorded["response_mask"]
    for name, numerator, denominator in (
        ("lag", replayed.anchor, replayed.behaviour),
        ("update", replayed.policy, replayed.anchor),
        ("all", replayed.policy, replayed.mu),
    ):
        ratio = (numerator - denominator)[mask].double()
        expected = [kl_k3(ratio).mean(), ratio.exp().mean(), ratio.exp().min(), ratio.exp().max()]
        shown = [float(word) for word in rows[name][4:8]]
        assert shown == pytest.approx([float(value) for value in expected], rel=0.01, abs=1e-4)


def test_the_worst_token_comes_first_and_is_named(example, run):
    recorded, replayed = _replay(example, run, 3, 2)
    wrong = replayed.mu.clone()
    row, position = recorded["response_mask"].nonzero()[7].tolist()
    wrong[row, position] -= 3.0
    task = checked_task(parse_config(json.loads((run / "run.json").read_text())["config"]))
    lines = list(example["worst_tokens"](example["Replay"](**{**vars(replayed), "mu": wrong}), task))
    assert lines[1].split()[:2] == [str(row), str(position)]


def test_what_cannot_be_replayed_is_said_in_one_sentence(run):
    places = [str(run / "batches" / "step_000003.safetensors"), str(run / "checkpoints" / "step_000002")]
    command = [sys.executable, str(EXAMPLE), *places, "--version", "9"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "holds no version '9'; it holds" in result.stderr
    assert "Traceback" not in result.stderr
