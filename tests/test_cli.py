"""The command line as people and schedulers use it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared_memory import blocks_of, named_segments

from fsdp_async.cli import EPILOG, config_directory, main
from fsdp_async.recorder import Recorder
from fsdp_async.rollout_hf import ThreadEngine
from fsdp_async.terminal import Terminal

QUICK = [
    "experiment=demo", "trainer.num_batches=3", "trainer.groups_per_batch=4", "trainer.group_size=2",
    "queue.capacity_groups=6", "task.num_digits=2", "task.eval_items=8", "warm_start.num_steps=2",
    "optim.warmup_steps=1", "model.hidden_size=32", "model.num_layers=1", "logging.tensorboard=false",
]  # fmt: skip
ENDLESS = ["trainer.num_batches=100000", "optim.schedule=constant"]
DEADLINE_S = 90.0


def _places(tmp_path):
    return [f"run.output_dir={tmp_path / 'run'}", f"warm_start.directory={tmp_path / 'warm'}"]


def _children(pid):
    """Living processes whose parent is `pid`, and theirs."""
    found, parents = [], {pid}
    stats = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stats[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    while parents:
        parents = {child for child, parent in stats.items() if parent in parents} - set(found)
        found += parents
    return found


def _start(tmp_path, *overrides):
    command = [sys.executable, "-m", "fsdp_async.cli", "train", *QUICK, *_places(tmp_path), *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _wait_for(condition, process, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, f"ended before {what}:\n{process.stdout.read()}"
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s"
        time.sleep(0.01)


def _events(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line, parse_constant=pytest.fail)["event"] for line in lines]


def _end(process):
    """Output and exit code."""
    output, _ = process.communicate(timeout=DEADLINE_S)
    return output, process.returncode


def _holdings(process):
    """What must go with a run: its children and the shared memory that it has mapped."""
    children = _children(process.pid)
    assert children
    return children


def _check_gone(holdings):
    """The engine is gone when its run is; the tracker of shared memory notices the end of the run."""
    deadline = time.monotonic() + DEADLINE_S
    while remaining := [pid for pid in holdings if blocks_of(pid) or os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"{remaining} outlived the run"
        time.sleep(0.02)


def _check_interrupted(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert summary["samples_submitted"] == summary["samples_produced"] + summary["samples_in_flight"]
    assert summary["samples_produced"] == (
        summary["samples_consumed"] + summary["samples_dropped"] + summary["samples_queued"]
    )
    assert _events(run)[-1] == "end"
    hidden = [path for path in run.rglob(".*") if path.name != ".metadata"]
    assert hidden == [], "no temporary file is left"
    assert sorted(path.name for path in run.parent.iterdir()) == ["run", "warm"]


def test_a_run_ends_with_its_summary_and_exit_code_zero(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    assert main(["train", *QUICK, *_places(tmp_path), "rollout=thread", "loss.clip_high=inf"]) == 0
    output = capsys.readouterr().out
    assert "accuracy_last" in output
    assert f"results: {tmp_path / 'run'}" in output
    assert "\x1b" not in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["num_batches"]) == ("completed", 3)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["loss"]["clip_high"] == "inf"
    assert signal.getsignal(signal.SIGINT) is before, "handlers of the caller come back"

    assert main(["train", *QUICK, *_places(tmp_path), "rollout=thread"]) == 1
    assert "run.overwrite=true" in capsys.readouterr().err
    assert main(["train", *QUICK, *_places(tmp_path), "rollout=thread", "run.overwrite=true"]) == 0
    assert len(list(tmp_path.glob("run.old-*"))) == 1


def test_a_plan_starts_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *QUICK, "correction=decoupled_token_is"]) == 0
    output = capsys.readouterr().out
    assert "old_log_prob (anchor current)" in output
    assert "combined pi_p/mu weight: token level, truncate to [-, 2]" in output
    assert "\x1b" not in output
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("correction", sorted(path.stem for path in (config_directory() / "correction").iterdir()))
@pytest.mark.parametrize("engine", ["process", "thread"])
def test_every_choice_of_a_group_goes_with_the_experiment(correction, engine, capsys):
    assert main(["plan", "experiment=demo", f"correction={correction}", f"rollout={engine}"]) == 0
    assert "batches: 200 of" in capsys.readouterr().out


@pytest.mark.parametrize("example", re.findall(r"^  fsdp-async (?:train|plan) (.*)", EPILOG, re.MULTILINE))
def test_every_example_of_the_help_is_accepted(example, capsys):
    assert main(["plan", *shlex.split(example)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_for_terminals_only(is_terminal, tmp_path, capsys, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    assert main(["train", *QUICK, *_places(tmp_path), "rollout=thread"]) == 0
    output = "".join(capsys.readouterr())
    for control in ("\x1b", "\r", "3/3", "samples/s"):
        assert (control in output) == is_terminal


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.learning_rate=1"], "unknown key 'optim.learning_rate': Known here: beta1, "),
        (["trainer.max_stalness=1"], "did you mean 'max_staleness'?"),
        (["+trainer.foo=1"], "unknown key 'trainer.foo'"),
        (["exprement=demo"], "did you mean 'experiment'?"),
        (["optim={lrr: 3}"], "unknown key 'optim.lrr': did you mean 'lr'?"),
        (["correction.combined.uper=3"], "unknown key 'correction.combined.uper': did you mean 'upper'?"),
        (["model.hidden_size.x=3"], "Could not override 'model.hidden_size.x'"),
        (["hydra.run.dir=elsewhere"], "no effect here; a run writes to run.output_dir"),
        (["correction=token"], "token"),
        (["experiment=nothing"], "nothing"),
        (["task=null"], "Config group override must be a string"),
        (["task=jsonl"], "task.path"),
        (["optim.lr=fast"], "optim.lr='fast'"),
        (["trainer.group_size=1"], "trainer.group_size=1"),
        (["trainer.mini_batches=3"], "not divisible"),
        (["task.max_prompt_tokens=2"], "task.max_prompt_tokens=2"),
        (["rollout.max_response_tokens=2"], "rollout.max_response_tokens=2"),
        (["model.max_position_embeddings=4"], "exceed model.max_position_embeddings=4"),
        (["rollout.top_p=0.8"], "rollout.top_p=0.8"),
        (["model.dropout=0.1"], "model.dropout=0.1"),
        (["~task.num_digits", "task.kind=jsonl", "task.path=nowhere.jsonl"], "nowhere.jsonl: no regular file"),
        (["~warm_start.num_steps", "warm_start.path=nowhere.safetensors"], "nowhere.safetensors: no such file"),
        (["cache.max_bytes=1000"], "cache.max_bytes=1,000"),
        (["correction=bypass_ppo_clip", "+correction.combined={upper: 2}"], "clipped ratio is the only correction"),
        (["trainer.anchor=bypass"], "no behaviour log-probs to split by"),
        (["run.output_dir=/"], "root of a file system"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence_and_nothing_is_written(overrides, message, tmp_path, capsys):
    places = [place for place in _places(tmp_path) if place.split("=")[0] not in str(overrides)]
    if "warm_start.path" in str(overrides):
        places = places[:1]
    assert main(["train", *QUICK, *places, *overrides]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_task_of_ones_own_is_a_file_and_a_word(tmp_path, capsys):
    lines = [json.dumps({"prompt": f"{n:02d}=", "answer": f"{n:02d}"[::-1]}) for n in range(60)]
    (tmp_path / "task.jsonl").write_text("\n".join(lines))
    overrides = ["task=jsonl", f"task.path={tmp_path / 'task.jsonl'}", "task.eval_items=20", "rollout=thread"]
    arguments = [argument for argument in QUICK if not argument.startswith("task.")]
    assert main(["train", *arguments, *_places(tmp_path), *overrides]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_batches"] == 3


def test_help_lists_groups_keys_and_examples(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    output = capsys.readouterr().out
    for text in (
        "experiment: demo",
        "behaviour_token_tis",
        "max_staleness: 2",
        "anchor: behaviour  # behaviour | last_sync",
        "# AdamW and its schedule",
        "fsdp-async train experiment=demo",
    ):
        assert text in output


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train", "--fast"]])
def test_unusable_arguments_have_an_exit_code_of_their_own(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: fsdp-async" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "group"])
def test_a_signal_ends_a_run_after_the_step_in_hand_with_everything_whole(tmp_path, number, code, whole_group):
    process = _start(tmp_path, *ENDLESS)
    _wait_for(lambda: _events(tmp_path / "run").count("step") >= 2, process, "second step")
    holdings = _holdings(process)
    assert holdings[1], "weights travel in shared memory"
    (os.killpg if whole_group else os.kill)(process.pid, number)
    output, returned = _end(process)
    assert returned == code, output
    assert "Traceback" not in output
    _check_gone(holdings)
    _check_interrupted(tmp_path / "run")


def test_a_second_signal_ends_a_run_at_once_and_leaves_no_child(tmp_path):
    # Evaluation of untrained answers of 4,000 tokens, which one signal waits for, takes far longer than the deadline.
    endless = ["task.num_digits=4", "task.eval_items=5000", "rollout.max_response_tokens=4000"]
    sizes = ["model.max_position_embeddings=4096", "trainer.micro_batch_tokens=4096"]
    process = _start(tmp_path, *ENDLESS, *endless, *sizes)
    _wait_for(lambda: "publication" in _events(tmp_path / "run"), process, "first publication")
    holdings = _holdings(process)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    output, returned = _end(process)
    assert returned == 143, output
    assert "Traceback" not in output
    _check_gone(holdings)
    _check_interrupted(tmp_path / "run")


@pytest.mark.parametrize(
    ("during_step", "code", "outcome"),
    [
        ([], 0, "completed"),
        ([signal.SIGINT], 130, "interrupted"),
        ([signal.SIGINT, signal.SIGTERM], 143, "interrupted"),
    ],
)
def test_a_signal_to_a_run_that_is_ending_leaves_its_summary_whole(
    during_step, code, outcome, tmp_path, monkeypatch, capsys
):
    finish, observe = Recorder.finish, Terminal.observe

    def observe_and_signal(self, event, step, values):
        observe(self, event, step, values)
        for number in during_step if event == "step" else []:
            signal.raise_signal(number)

    def signal_and_finish(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        return finish(self)

    monkeypatch.setattr(Terminal, "observe", observe_and_signal)
    monkeypatch.setattr(Recorder, "finish", signal_and_finish)
    assert main(["train", *QUICK, *_places(tmp_path), "rollout=thread"]) == code
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == outcome
    assert _events(tmp_path / "run").count("step") == (1 if during_step else 3)
    assert "Traceback" not in capsys.readouterr().err


def test_a_signal_during_the_warm_start_leaves_no_half_written_file(tmp_path):
    process = _start(tmp_path, "warm_start.num_steps=1000000")
    _wait_for(lambda: (tmp_path / "run" / "run.json").exists() and _children(process.pid), process, "warm start")
    holdings = _holdings(process)
    os.killpg(process.pid, signal.SIGINT)
    output, returned = _end(process)
    assert returned == 130, output
    assert "Traceback" not in output
    _check_gone(holdings)
    assert not (tmp_path / "warm").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_further_signals_do_not_keep_an_interrupted_warm_start_from_closing_its_engine(tmp_path, monkeypatch):
    close, is_closed = ThreadEngine.close, []

    def signal_and_close(self):
        signal.raise_signal(signal.SIGINT)
        close(self)
        is_closed.append(True)

    monkeypatch.setattr(Terminal, "warm_start", lambda self, step, loss: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(ThreadEngine, "close", signal_and_close)
    assert main(["train", *QUICK, *_places(tmp_path), "rollout=thread"]) == 130
    assert is_closed
    assert not (tmp_path / "warm").exists()


def test_an_interrupted_warm_start_leaves_a_summary_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(Terminal, "warm_start", lambda self, step, loss: signal.raise_signal(signal.SIGTERM))
    assert main(["train", *QUICK, *_places(tmp_path), "rollout=thread"]) == 143
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["num_batches"]) == ("unfinished", 0)


def test_a_group_that_is_killed_leaves_no_shared_memory(tmp_path):
    before = named_segments()
    process = _start(tmp_path, *ENDLESS)
    _wait_for(lambda: "step" in _events(tmp_path / "run"), process, "first step")
    holdings = _holdings(process)
    os.killpg(process.pid, signal.SIGKILL)
    _end(process)
    _check_gone(holdings)
    assert named_segments() <= before


def test_text_that_the_terminal_cannot_show_is_shown_as_escapes(tmp_path):
    command = [sys.executable, "-m", "fsdp_async", "plan", *QUICK, 'run.output_dir="\u00e9"']
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    command = [*command, "task.kind=jsonl", "~task.num_digits", 'task.path="\u00e9"']
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1
    assert r"task.path=\xe9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_named_as_the_cause(tmp_path):
    command = [sys.executable, "-m", "fsdp_async", "train", *QUICK, *_places(tmp_path), "rollout=thread"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 1
    assert "stdout was closed by its reader" in errors
    assert "Traceback" not in errors


def test_a_second_run_into_a_directory_in_use_is_refused_and_the_first_goes_on(tmp_path, capsys):
    first = _start(tmp_path, *ENDLESS)
    _wait_for(lambda: "step" in _events(tmp_path / "run"), first, "first step")
    for overwrite in ("false", "true"):
        assert main(["train", *QUICK, *_places(tmp_path), f"run.overwrite={overwrite}"]) == 1
        assert f"in use by a living run (process {first.pid})" in capsys.readouterr().err
    steps = _events(tmp_path / "run").count("step")
    _wait_for(lambda: _events(tmp_path / "run").count("step") > steps, first, "next step")
    os.kill(first.pid, signal.SIGTERM)
    assert _end(first)[1] == 143
    _check_interrupted(tmp_path / "run")


def test_a_run_that_is_killed_before_its_first_step_leaves_the_old_results_in_place(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / "summary.json").write_text('"old"')
    process = _start(tmp_path, "run.overwrite=true", "warm_start.num_steps=1000000")
    _wait_for(lambda: (tmp_path / ".run.new" / "run.json").exists() and _children(process.pid), process, "new run")
    holdings = _holdings(process)
    process.kill()
    _end(process)
    assert (tmp_path / "run" / "summary.json").read_text() == '"old"'
    _check_gone(holdings)


def _engine_of(process):
    """The child that holds a model, not the one that only tracks resources."""
    return max(_children(process.pid), key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_hangs_is_started_again_and_nothing_is_lost(number, tmp_path):
    process = _start(tmp_path, *ENDLESS, "rollout.answer_timeout_s=3")
    _wait_for(lambda: "step" in _events(tmp_path / "run"), process, "first step")
    engine = _engine_of(process)
    os.kill(engine, number)
    _wait_for(lambda: "restart" in _events(tmp_path / "run"), process, "restart")
    _wait_for(lambda: _events(tmp_path / "run")[-5:].count("step") > 0, process, "step after it")
    assert not os.path.exists(f"/proc/{engine}")
    steps = _events(tmp_path / "run").count("step")
    _wait_for(lambda: _events(tmp_path / "run").count("step") > steps, process, "next step")
    holdings = _holdings(process)
    os.kill(process.pid, signal.SIGTERM)
    output, returned = _end(process)
    assert returned == 143
    assert "Traceback" not in output
    _check_gone(holdings)
    _check_interrupted(tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (restart,) = [record for record in records if record["event"] == "restart"]
    assert ("SIGKILL" if number == signal.SIGKILL else "no sign of life") in restart["cause"]
    assert records[-1]["ledger"]["num_late"] == 0


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    process = _start(tmp_path, *ENDLESS, "checkpoint.every=2")
    _wait_for(lambda: _events(tmp_path / "run").count("checkpoint") >= 2, process, "checkpoints")
    holdings = _holdings(process)
    process.kill()
    _end(process)
    _check_gone(holdings)
    again = _start(tmp_path, *ENDLESS, "checkpoint.every=2", "run.resume=auto")
    _wait_for(lambda: "resumed" in (tmp_path / "run" / "run.json").read_text(), again, "resumption")
    done = _events(tmp_path / "run").count("step")
    _wait_for(lambda: _events(tmp_path / "run").count("step") > done + 2, again, "steps")
    os.kill(again.pid, signal.SIGTERM)
    output, returned = _end(again)
    assert returned == 143, output
    assert "resume: after step" in output
    _check_interrupted(tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if record["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "no step twice, none left out"
    assert records[-1]["ledger"]["num_reissued"] > 0


def test_a_killed_engine_ends_the_run_with_its_name_where_it_may_not_be_started_again(tmp_path):
    process = _start(tmp_path, *ENDLESS, "rollout.max_restarts=0")
    _wait_for(lambda: "step" in _events(tmp_path / "run"), process, "first step")
    os.kill(_engine_of(process), signal.SIGKILL)
    output, returned = _end(process)
    assert returned == 1
    assert "EngineDiedError: engine-0 ended: process" in output
    assert "signal SIGKILL" in output
    assert "Traceback" not in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert summary["samples_submitted"] == summary["samples_consumed"] + summary["samples_dropped"]
