from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from builders import tiny_model
from safetensors.torch import load_file, load_model

from fsdp_async.errors import OutputError
from fsdp_async.files import write_directory, write_json, write_model, write_model_at, write_tensors


def test_json_is_strict_and_leaves_no_temporary_file(tmp_path):
    write_json(tmp_path / "deep" / "x.json", {"a": 1.5})
    assert json.loads((tmp_path / "deep" / "x.json").read_text()) == {"a": 1.5}
    assert os.listdir(tmp_path / "deep") == ["x.json"]


def test_a_failed_write_keeps_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, {"a": float("nan")})
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="was not written"):
        write_json(tmp_path / "file" / "x.json", {})
    assert json.loads(path.read_text()) == {"a": 1}
    assert sorted(os.listdir(tmp_path)) == ["file", "x.json"]


FILL = """
import resource, signal, sys, torch
from pathlib import Path
from fsdp_async.files import write_json, write_tensors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
if sys.argv[2] == "tensors":
    write_tensors(Path(sys.argv[1]), {"a": torch.zeros(1000)})
else:
    write_json(Path(sys.argv[1]), list(range(1000)))
"""


@pytest.mark.parametrize("kind", ["tensors", "json"])
def test_a_full_disk_is_a_named_error_and_leaves_the_old_file(tmp_path, kind):
    """The largest file size stands in for the end of a disk."""
    path = tmp_path / "x"
    path.write_text("old")
    result = subprocess.run([sys.executable, "-c", FILL, str(path), kind], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "OutputError" in result.stderr
    assert "was not written" in result.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_tensors_come_back_bit_for_bit(tmp_path):
    tensors = {"a": torch.randn(3, 4).t(), "b": torch.tensor([True, False])}
    write_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_file(tmp_path / "t.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_model_with_tied_weights_comes_back_bit_for_bit(tmp_path):
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    write_model(tmp_path / "m.safetensors", model)
    load_model(other, tmp_path / "m.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_an_open_directory_is_followed_when_it_is_renamed(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    handle = os.open(old, os.O_RDONLY)
    try:
        old.rename(new)
        write_model_at(handle, "m.safetensors", tiny_model())
    finally:
        os.close(handle)
    assert os.listdir(tmp_path) == ["new"]
    assert os.listdir(new) == ["m.safetensors"]


def _filled(text):
    return lambda place: (place / "a.txt").write_text(text)


def test_a_directory_is_replaced_whole_and_others_may_read_it(tmp_path):
    path = tmp_path / "deep" / "d"
    before = os.umask(0o027)
    try:
        for text in ("one", "two"):
            write_directory(path, _filled(text))
            assert (path / "a.txt").read_text() == text
    finally:
        os.umask(before)
    assert (path / "a.txt").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path / "deep") == ["d"]


def test_a_directory_that_could_not_be_written_leaves_the_old_one_alone(tmp_path):
    path = tmp_path / "d"
    write_directory(path, _filled("old"))

    def full(place):
        _filled("half")(place)
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"d was not written: .*No space left") as raised:
        write_directory(path, full)
    assert raised.value.errno == 28
    assert (path / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["d"]


def test_a_directory_that_cannot_take_its_place_leaves_the_old_one_there(tmp_path, monkeypatch):
    path = tmp_path / "d"
    write_directory(path, _filled("old"))
    rename = os.rename

    def refuse_new(source, target):
        if str(source).endswith(".new"):
            raise OSError(16, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_new)
    with pytest.raises(OutputError, match=r"d was not written: .*busy.*untouched"):
        write_directory(path, _filled("new"))
    assert (path / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["d"]


@pytest.mark.parametrize("has_both", [False, True])
def test_what_a_killed_writer_left_is_put_back_or_taken_away(tmp_path, has_both):
    """Killed between its two renames, or after them."""
    for name in (".d.old", ".d.new", *(["d"] if has_both else [])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)

    def fails(place):
        raise OSError(5, "Input/output error")

    with pytest.raises(OutputError):
        write_directory(tmp_path / "d", fails)
    assert (tmp_path / "d" / "a.txt").read_text() == ("d" if has_both else ".d.old")
    write_directory(tmp_path / "d", _filled("new"))
    assert (tmp_path / "d" / "a.txt").read_text() == "new"
    assert os.listdir(tmp_path) == ["d"]
