from __future__ import annotations

import dataclasses
import json
import pickle
from itertools import islice

import pytest

from fsdp_async.errors import ConfigError, InputError
from fsdp_async.tasks import TaskConfig, build_task
from fsdp_async.tokenization import CHARACTERS, TEXT_CHARACTERS


def _ids(prompts):
    return [(p.prompt_id, p.epoch) for p in prompts]


def _jsonl(tmp_path, *lines):
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return TaskConfig(kind="jsonl", path=str(path), eval_items=1)


def test_a_sorting_prompt_carries_its_sorted_answer_and_its_end():
    task = build_task(TaskConfig(), seed=0)
    prompt = next(task.prompts())
    text = task.decode(prompt.token_ids)
    answer = task.decode(prompt.info["answer_ids"])
    assert prompt.prompt_id == f"sort/{text[:-1]}"
    assert text.endswith(">")
    assert answer == "".join(sorted(text[:-1]))
    assert prompt.info["answer_ids"][-1] == task.eos_token_id


def test_characters_are_one_token_each_and_survive_the_way_back():
    task = build_task(TaskConfig(), seed=0)
    text = "4927> az=+-*/.,"
    ids = task.encode(text)
    assert len(ids) == len(text)
    assert task.decode(ids) == text
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
    assert task.decode(prompt.token_ids) == "1+1="
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
        ({"kind": "reasoning_gym"}, "needs task.name"),
        ({"name": "chain_sum"}, "task.name=chain_sum has no effect with task.kind=sort_digits"),
        ({"dataset": {"size": 5}}, "task.dataset={'size': 5} has no effect"),
        ({"kind": "reasoning_gym", "name": "chain_sum", "path": "x"}, "task.path=x has no effect"),
        ({"kind": "reasoning_gym", "name": "chain_sum", "num_digits": 3}, "task.num_digits=3 has no effect"),
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


def _gym(name="basic_arithmetic", *, eval_items=10, max_prompt_tokens=400, **dataset):
    return TaskConfig(
        kind="reasoning_gym",
        name=name,
        dataset={"size": 50, **dataset},
        eval_items=eval_items,
        max_prompt_tokens=max_prompt_tokens,
    )


def _questions(task):
    return {p.prompt_id: task.decode(p.token_ids) for p in [*islice(task.prompts(), 40), *task.eval_prompts()]}


def test_a_dataset_of_reasoning_gym_asks_its_questions_word_for_word():
    task = build_task(_gym(min_terms=2, max_terms=2), seed=0)
    for prompt in islice(task.prompts(), 40):
        info = task.scoring_info(prompt.prompt_id)
        assert task.decode(prompt.token_ids) == info["entry"]["question"]
        assert task.decode(prompt.info["answer_ids"]) == info["answer"] == info["entry"]["answer"]
        assert prompt.info["answer_ids"][-1] == task.eos_token_id
    assert _questions(task)["basic_arithmetic/0"].startswith("Calculate ")


def test_the_questions_of_a_dataset_depend_on_its_own_seed_alone():
    one, two = (build_task(_gym(), seed=seed) for seed in (0, 1))
    assert _questions(one) == _questions(two)
    assert [p.prompt_id for p in one.eval_prompts()] == [p.prompt_id for p in two.eval_prompts()]
    assert _questions(build_task(_gym(seed=1), seed=0)) != _questions(one)


def test_a_question_that_a_dataset_repeats_is_asked_once_and_never_on_both_sides():
    task = build_task(_gym(size=400, min_terms=2, max_terms=2, min_digits=1, max_digits=1, operators=["+"]), seed=0)
    stream = [task.decode(p.token_ids) for p in islice(task.prompts(), 5)]
    held_out = {task.decode(p.token_ids) for p in task.eval_prompts()}
    everything = [item.prompt for item in (*task._training, *task._evaluation)]
    assert len(everything) == len(set(everything)) < 400
    assert not held_out & set(stream)
    assert len(held_out) == 10


def test_shared_characters_have_the_same_tokens_in_every_task():
    text = build_task(_gym(), seed=0)
    assert text.encode(CHARACTERS) == build_task(TaskConfig(), seed=0).encode(CHARACTERS)
    assert text.vocab_size == 3 + len(TEXT_CHARACTERS) == 3 + 96
    assert text.decode(text.encode(TEXT_CHARACTERS + "\n\n.\n")) == TEXT_CHARACTERS + "\n\n.\n"


def test_text_ends_before_its_last_end_and_shows_other_special_tokens():
    task = build_task(TaskConfig(), seed=0)
    eos = task.eos_token_id
    assert task.decode((*task.encode("12"), eos)) == "12"
    assert task.decode(task.encode("12")) == "12"
    assert task.decode((*task.encode("1"), task.pad_token_id, eos, eos)) == "1<pad><eos>"
    assert task.decode(()) == ""


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (_gym("chain_sun"), ConfigError, r"no dataset 'chain_sun'; did you mean .*chain_sum"),
        (_gym("qqqqqq"), ConfigError, r"no dataset 'qqqqqq'; known: .*chain_sum"),
        (_gym(colour="red"), ConfigError, r"refuses .*unexpected keyword argument 'colour'"),
        (_gym(min_terms=0), ConfigError, r"task\.name=basic_arithmetic.*refuses .*min_terms must be positive"),
        (_gym("simple_geometry"), InputError, r"simple_geometry, entry 0: prompt has characters \['°'\] outside"),
        (_gym("rush_hour", max_prompt_tokens=2000), InputError, r"answer=None must be a non-empty string"),
        (_gym(max_prompt_tokens=5), InputError, r"entry 0: the prompt has \d+ tokens, above task.max_prompt_tokens=5"),
        (_gym(eval_items=50), InputError, r"task\.name=basic_arithmetic holds .* raise task\.dataset\.size"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused_with_the_cause(config, error, message):
    with pytest.raises(error, match=message):
        build_task(config, seed=0)


def test_a_task_knows_its_own_prompts_only():
    with pytest.raises(InputError, match="no item of task sort_digits is called 'x'"):
        build_task(TaskConfig(), seed=0).scoring_info("x")


def test_a_config_with_the_options_of_a_dataset_survives_pickling():
    config = _gym(operators=["+"])
    assert pickle.loads(pickle.dumps(config)) == config
