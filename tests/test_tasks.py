from __future__ import annotations

import dataclasses
import json
from itertools import islice

import pytest

from fsdp_async.errors import ConfigError, InputError
from fsdp_async.tasks import TaskConfig, build_task


def _ids(prompts):
    return [(p.prompt_id, p.epoch) for p in prompts]


def _jsonl(tmp_path, *lines):
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return TaskConfig(kind="jsonl", path=str(path), eval_items=1)


def test_a_sorting_prompt_carries_its_sorted_answer_and_its_end():
    task = build_task(TaskConfig(), seed=0)
    prompt = next(task.prompts())
    text = task.tokenizer.decode(list(prompt.token_ids))
    answer = task.tokenizer.decode(list(prompt.info["answer_ids"][:-1]))
    assert prompt.prompt_id == f"sort/{text[:-1]}"
    assert text.endswith(">")
    assert answer == "".join(sorted(text[:-1]))
    assert prompt.info["answer_ids"][-1] == task.eos_token_id


def test_characters_are_one_token_each_and_survive_the_way_back():
    task = build_task(TaskConfig(), seed=0)
    text = "4927> az=+-*/.,"
    ids = task.encode(text)
    assert len(ids) == len(text)
    assert task.tokenizer.decode(list(ids)) == text
    assert 40 <= task.vocab_size <= 50


def test_evaluation_prompts_are_fixed_whatever_the_seed_and_never_trained_on():
    one, two = (build_task(TaskConfig(num_digits=2, eval_items=30), seed=seed) for seed in (0, 1))
    held_out = {p.prompt_id for p in one.eval_prompts()}
    assert _ids(one.eval_prompts()) == _ids(two.eval_prompts())
    assert len(held_out) == 30
    assert not held_out & {p.prompt_id for p in islice(one.prompts(), 70)}
    sft = {ids for ids, _ in one.sft_pairs(500, 0)}
    assert not sft & {p.token_ids for p in one.eval_prompts()}


def test_every_epoch_holds_each_item_once_in_a_new_order():
    task = build_task(TaskConfig(num_digits=1, eval_items=5), seed=0)
    stream = _ids(islice(task.prompts(), 10))
    first, second = stream[:5], stream[5:]
    assert [epoch for _, epoch in first] == [0] * 5
    assert [epoch for _, epoch in second] == [1] * 5
    assert {name for name, _ in first} == {name for name, _ in second}


def test_the_stream_depends_on_the_seed_alone_and_resumes_where_it_stood():
    config = TaskConfig(num_digits=1, eval_items=5)
    expected = _ids(islice(build_task(config, seed=3).prompts(), 12))
    assert _ids(islice(build_task(config, seed=4).prompts(), 12)) != expected
    first = build_task(config, seed=3)
    head = _ids(islice(first.prompts(), 7))
    second = build_task(config, seed=3)
    second.load_state_dict(first.state_dict())
    assert head + _ids(islice(second.prompts(), 5)) == expected


def test_a_jsonl_task_asks_what_its_lines_say(tmp_path):
    config = _jsonl(tmp_path, '{"prompt": "1+1=", "answer": "2"}', "", '{"prompt": "2+2=", "answer": "4"}')
    task = build_task(config, seed=0)
    (held_out,) = task.eval_prompts()
    prompt = next(task.prompts())
    assert task.tokenizer.decode(list(prompt.token_ids)) == "1+1="
    assert (prompt.prompt_id, held_out.prompt_id) == ("jsonl/1", "jsonl/3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"prompt": "1"}', "line 2: need exactly the keys prompt and answer"),
        ('{"prompt": "1", "answer": 2}', "line 2: answer=2 must be a non-empty string"),
        ('{"prompt": "1", "answer": "2", "answer": "3"}', "line 2: not JSON .a key comes twice"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"prompt": "", "answer": "2"}', "line 2: prompt='' must be"),
        ('{"prompt": "A", "answer": "2"}', r"line 2: prompt has characters \['A'\]"),
        ('{"prompt": "\u2028", "answer": "2"}', r"line 2: prompt has characters \['\\u2028'\]"),
        (json.dumps({"prompt": "1" * 17, "answer": "2"}), "line 2: the prompt has 17 tokens, above .*=16"),
    ],
)
def test_a_malformed_line_is_named_with_its_number_and_cause(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        build_task(_jsonl(tmp_path, '{"prompt": "1", "answer": "1"}', line), seed=0)


def test_a_line_that_is_no_utf8_is_named_with_its_number(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_bytes(b'{"prompt": "1", "answer": "1"}\r\n{"prompt": "\xff", "answer": "2"}\n')
    with pytest.raises(InputError, match=r"line 2: not JSON .*0xff"):
        build_task(TaskConfig(kind="jsonl", path=str(path), eval_items=1), seed=0)


def test_a_file_that_went_away_after_the_config_was_made_is_named(tmp_path):
    config = _jsonl(tmp_path, '{"prompt": "1", "answer": "1"}')
    (tmp_path / "task.jsonl").unlink()
    with pytest.raises(InputError, match=r"task\.path=.*No such file"):
        build_task(config, seed=0)


def test_a_question_may_not_be_trained_on_and_evaluated(tmp_path):
    one, two = '{"prompt": "1", "answer": "1"}', '{"prompt": "2", "answer": "2"}'
    with pytest.raises(InputError, match="jsonl/1 and jsonl/3 ask the same, '1'"):
        build_task(_jsonl(tmp_path, one, two, one), seed=0)
    other = '{"prompt": "2", "answer": "1"}'
    with pytest.raises(InputError, match=r"jsonl/2 and jsonl/3 are for evaluation, .* want different answers"):
        build_task(dataclasses.replace(_jsonl(tmp_path, one, two, other), eval_items=2), seed=0)
    # Twice in training is a weight.
    task = build_task(_jsonl(tmp_path, one, one, two), seed=0)
    assert {p.prompt_id for p in islice(task.prompts(), 2)} == {"jsonl/1", "jsonl/2"}


def test_a_file_with_nothing_left_to_train_on_is_refused(tmp_path):
    with pytest.raises(InputError, match="nothing is left to train on"):
        build_task(_jsonl(tmp_path, '{"prompt": "1", "answer": "1"}'), seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "jsonl", "path": "no/such.jsonl"}, "task.path=no/such.jsonl: no regular file"),
        ({"kind": "jsonl"}, "needs task.path"),
        ({"path": "x.jsonl"}, "no effect with task.kind=sort_digits"),
        ({"max_prompt_tokens": 4}, "prompts of 5 tokens, above task.max_prompt_tokens=4"),
        ({"num_digits": 12}, "num_digits=12: all prompts are listed, so at most 6"),
        ({"num_digits": 2, "eval_items": 60}, "make only 100 prompts"),
        ({"num_digits": 0}, "num_digits=0"),
    ],
)
def test_an_impossible_task_is_refused_at_the_door(options, message):
    with pytest.raises(ConfigError, match=message):
        TaskConfig(**options)


def test_an_option_of_the_other_kind_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match="num_digits=3 has no effect"):
        TaskConfig(kind="jsonl", path=str(path), num_digits=3)


def test_an_answer_that_no_response_could_hold_is_refused():
    task = build_task(TaskConfig(num_digits=2, eval_items=5), seed=0)
    task.check_answers_fit(3)
    with pytest.raises(InputError, match=r"sort/\d\d: the answer '\d\d' takes 3 tokens .*max_response_tokens=2"):
        task.check_answers_fit(2)
