"""A reward function that raises, hangs, dies or talks nonsense costs a response, not the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from builders import group, response

from fsdp_async.errors import ConfigError, FsdpAsyncError, InputError, RewardError
from fsdp_async.rewards import score_group
from fsdp_async.scoring import Limits, ProcessReward
from fsdp_async.types import Prompt

PROMPT = Prompt("p", (4, 2), "test")
# A function that answers does so in a millisecond; a busy machine may take much longer.
PATIENT_S = 30.0
# For functions that never answer: the only thing that a short limit can get wrong is a healthy answer in the same test.
SHORT_S = 1.0
END_S = 10.0

FUNCTIONS = """
    import os, subprocess, sys, threading, time
    import numpy

    def length(prompt, response, info):
        return len(response) / 10

    def echo(prompt, response, info):
        assert (prompt, response) == ("42", "7 8"), (prompt, response)
        assert info == {"answer": "7", "prompt_id": "p", "sample_index": 3, "finish_reason": "stop"}, info
        return numpy.float32(0.5)

    def naughty(prompt, response, info):
        if response == "0": raise KeyError("no such word")
        if response == "1": threading.Event().wait()
        if response == "2": return float("nan")
        if response == "3": os._exit(7)
        if response == "4": return "0.5"
        if response == "5": sys.exit("enough")
        if response == "6": return -float("inf")
        if response == "7": return None
        print("a word on standard output")
        return 0.25

    def with_child(prompt, response, info):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        return child.pid

    class Rude(Exception):
        def __init__(self, *, code):  # cannot be unpickled
            super().__init__("rude")
            self.word = lambda: None

    def rude(prompt, response, info):
        raise Rude(code=1)

    def forking(prompt, response, info):
        if info["sample_index"] == 0 and os.fork() == 0:
            sys.exit(0)
        return info["sample_index"]

    NOT_A_FUNCTION = 3
"""


class Texts:
    """A task whose tokens read as numbers."""

    def __init__(self, **info):
        self.info = {"answer": "7", **info}

    def decode(self, token_ids):
        return ("" if tuple(token_ids) == PROMPT.token_ids else " ").join(str(token) for token in token_ids)

    def scoring_info(self, prompt_id):
        return self.info


@pytest.fixture
def build(tmp_path):
    """Builds rewards of functions in `my_reward.py`, and closes them."""
    path, built = tmp_path / "my_reward.py", []
    path.write_text(textwrap.dedent(FUNCTIONS))

    def make(name, *, timeout_s=PATIENT_S, max_failures=10, failure_value=0.0, source=None):
        built.append(ProcessReward(f"{path}:{name}", source or Texts(), Limits(timeout_s, max_failures, failure_value)))
        return built[-1]

    yield make
    for reward in built:
        reward.close()


def _score(reward, *tokens, index=0):
    return reward.score(PROMPT, response("p", index, tokens))


def _wait_until_gone(pid):
    deadline = time.monotonic() + END_S
    while os.path.exists(f"/proc/{pid}") and "\nState:\tZ" not in _status(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its reward"
        time.sleep(0.01)


def _status(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ"


def test_a_function_gets_texts_and_info_and_its_number_is_the_score(build):
    reward = build("echo")
    assert _score(reward, 7, 8, index=3) == 0.5
    assert reward.failures == {}


def test_a_group_is_scored_response_by_response(build):
    before = group("p", [4, 2], [response("p", i, [8] * (i + 1), reward=None) for i in range(3)])
    assert [r.reward for r in score_group(before, build("length")).responses] == [0.1, 0.3, 0.5]


def test_a_process_that_a_function_forked_does_not_answer_for_it(build):
    reward = build("forking")
    assert [_score(reward, 9, index=index) for index in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert reward.failures == {}


@pytest.mark.parametrize(
    ("token", "kind", "message"),
    [
        (0, "raised", r"'p'\[0\] raised: KeyError: 'no such word' \(my_reward\.py, line 14\)"),
        (2, "not_a_number", r"'p'\[0\] not_a_number: it returned nan \(float\)"),
        (3, "died", r"'p'\[0\] died: its process ended with code 7"),
        (4, "not_a_number", r"it returned '0\.5' \(str\)"),
        (5, "raised", "SystemExit: enough"),
        (6, "not_a_number", r"it returned -inf"),
        (7, "not_a_number", r"it returned None \(NoneType\)"),
    ],
)
def test_a_failure_gets_its_documented_value_is_counted_and_named(build, token, kind, message):
    reward = build("naughty", failure_value=-1.0)
    assert _score(reward, token) == -1.0
    assert reward.failures == {kind: 1}
    assert re.search(message, reward.first_failures[kind])
    assert _score(reward, 9) == 0.25, "the next response is scored as if nothing had been"


def test_a_function_that_hangs_is_killed_with_its_process_and_a_new_one_goes_on(build):
    reward = build("naughty", timeout_s=SHORT_S)
    first, start_s = reward.pid, time.monotonic()
    assert _score(reward, 1) == 0.0
    assert SHORT_S <= time.monotonic() - start_s < SHORT_S + END_S
    assert reward.failures == {"timed_out": 1}
    assert reward.first_failures == {"timed_out": "'p'[0] timed_out: no value within rewards.timeout_s=1"}
    assert not os.path.exists(f"/proc/{first}")
    assert _score(reward, 9) == 0.25
    assert reward.pid not in (None, first)


def test_more_failures_than_allowed_end_it_with_what_failed_and_on_which_prompt(build):
    reward = build("naughty", max_failures=2)
    for token in (0, 2):
        assert _score(reward, token) == 0.0
    with pytest.raises(RewardError) as caught:
        _score(reward, 0, index=5)
    text = str(caught.value)
    assert "my_reward.py:naughty failed on 3 responses (2 raised, 1 not_a_number)" in text
    assert "above rewards.max_failures=2" in text
    assert "the last: 'p'[5] raised: KeyError" in text
    assert "'p'[0] not_a_number: it returned nan" in text
    assert isinstance(caught.value, FsdpAsyncError)
    assert isinstance(caught.value, RuntimeError)


def test_no_failure_is_allowed_where_none_is(build):
    with pytest.raises(RewardError, match="failed on 1 responses"):
        _score(build("naughty", max_failures=0), 0)


def test_a_failure_can_be_told_from_a_score(build):
    reward = build("naughty", failure_value=1.0)
    assert reward.try_score(PROMPT, response("p", 0, (0,))) is None
    assert reward.try_score(PROMPT, response("p", 0, (9,))) == 0.25


def test_an_error_that_cannot_be_pickled_is_counted_like_any_other(build):
    reward = build("rude")
    assert _score(reward, 0) == 0.0
    assert reward.first_failures["raised"].startswith("'p'[0] raised: fsdp_async_reward.Rude: rude")


def test_arguments_that_cannot_be_pickled_are_a_failure_and_not_the_end(build):
    reward = build("length", source=Texts(entry=lambda: None))
    assert _score(reward, 0) == 0.0
    assert "cannot be sent to its process" in reward.first_failures["raised"]
    assert "lambda" in reward.first_failures["raised"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:score", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("{dir}/none.py:score", "FileNotFoundError: no file .*none.py"),
        ("{dir}/my_reward.py:lenght", r"has no 'lenght'; it has length, echo, naughty"),
        ("{dir}/my_reward.py:NOT_A_FUNCTION", "is 3, no function"),
        ("{dir}/needs.py:score", "ModuleNotFoundError: No module named 'not_installed'"),
        ("{dir}/broken.py:score", r"SyntaxError: .*"),
        ("{dir}/leaves.py:score", "its process ended while it imported the module"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_when_built(build, tmp_path, function, message):
    (tmp_path / "needs.py").write_text("import not_installed")
    (tmp_path / "broken.py").write_text("def score(:")
    (tmp_path / "leaves.py").write_text("import os; os._exit(0)")
    with pytest.raises(ConfigError, match=rf"rewards\.function=.*{message}"):
        ProcessReward(function.format(dir=tmp_path), Texts(), Limits(PATIENT_S, 10, 0.0))


def test_a_module_of_the_working_directory_and_files_beside_a_file_are_found(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("VALUE = 0.75")
    (tmp_path / "own.py").write_text("import helper\ndef score(prompt, response, info): return helper.VALUE")
    for function, directory in ((f"{tmp_path}/own.py:score", "/"), ("own:score", tmp_path)):
        monkeypatch.chdir(directory)
        reward = ProcessReward(function, Texts(), Limits(PATIENT_S, 10, 0.0))
        try:
            assert _score(reward, 1) == 0.75
        finally:
            reward.close()


def test_a_function_that_is_gone_when_its_process_is_replaced_ends_the_run(build, tmp_path):
    reward = build("naughty")
    (tmp_path / "my_reward.py").unlink()
    assert _score(reward, 3) == 0.0
    with pytest.raises(RewardError, match=r"started again and could not: .*no file"):
        _score(reward, 9)


def test_nothing_is_left_behind(build):
    before = set(os.listdir("/proc/self/fd"))
    reward = build("with_child")
    child = int(_score(reward, 0))
    worker = reward.pid
    reward.close()
    reward.close()
    assert set(os.listdir("/proc/self/fd")) == before
    for pid in (worker, child):
        _wait_until_gone(pid)
    with pytest.raises(RewardError, match="was closed"):
        _score(reward, 0)


def test_a_process_that_hangs_goes_when_the_one_that_started_it_is_killed(build, tmp_path):
    code = f"""
        from fsdp_async.scoring import Limits, ProcessReward
        from fsdp_async.types import Prompt
        from builders import response
        from test_scoring import PROMPT, Texts
        reward = ProcessReward("{tmp_path}/my_reward.py:naughty", Texts(), Limits(1000.0, 10, 0.0))
        print(reward.pid, flush=True)
        reward.score(PROMPT, response("p", 0, (1,)))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    build("length")  # writes the file
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        worker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    _wait_until_gone(worker)


def test_an_interrupted_wait_leaves_no_answer_for_the_next_response(build, monkeypatch):
    reward = build("length")
    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.connection.Connection.poll", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            _score(reward, 1, 1, 1, 1)
    assert _score(reward, 1) == 0.1


def _interrupt(*_):
    raise KeyboardInterrupt


def test_what_a_task_does_not_know_is_not_a_failure_of_the_function(build):
    class Ignorant(Texts):
        def scoring_info(self, prompt_id):
            raise InputError(f"no item {prompt_id}")

    reward = build("length", source=Ignorant())
    with pytest.raises(InputError, match="no item p"):
        _score(reward, 1)
