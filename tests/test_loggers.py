from __future__ import annotations

import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fsdp_async.errors import InputError
from fsdp_async.loggers import Loggers, LoggingConfig, read_jsonl


def test_an_event_is_one_line_of_strict_json(tmp_path):
    with Loggers(LoggingConfig(tensorboard=False), tmp_path) as loggers:
        loggers.log("step", 1, {"loss": float("nan"), "nested": {"x": [1.5, float("inf")]}, "version": 3})
        loggers.log("end", 2, {})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {"event": "step", "step": 1, "loss": None, "nested": {"x": [1.5, None]}, "version": 3},
        {"event": "end", "step": 2},
    ]


def test_a_line_is_on_disk_as_soon_as_it_was_logged(tmp_path):
    with Loggers(LoggingConfig(tensorboard=False), tmp_path) as loggers:
        loggers.log("step", 1, {"x": 1})
        assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_a_torn_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step"}\n{"event": "st')
    with pytest.raises(InputError, match="line 2: torn"):
        read_jsonl(path)


@pytest.mark.parametrize("line", ["[1]", "12", '{"x": "\udcff"}'])
def test_a_line_that_is_no_object_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "step"}\n' + line.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match="line 2"):
        read_jsonl(path)


@pytest.mark.parametrize("name", ["event", "step"])
def test_a_value_cannot_take_a_name_of_the_record(tmp_path, name):
    with Loggers(LoggingConfig(tensorboard=False), tmp_path) as loggers:
        with pytest.raises(InputError, match=rf"event 'end': the names \['{name}'\] belong to the record"):
            loggers.log("end", 1, {name: 2})
        assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_scalars_that_came_before_the_directory_settled_are_not_lost(tmp_path):
    start, final = tmp_path / "new", tmp_path / "final"
    start.mkdir()
    with Loggers(LoggingConfig(), start) as loggers:
        loggers.log("evaluation", 0, {"accuracy": 0.25})
        start.rename(final)
        loggers.settle(final)
        by_version = {"0": 0.1, "7": 0.2}
        loggers.log(
            "step", 1, {"factors": {"x": 2.0}, "text": "no scalar", "flag": True, "list": [1.0], "gap": by_version}
        )
    events = EventAccumulator(str(final / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["evaluation/accuracy", "step/factors/x"]
    assert [(e.step, e.value) for e in events.Scalars("evaluation/accuracy")] == [(0, 0.25)]
    assert len(read_jsonl(final / "metrics.jsonl")) == 2
    assert not start.exists()


LIMIT = """
import resource, signal, sys
from pathlib import Path
from fsdp_async.errors import OutputError
from fsdp_async.loggers import Loggers, LoggingConfig
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = Path(sys.argv[1])
"""
FILL = """
with Loggers(LoggingConfig(tensorboard=False), directory) as loggers:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for step in range(20):
        try:
            loggers.log("step", step, {"text": "x" * 90})
        except OutputError as error:
            print(error)
"""
FILL_EVENTS = """
try:
    with Loggers(LoggingConfig(), directory) as loggers:
        loggers.settle(directory)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        for step in range(50):
            loggers.log("step", step, {f"k{i}": 1.0 for i in range(10)})
except OutputError as error:
    print(error)
    sys.exit(3)
"""


def _limited(script, directory):
    """The largest file size stands in for the end of a disk."""
    command = [sys.executable, "-c", LIMIT + script, str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_full_disk_is_a_named_error_and_leaves_whole_lines_however_often_it_is_tried(tmp_path):
    result = _limited(FILL, tmp_path)
    assert result.returncode == 0, result.stderr
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert 5 < len(records) < 10
    assert [r["step"] for r in records] == list(range(len(records)))
    errors = result.stdout.splitlines()
    assert len(errors) == 20 - len(records)
    assert all("metrics.jsonl" in error and "choose another place" in error for error in errors)


def test_a_full_disk_under_the_event_file_is_the_same_named_error(tmp_path):
    result = _limited(FILL_EVENTS, tmp_path)
    assert result.returncode == 3, result.stderr
    assert "tensorboard" in result.stdout
    assert "choose another place" in result.stdout
    # The lines went first and are whole.
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["step"] == 0
