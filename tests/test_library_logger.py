"""Logging libraries in processes of their own: what they keep, and that they can neither slow nor end a run."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from types import MappingProxyType

import pytest
from test_resume import small_config
from test_run import Quiet
from wandb.proto import wandb_internal_pb2

from fsdp_async.backends import BACKENDS, require_package
from fsdp_async.config import parse_config
from fsdp_async.errors import ConfigError
from fsdp_async.library_logger import MAX_PENDING_BYTES, LibraryLogger, run_identity
from fsdp_async.logger_worker import KILLED, MAX_WAITING
from fsdp_async.loggers import Loggers, LoggingConfig
from fsdp_async.run import run_training

DEADLINE_S = 60.0
NUM_IN_PIPE = 20
KEEPING = """
import json, pathlib
class Run:
    def __init__(self, options):
        self.path = pathlib.Path(options["directory"]) / "kept.jsonl"
        self.keep(["opened", options["name"], options["id"], options["mode"]])
    def keep(self, what):
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\\n")
    def log(self, step, numbers):
        self.keep([step, numbers])
    def finish(self, exit_code):
        self.keep(["finished", exit_code])
open_run = Run
"""
FAILING = "def open_run(options):\n    raise RuntimeError('no key for this service')\n"
STUMBLING = KEEPING.replace("self.keep([step, numbers])", "1 / (step - 2); self.keep([step, numbers])")
HANGING = "import threading\ndef open_run(options):\n    threading.Event().wait()\n"


def _logger(tmp_path, source, **options):
    backend = tmp_path / "backend.py"
    backend.write_text(source)
    return LibraryLogger("fake", backend, {"mode": "offline"}, **options)


def _kept(directory):
    return [json.loads(line) for line in (directory / "kept.jsonl").read_text().splitlines()]


def _is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _wait(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s"
        time.sleep(0.01)


def _warnings_until_closed(logger, steps=range(3, 9), values=MappingProxyType({"reward": 1.0})):
    """What is warned of while steps are logged and at the end."""
    with warnings.catch_warnings(record=True, action="always") as warned:
        for step in steps:
            logger.log("step", step, values)
        logger.close()
    return [str(warning.message) for warning in warned]


def test_numbers_of_events_arrive_in_order_also_those_from_before_the_directory_had_its_name(tmp_path):
    logger = _logger(tmp_path, KEEPING)
    logger.log("publication", 0, {"version": 0, "ledger": {"queued": 4}, "name": "words", "list": [1]})
    run = tmp_path / "run"
    run.mkdir()
    logger.settle(run)
    for step in range(1, 2001):
        logger.log("step", step, {"reward": step / 2, "factors": {"k3": float("nan") if step == 7 else 1.0}})
    logger.close()
    logger.close()
    identity = json.loads((run / "logged_as.json").read_text())["id"]
    opened, first, *steps, finished = _kept(run)
    assert opened == ["opened", "run", identity, "offline"]
    assert first == [0, {"publication/version": 0.0, "publication/ledger/queued": 4.0}]
    assert [step for step, _ in steps] == list(range(1, 2001))
    assert [numbers["step/reward"] for _, numbers in steps] == [step / 2 for step in range(1, 2001)]
    assert [step for step, numbers in steps if numbers["step/factors/k3"] != 1.0] == [7]
    assert finished == ["finished", 0]
    assert _is_gone(logger.pid)


def test_a_run_that_never_got_a_place_starts_no_process(tmp_path):
    logger = _logger(tmp_path, KEEPING)
    logger.log("step", 1, {"reward": 1.0})
    logger.close()
    assert logger.pid is None


def test_a_library_that_fails_is_warned_of_once_and_the_run_goes_on(tmp_path):
    logger = _logger(tmp_path, FAILING)
    logger.settle(tmp_path)
    _wait(lambda: _is_gone(logger.pid), "end of the library")
    with warnings.catch_warnings(record=True, action="always") as warned:
        for step in range(5):
            logger.log("step", step, {"reward": 1.0})
        logger.close()
    (warning,) = warned
    assert re.search(r"fake: it ended; the run goes on without it.*fake\.log", str(warning.message))
    assert "no key for this service" in (tmp_path / "fake.log").read_text()


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_library_that_ends_in_the_middle_is_warned_of_once_and_keeps_what_it_had(tmp_path, how):
    logger = _logger(tmp_path, STUMBLING if how == "raises" else KEEPING)
    logger.settle(tmp_path)
    logger.log("step", 1, {"reward": 1.0})
    _wait(lambda: (tmp_path / "kept.jsonl").exists() and len(_kept(tmp_path)) == 2, "first event")
    if how == "raises":
        logger.log("step", 2, {"reward": 1.0})
    else:
        os.kill(logger.pid, signal.SIGKILL)
    _wait(lambda: _is_gone(logger.pid), "end of the library")
    assert len(_warnings_until_closed(logger)) == 1
    assert _kept(tmp_path)[1:] == [[1, {"step/reward": 1.0}]]


def test_a_library_that_cannot_be_started_is_warned_of_once(tmp_path):
    logger = _logger(tmp_path, KEEPING)
    (tmp_path / "fake.log").mkdir()
    with pytest.warns(RuntimeWarning, match=r"it could not be started .*Is a directory"):
        logger.settle(tmp_path)
    logger.settle(tmp_path)
    assert _warnings_until_closed(logger) == []
    assert logger.pid is None


def test_a_run_that_failed_is_a_failed_run_to_a_library(tmp_path, monkeypatch):
    (tmp_path / "backend.py").write_text(KEEPING)
    monkeypatch.setattr("fsdp_async.loggers.require_package", lambda name: tmp_path / "backend.py")
    loggers = Loggers(LoggingConfig(tensorboard=False, trackio=True), tmp_path)
    loggers.settle(tmp_path)
    with pytest.raises(ZeroDivisionError), loggers:
        raise ZeroDivisionError
    assert _kept(tmp_path)[-1] == ["finished", 1]


def test_a_run_keeps_its_id_and_name_when_its_directory_is_renamed(tmp_path):
    first = tmp_path / "first"
    first.mkdir()
    identity = run_identity(first)
    assert identity["name"] == "first"
    assert run_identity(first.rename(tmp_path / "second")) == identity


def test_a_library_that_hangs_holds_nobody_up_and_is_ended(tmp_path):
    logger = _logger(tmp_path, HANGING, finish_s=0.5)
    logger.settle(tmp_path)
    text = {f"number_{index}": 1.0 for index in range(500)}
    size = len(json.dumps({"step": 1, "numbers": {f"step/{name}": 1.0 for name in text}})) + 1
    num = 2 * (MAX_PENDING_BYTES // size + MAX_WAITING)
    messages = _warnings_until_closed(logger, range(num), text)
    assert sum("events are dropped from now on" in message for message in messages) == 1
    assert any("did not finish within 0.5 s" in message for message in messages)
    dropped = next(int(message.split()[1]) for message in messages if "were dropped in all" in message)
    # What waits on this side, in the pipe and on the other side is bounded.
    assert 0 < num - dropped <= MAX_PENDING_BYTES // size + MAX_WAITING + NUM_IN_PIPE
    assert _is_gone(logger.pid)


@pytest.mark.parametrize(
    ("source", "num_events"),
    # Beyond what a process takes whose library takes nothing, so that its end of the pipe stays unread.
    [(KEEPING, 1), (HANGING, 1), (HANGING, 3 * MAX_WAITING)],
    ids=["keeping", "hanging", "hanging and full"],
)
def test_the_process_ends_when_the_run_is_killed(tmp_path, source, num_events):
    (tmp_path / "backend.py").write_text(source)
    script = textwrap.dedent(
        f"""
        import pathlib, threading
        from fsdp_async.library_logger import LibraryLogger
        place = pathlib.Path({str(tmp_path)!r})
        logger = LibraryLogger("fake", place / "backend.py", {{"mode": None}}, finish_s=0.5)
        logger.settle(place)
        for step in range(1, {num_events} + 1):
            logger.log("step", step, {{"reward": 1.0}})
        print(logger.pid, flush=True)
        threading.Event().wait()
        """
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(run.stdout.readline())
    assert not _is_gone(pid)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    _wait(lambda: _is_gone(pid), "end of the orphan")
    if source == KEEPING:
        assert _kept(tmp_path)[1:] == [[1, {"step/reward": 1.0}], ["finished", KILLED]]


@pytest.mark.parametrize("service", [{}, {"WANDB_API_KEY": "a" * 40}], ids=["without a key", "out of reach"])
def test_online_w_and_b_that_cannot_start_is_bounded_and_warned_of_once(tmp_path, monkeypatch, service):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    # No key of whoever runs the test, and a port of this machine at which nobody listens.
    nobody = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    for name, value in (nobody | service).items():
        monkeypatch.setenv(name, value)
    finish_s = DEADLINE_S if not service else 1.0
    logger = LibraryLogger(
        "wandb", require_package("wandb"), {"mode": "online", "project": "p", "settings": {}}, finish_s=finish_s
    )
    logger.settle(tmp_path)
    if not service:
        _wait(lambda: _is_gone(logger.pid), "end of the library")
    assert len(_warnings_until_closed(logger)) == 1
    assert _is_gone(logger.pid)


def test_what_trackio_cannot_write_is_heard_of(tmp_path):
    (tmp_path / "trackio" / "p.db").mkdir(parents=True)
    logger = LibraryLogger("trackio", require_package("trackio"), {"project": "p", "settings": {}})
    logger.settle(tmp_path)
    logger.log("step", 1, {"reward": 1.0})
    with pytest.warns(RuntimeWarning, match="or failed"):
        logger.close()
    assert "trackio failed to flush metric logs" in (tmp_path / "trackio.log").read_text()


def test_a_missing_library_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "wandb", BACKENDS["wandb"].__class__("x", "no_such_package", "wandb"))
    config = small_config(tmp_path, logging={"tensorboard": False, "wandb": "offline"})
    with pytest.raises(ConfigError, match=r"wandb needs the package no_such_package.*fsdp-async\[wandb\]"):
        run_training(config, Quiet())
    assert not (tmp_path / "run").exists()
    assert require_package("trackio").name == "trackio_backend.py"


@pytest.mark.parametrize(
    ("logging", "message"),
    [
        ({"wandb": "sometimes"}, "logging.wandb"),
        ({"project": "mine"}, r"logging.project=mine has no effect without logging.wandb or logging.trackio"),
        ({"project": "", "trackio": True}, "logging.project is empty"),
    ],
)
def test_settings_without_effect_are_refused(logging, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"logging": logging})


def test_debugging_starts_no_process_for_a_library():
    with pytest.raises(ConfigError, match=r"trainer.debug=true with logging.wandb or logging.trackio"):
        parse_config({"trainer": {"debug": True}, "logging": {"trackio": True}})


def _records(path):
    """Of a LevelDB log, which is what W&B writes: blocks of 32 KiB of records (checksum, length, kind; then data)."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # all of it, or its last part
            yield whole
            whole = b""


def _wandb_values(run, key):
    """(step, value) of a key in each of W&B's offline files, oldest first."""
    found = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in _records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            if key in items:
                found.append((items["step"], items[key]))
    return found


def test_a_real_run_is_kept_by_both_libraries_and_goes_on_as_the_same_run(tmp_path):
    logging = {"tensorboard": False, "wandb": "offline", "trackio": True, "project": "mine"}
    first = {"num_batches": 2, "eval_every": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run_training(small_config(tmp_path, trainer=first, logging=logging), Quiet())
        run = tmp_path / "run"
        identity = (run / "logged_as.json").read_text()
        again = {"output_dir": str(run), "record_batches": False, "resume": "auto"}
        longer = first | {"num_batches": 4}
        run_training(small_config(tmp_path, trainer=longer, logging=logging, run=again), Quiet())
    assert (run / "logged_as.json").read_text() == identity
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = [(event["step"], event["reward_mean"]) for event in events if event["event"] == "step"]
    assert [step for step, _ in expected] == [1, 2, 3, 4]
    assert dict(_wandb_values(run, "step/reward_mean")) == pytest.approx(dict(expected))
    name = f"run-{json.loads(identity)['id']}"
    database = sqlite3.connect(run / "trackio" / "mine.db")
    rows = database.execute("select step, metrics from metrics where run_name = ? order by id", (name,)).fetchall()
    database.close()
    values = [(step, json.loads(metrics).get("step/reward_mean")) for step, metrics in rows]
    kept = [(step, value) for step, value in values if value is not None]
    assert dict(kept) == pytest.approx(dict(expected))
    assert len(kept) == len(_wandb_values(run, "step/reward_mean")) == 4
