from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_async import run_dir
from fsdp_async.errors import OutputError, RunDirectoryError
from fsdp_async.run_dir import RunDirectory, run_record


def _old_run(target):
    (target / "run.json").write_text("{}")
    (target / "summary.json").write_text("old")


def _names(path):
    return sorted(os.listdir(path))


def test_a_new_directory_is_made_with_its_parents_and_its_lock_goes_with_the_run(tmp_path):
    target = tmp_path / "a" / "run"
    with RunDirectory(target, overwrite=False) as directory:
        assert directory.path == target
        (directory.path / "x").write_text("1")
        directory.promote()
    assert _names(tmp_path / "a") == ["run"]
    assert (target / "x").read_text() == "1"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_a_living_run_is_refused_naming_its_process(tmp_path, overwrite):
    target = tmp_path / "run"
    with (
        RunDirectory(target, overwrite=False),
        pytest.raises(RunDirectoryError, match=rf"in use by a living run \(process {os.getpid()}\)"),
        RunDirectory(target, overwrite=overwrite),
    ):
        pass
    with RunDirectory(target, overwrite=False):
        pass


def test_results_of_another_run_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with (
        pytest.raises(RunDirectoryError, match=r"not empty.*run\.overwrite=true"),
        RunDirectory(tmp_path, overwrite=False),
    ):
        pass
    assert _names(tmp_path) == ["summary.json"]


def test_old_results_move_aside_only_when_the_new_run_has_taken_a_step(tmp_path):
    target = tmp_path / "run"
    target.mkdir()
    _old_run(target)
    with RunDirectory(target, overwrite=True) as directory:
        (directory.path / "summary.json").write_text("new")
        assert (target / "summary.json").read_text() == "old"
        directory.promote()
        directory.promote()
        assert directory.path == target
        assert (target / "summary.json").read_text() == "new"
    kept, moved = _names(tmp_path)
    assert kept == "run"
    assert moved.startswith("run.old-")
    assert (tmp_path / moved / "summary.json").read_text() == "old"


def test_a_run_that_fails_before_its_first_step_leaves_the_old_results_alone(tmp_path):
    target = tmp_path / "run"
    target.mkdir()
    _old_run(target)

    def fail():
        with RunDirectory(target, overwrite=True) as directory:
            (directory.path / "summary.json").write_text("new")
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert _names(tmp_path) == ["run"]
    assert (target / "summary.json").read_text() == "old"


def test_one_directory_has_one_lock_whatever_name_leads_to_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with (
        RunDirectory(tmp_path / "run", overwrite=False),
        pytest.raises(RunDirectoryError, match="in use by a living run"),
        RunDirectory(tmp_path / "link", overwrite=False),
    ):
        pass


def test_results_that_cannot_be_replaced_stay_where_they_are(tmp_path):
    target = tmp_path / "run"
    target.mkdir()
    _old_run(target)
    with RunDirectory(target, overwrite=True) as directory:
        directory.path.rmdir()
        with pytest.raises(OutputError, match="what was there before is untouched"):
            directory.promote()
    assert _names(tmp_path) == ["run"]
    assert (target / "summary.json").read_text() == "old"


@pytest.mark.parametrize("content", ["none", "empty", "results"])
def test_every_start_cleans_what_a_killed_run_left_beside_its_place(tmp_path, content):
    target = tmp_path / "run"
    (tmp_path / ".run.new").mkdir()
    (tmp_path / ".run.new" / "half").write_text("")
    if content != "none":
        target.mkdir()
    if content == "results":
        _old_run(target)
        with pytest.raises(RunDirectoryError, match="not empty"), RunDirectory(target, overwrite=False):
            pass
    else:
        with RunDirectory(target, overwrite=False):
            pass
    assert _names(tmp_path) == ["run"]


def test_only_the_directory_of_a_run_is_moved_aside(tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(RunDirectoryError, match=r"holds no run .no run\.json."), RunDirectory(tmp_path, overwrite=True):
        pass
    _old_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirectoryError, match="the current directory"), RunDirectory(tmp_path, overwrite=True):
        pass
    assert _names(tmp_path) == ["precious", "run.json", "summary.json"]


def test_a_directory_in_which_another_run_lives_is_not_moved_from_under_it(tmp_path):
    outer = tmp_path / "outer"
    with RunDirectory(outer / "deep" / "inner", overwrite=False) as living:
        _old_run(outer)
        expected = rf"holds a living run .process {os.getpid()}"
        with pytest.raises(RunDirectoryError, match=expected), RunDirectory(outer, overwrite=True):
            pass
        assert living.path.is_dir()
    with RunDirectory(outer, overwrite=True) as directory:
        directory.promote()
    assert _names(outer) == []


def test_the_root_of_a_file_system_is_refused():
    with pytest.raises(RunDirectoryError, match="root of a file system"), RunDirectory(Path("/"), overwrite=True):
        pass


HOLD = """
import sys
from pathlib import Path
from fsdp_async.run_dir import RunDirectory
with RunDirectory(Path(sys.argv[1]), overwrite=True) as directory:
    (directory.path / "half").write_text("")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_run_held_is_free_and_its_leavings_are_cleaned(tmp_path):
    target = tmp_path / "run"
    target.mkdir()
    _old_run(target)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"process {holder.pid}"), RunDirectory(target, overwrite=True):
            pass
        holder.send_signal(signal.SIGKILL)
    with RunDirectory(target, overwrite=True) as directory:
        assert _names(directory.path) == []
        directory.promote()
    assert _names(target) == []


def test_a_file_or_a_place_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file"), RunDirectory(tmp_path / "file", overwrite=True):
        pass
    with pytest.raises(OutputError, match=r"run\.output_dir="), RunDirectory(tmp_path / "file" / "run", overwrite=True):
        pass
    assert _names(tmp_path) == ["file"]


def test_a_record_names_code_libraries_and_seeds():
    record = run_record({"a": 1}, seeds={"run": 3}, plan_lines=["x: y"])
    assert record["config"] == {"a": 1}
    assert record["seeds"] == {"run": 3}
    assert record["plan"] == ["x: y"]
    assert record["libraries"]["torch"].startswith("2.")
    assert record["libraries"]["fsdp-async"]
    json.dumps(record)


def test_the_commit_is_that_of_the_checkout_that_knows_the_source_and_says_when_it_was_edited(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for name in ("known.py", "unknown.py"):
        (tmp_path / name).write_text("1")
    for command in (["init", "-q"], ["add", "known.py"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def recorded(name):
        monkeypatch.setattr(run_dir, "__file__", str(tmp_path / name))
        return run_record({}, seeds={}, plan_lines=[])["commit"]

    assert recorded("known.py") == head.strip()
    # A package installed below somebody's repository: its commit is not theirs.
    assert recorded("unknown.py") is None
    (tmp_path / "known.py").write_text("2")
    assert recorded("known.py") == f"{head.strip()}-dirty"


def test_a_library_that_is_not_installed_is_recorded_as_none(monkeypatch):
    monkeypatch.setattr(run_dir, "LIBRARIES", ("no-such-library", "torch"))
    libraries = run_record({}, seeds={}, plan_lines=[])["libraries"]
    assert libraries["no-such-library"] is None
    assert libraries["torch"]
