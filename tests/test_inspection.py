"""What `fsdp-async inspect` and `diff` say of checkpoints and files, against tensors read by other means."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from safetensors.torch import save_file
from test_resume import checkpoint_tensors, small_config
from test_run import Quiet

from fsdp_async.cli import main
from fsdp_async.contents import fingerprint_of
from fsdp_async.errors import CheckpointError
from fsdp_async.inspection import StoredCheckpoint, diff_lines, inspect_lines
from fsdp_async.run import run_training

NUM_BATCHES = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inspection") / "small"
    config = small_config(directory, trainer={"num_batches": NUM_BATCHES, "eval_every": NUM_BATCHES})
    run_training(config, Quiet())
    return directory / "run"


@pytest.fixture
def copied(run, tmp_path):
    """A run of one's own to damage."""
    return shutil.copytree(run, tmp_path / "run")


def _checkpoint(run, step=NUM_BATCHES):
    return run / "checkpoints" / f"step_{step:06d}"


def _part(checkpoint, prefix):
    """Tensors below `prefix`, read whole by DCP."""
    tensors = checkpoint_tensors(checkpoint)
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def test_a_checkpoint_gives_each_tensor_of_the_model_and_of_each_version(run):
    checkpoint = StoredCheckpoint(_checkpoint(run))
    assert checkpoint.versions
    for version, prefix in [(None, "model."), *((name, f"versions.{name}.") for name in checkpoint.versions)]:
        expected, found = _part(checkpoint.path, prefix), checkpoint.tensors(version)
        assert expected
        assert list(found) == sorted(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bytes_are_those_of_the_stored_tensors_by_part(run):
    checkpoint = StoredCheckpoint(_checkpoint(run))
    nbytes = checkpoint.nbytes()
    for part in ("model", "versions", "optimizer"):
        assert nbytes[part] == sum(tensor.nbytes for tensor in _part(checkpoint.path, f"{part}.").values()) > 0


def test_inspect_says_what_a_run_holds_with_fingerprints_of_each_state(run):
    lines = inspect_lines(run)
    places = sorted((run / "checkpoints").iterdir())
    assert [f"{place}: whole" for place in places] == lines[: len(places)]
    assert lines[len(places)] == f"{_checkpoint(run)}: after {NUM_BATCHES} batches on 1 rank(s)"
    model = _part(_checkpoint(run), "model.")
    num_elements = sum(tensor.numel() for tensor in model.values())
    assert f"model: {len(model)} tensors, {num_elements:,} elements, fingerprint {fingerprint_of(model)}" in lines
    for version in StoredCheckpoint(_checkpoint(run)).versions:
        state = _part(_checkpoint(run), f"versions.{version}.")
        assert any(line.startswith(f"version {version}: ") and str(fingerprint_of(state)) in line for line in lines)


def test_diff_counts_elements_that_differ_between_two_checkpoints(run):
    before, after = _part(_checkpoint(run, 2), "model."), _part(_checkpoint(run), "model.")
    lines = diff_lines(str(_checkpoint(run, 2)), str(run))
    for name, tensor in before.items():
        num_different = int((tensor != after[name]).sum())
        assert num_different > 0
        shown = next(line for line in lines if line.split()[0] == name)
        assert f"{num_different:,} of {tensor.numel():,} elements" in shown


def test_the_version_published_last_is_the_live_model_of_the_same_checkpoint(run):
    newest = StoredCheckpoint(_checkpoint(run)).state["loop"]["version"]
    lines = diff_lines(str(run), f"{run}@{newest}")
    assert lines[2] == "no tensor differs"
    # A version holds tied weights once, and buffers that a model does not store.
    assert [line.partition(":")[0] for line in lines[3:]] == ["1 only in a", "2 only in b"]


def test_a_safetensors_file_is_inspected_and_compared_with_a_version(run, tmp_path):
    model = _part(_checkpoint(run), "model.")
    changed = {name: tensor.clone() for name, tensor in model.items()}
    name = min(changed)
    changed[name].view(-1)[:3] += 1.0
    file = tmp_path / "policy@home.safetensors"
    save_file(changed, file)
    assert str(fingerprint_of(changed)) in inspect_lines(file)[1]
    lines = diff_lines(str(run), str(file))
    assert lines[2] == f"1 of {len(model)} tensors differ"
    assert re.search(rf"{re.escape(name)} +3 of {model[name].numel():,} elements, by at most 1\b", lines[3])


def test_a_torn_checkpoint_is_named_and_the_one_before_it_is_shown(copied):
    torn = next(_checkpoint(copied).rglob("*.distcp"))
    torn.write_bytes(torn.read_bytes()[:-7])
    lines = inspect_lines(copied)
    assert any(line.startswith(f"{_checkpoint(copied)}: ") and not line.endswith("whole") for line in lines)
    assert f"{_checkpoint(copied, 2)}: after 2 batches on 1 rank(s)" in lines
    with pytest.raises(CheckpointError, match=r"step_000004: .*take another checkpoint"):
        inspect_lines(_checkpoint(copied))


def test_places_that_hold_nothing_are_refused_by_name(run, tmp_path):
    file = tmp_path / "one.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(file.read_bytes()[:-1])
    for place, message in [
        (tmp_path, "no checkpoint here; give a run's directory"),
        (tmp_path / "nowhere", "no checkpoint here"),
        (f"{run}@977", r"holds no version '977'; it holds \['\d"),
        (f"{file}@1", "is a file with one state; leave out @1"),
        (torn, "no whole safetensors file"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            diff_lines(str(place), str(place))


def test_the_command_line_prints_them_and_refuses_in_one_sentence(run, tmp_path, capsys):
    assert main(["inspect", str(run)]) == 0
    assert f"after {NUM_BATCHES} batches" in " ".join(capsys.readouterr().out.split())
    assert main(["diff", str(run), str(run)]) == 0
    assert "no tensor differs" in capsys.readouterr().out
    for arguments in (["inspect", str(tmp_path)], ["diff", str(run), f"{run}@977"]):
        assert main(arguments) == 1
        output = capsys.readouterr()
        assert output.out == ""
        assert "Traceback" not in output.err
        assert len(output.err.strip().split("; ")) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["diff", str(run)])
