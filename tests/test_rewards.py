from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
from builders import group, response

from fsdp_async.errors import ConfigError, InputError, NonFiniteError
from fsdp_async.rewards import AnswerMatch, RewardConfig, build_reward, score_group
from fsdp_async.types import Prompt

PROMPT = Prompt("p", (5,), "test", {"answer_ids": (7, 8, 9, 1)})


@pytest.mark.parametrize(
    ("tokens", "exact", "graded"),
    [
        ((7, 8, 9, 1), 1.0, 1.0),
        ((7, 8, 9), 0.0, 0.75),
        ((7, 9, 8, 1), 0.0, 0.5),
        ((7, 8, 9, 1, 1), 0.0, 0.8),
        ((3,), 0.0, 0.0),
    ],
)
def test_an_answer_counts_with_its_end(tokens, exact, graded):
    answer = response("p", 0, tokens)
    assert build_reward(RewardConfig()).score(PROMPT, answer) == exact
    assert build_reward(RewardConfig(kind="graded")).score(PROMPT, answer) == graded


def test_an_answer_cut_off_at_its_length_has_no_end_and_counts_nothing():
    cut = replace(response("p", 0, (7, 8, 9)), finish_reason="length")
    assert build_reward(RewardConfig()).score(PROMPT, cut) == 0.0


@pytest.mark.parametrize("info", [{}, {"answer_ids": ()}])
def test_a_prompt_without_an_answer_is_named(info):
    with pytest.raises(InputError, match=r"'p' has no info\['answer_ids'\]"):
        build_reward(RewardConfig()).score(Prompt("p", (5,), "test", info), response("p", 0, (7,)))


def test_scoring_a_group_keeps_everything_else():
    before = group("p", [5], [response("p", 0, [7], reward=None), response("p", 1, [8], reward=None)])
    after = score_group(before, SimpleNamespace(score=lambda prompt, answer: float(answer.sample_index)))
    assert [r.reward for r in after.responses] == [0.0, 1.0]
    assert after.sample_ids == before.sample_ids


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_named(value):
    with pytest.raises(NonFiniteError, match=r"'p'\[0\] is (nan|inf)"):
        score_group(group("p", [5], [response("p", 0, [7])]), SimpleNamespace(score=lambda prompt, answer: value))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": "a:b"}, r"rewards\.function=a:b has no effect with rewards\.kind=exact"),
        ({"kind": "graded", "failure_value": -1.0}, r"failure_value=-1\.0 has no effect with rewards\.kind=graded"),
        ({"max_failures": 3}, r"max_failures=3 has no effect"),
        ({"timeout_s": 1.0}, r"timeout_s=1\.0 has no effect"),
        ({"kind": "math_verify", "function": "a:b"}, "function=a:b has no effect with rewards.kind=math_verify"),
        ({"kind": "reasoning_gym", "function": "a:b"}, "choose rewards.kind=python"),
        ({"kind": "python"}, r'function=None .*name a function as "package\.module:name"'),
        ({"kind": "python", "function": "reward"}, "function='reward'"),
        ({"kind": "python", "function": "a.b:"}, "function='a.b:'"),
        ({"kind": "python", "function": "a-b:c"}, "function='a-b:c'"),
        ({"kind": "python", "function": "a:b", "timeout_s": 0.0}, r"timeout_s=0\.0: must be above 0"),
        ({"kind": "python", "function": "a:b", "timeout_s": float("inf")}, "timeout_s=inf"),
        ({"kind": "python", "function": "a:b", "max_failures": -1}, "max_failures=-1: must not be negative"),
        ({"kind": "python", "function": "a:b", "failure_value": float("nan")}, "failure_value=nan: must be a finite"),
    ],
)
def test_an_option_that_cannot_act_or_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RewardConfig(**options)


@pytest.mark.parametrize("function", ["a:b", "a.b_2.c:d", "my-dir/my reward.py:f", "/x/y.py:f"])
def test_a_function_is_named_by_module_or_file_and_survives_pickling(function):
    config = RewardConfig(kind="python", function=function, timeout_s=1.0, max_failures=0, failure_value=-1.0)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_reward_of_texts_needs_the_task():
    with pytest.raises(ConfigError, match="pass the task to build_reward"):
        build_reward(RewardConfig(kind="python", function="json:loads"))


class _Letters:
    """Two tokens for each letter; 9 is the end."""

    def decode(self, token_ids):
        return "".join("abcd"[token // 2] for token in token_ids if token != 9)

    def scoring_info(self, prompt_id):
        return {}


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize(
    ("tokens", "reason", "exact", "share"),
    [
        ((0, 2, 9), "stop", 1.0, 1.0),
        ((1, 3, 9), "stop", 1.0, 1.0),  # the same letters in other tokens
        ((1, 3, 3), "length", 0.0, 0.0),  # it did not end
        ((1, 3), "length", 0.0, 0.0),
        ((0, 4, 9), "stop", 0.0, 2 / 3),
    ],
)
def test_an_answer_is_right_in_whatever_tokens_once_it_has_ended(graded, tokens, reason, exact, share):
    prompt = Prompt("p", (0,), "test", {"answer_ids": (0, 2, 9)})
    answered = replace(response("p", 0, tokens), finish_reason=reason)
    assert AnswerMatch(graded, _Letters()).score(prompt, answered) == pytest.approx(share if graded else exact)
    if tokens == (1, 3, 9):
        assert AnswerMatch(graded).score(prompt, answered) == (1 / 3 if graded else 0.0), "tokens alone"
