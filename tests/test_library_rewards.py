"""What math-verify and reasoning-gym say of responses, through the reward that a run would build."""

from __future__ import annotations

from contextlib import closing
from itertools import islice

import pytest
from builders import response

from fsdp_async.rewards import AnswerMatch, RewardConfig, Verdict, build_reward, build_right
from fsdp_async.tasks import TaskConfig, build_task

# The first response waits for nothing but the scoring itself, on a machine that may be busy.
PATIENT_S = 60.0


def _reward(kind, task, **options):
    return closing(build_reward(RewardConfig(kind=kind, timeout_s=PATIENT_S, **options), task))


def _answered(task, prompt, text):
    return response(prompt.prompt_id, 0, (*task.encode(text), task.eos_token_id))


def _jsonl(tmp_path, *answers):
    lines = [f'{{"prompt": "{index}", "answer": "{answer}"}}' for index, answer in enumerate((*answers, "1"))]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    return build_task(TaskConfig(kind="jsonl", path=str(tmp_path / "t.jsonl"), eval_items=1), seed=0)


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("1/2", "1/2", 1.0),
        ("1/2", "0.5", 1.0),
        ("1/2", "2/4", 1.0),
        ("1/2", "so it is 0.50", 1.0),
        ("1/2", "1/3", 0.0),
        ("2*x", "x+x", 1.0),
        ("2*x", "2", 0.0),
        ("12", "1*/2=-", 0.0),
        ("12", "", 0.0),
    ],
)
def test_math_verify_asks_whether_it_is_the_same_mathematics(tmp_path, answer, text, expected):
    task = _jsonl(tmp_path, answer)
    prompt = next(task.prompts())
    with _reward("math_verify", task) as reward:
        assert reward.score(prompt, _answered(task, prompt, text)) == expected
        assert reward.failures == {}


def test_an_answer_that_is_no_mathematics_is_a_failure_not_a_wrong_response(tmp_path):
    task = _jsonl(tmp_path, "..")
    prompt = next(task.prompts())
    with _reward("math_verify", task) as reward:
        assert reward.score(prompt, _answered(task, prompt, "1")) == 0.0
        assert "the answer '..' cannot be read as mathematics" in reward.first_failures["raised"]


def _gym(name="basic_arithmetic", *, size=40, **options):
    dataset = {"size": size, **options}
    return build_task(
        TaskConfig(kind="reasoning_gym", name=name, dataset=dataset, eval_items=10, max_prompt_tokens=400), seed=0
    )


@pytest.mark.parametrize("name", ["basic_arithmetic", "chain_sum", "countdown", "spell_backward", "rotate_matrix"])
def test_right_answers_score_at_least_99_percent_by_the_dataset_that_asked(name):
    task = _gym(name)
    prompts = list(islice(task.prompts(), 20))
    with _reward("reasoning_gym", task) as reward:
        scores = [reward.score(prompt, response(prompt.prompt_id, 0, prompt.info["answer_ids"])) for prompt in prompts]
        assert sum(scores) / len(scores) >= 0.99
        assert reward.failures == {}


def test_the_score_is_that_of_reasoning_gym_itself():
    task = _gym(min_terms=2, max_terms=2)
    prompt = next(task.prompts())
    answer = task.scoring_info(prompt.prompt_id)["answer"]
    with _reward("reasoning_gym", task) as reward:
        # basic_arithmetic gives the share of the text that is the answer.
        assert reward.score(prompt, _answered(task, prompt, f"{answer} ")) == len(answer) / (len(answer) + 1)
        assert reward.score(prompt, _answered(task, prompt, "x")) == 0.0


def test_an_exception_of_the_dataset_is_zero_and_counted(monkeypatch):
    task = _gym()
    prompt = next(task.prompts())
    monkeypatch.setattr(task, "scoring_info", lambda _: {"dataset": "chain_sum", "options": {}, "entry": None})
    with _reward("reasoning_gym", task) as reward:
        assert reward.score(prompt, _answered(task, prompt, "1")) == 0.0
        assert reward.failures == {"raised": 1}


def test_accuracy_counts_what_the_library_calls_right_and_no_failure(tmp_path):
    task = _jsonl(tmp_path, "1/2", "..")
    by_id = {prompt.prompt_id: prompt for prompt in islice(task.prompts(), 2)}
    config = RewardConfig(kind="math_verify", timeout_s=PATIENT_S, failure_value=1.0)
    with closing(build_reward(config, task)) as reward:
        right = build_right(config, reward)
        assert isinstance(right, Verdict)
        assert right.score(by_id["jsonl/1"], _answered(task, by_id["jsonl/1"], "0.5")) == 1.0
        assert right.score(by_id["jsonl/1"], _answered(task, by_id["jsonl/1"], "0.6")) == 0.0
        assert right.score(by_id["jsonl/2"], _answered(task, by_id["jsonl/2"], "1")) == 0.0


@pytest.mark.parametrize("kind", ["exact", "graded"])
def test_accuracy_is_the_whole_right_answer_where_tokens_are_compared(kind):
    config = RewardConfig(kind=kind)
    reward = build_reward(config)
    assert build_right(config, reward) == AnswerMatch(graded=False)
    assert (reward.failures, reward.first_failures) == ({}, {})
    reward.close()
