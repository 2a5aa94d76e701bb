"""What a policy reads and says, in the built-in characters and in the tokens of a directory."""

from __future__ import annotations

import json

import pytest
from policies import END, START, STOP, TEMPLATE, edit_json, make_policy, make_tokenizer
from transformers import AutoTokenizer

from fsdp_async.errors import InputError
from fsdp_async.policy_files import open_policy
from fsdp_async.tasks import TaskConfig, build_task
from fsdp_async.tokenization import (
    CHARACTERS,
    NO_TOKEN,
    TEXT_CHARACTERS,
    CharacterVocabulary,
    DirectoryVocabulary,
    Message,
    prompt_text,
)

CHAT = (Message("system", "be brief"), Message("user", "12+3="))


def _vocabulary(directory, **options):
    make_policy(directory, tokenizer=make_tokenizer(**options))
    return open_policy(str(directory)).vocabulary


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    make_policy(path)
    return path


@pytest.fixture(scope="module")
def vocabulary(directory):
    return open_policy(str(directory)).vocabulary


def test_a_text_has_the_ids_that_the_tokenizer_itself_gives(directory, vocabulary):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ("12+3=", "the sum of 7 and 8 is 15", "Größe 数\n\t<x>"):
        assert vocabulary.encode(text) == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert vocabulary.decode(vocabulary.encode(text)) == text
    assert len(vocabulary.encode("the sum of")) < len("the sum of"), "a token holds several characters"


def test_a_prompt_has_the_special_tokens_of_the_tokenizer_and_an_answer_none(tmp_path):
    vocabulary = _vocabulary(tmp_path, begins_with=END)
    assert vocabulary.encode_prompt("1+1=") == (1, *vocabulary.encode("1+1="))


def test_a_conversation_is_written_by_the_chat_template_up_to_where_the_answer_begins(vocabulary):
    written = f"{START}system\nbe brief{STOP}\n{START}user\n12+3={STOP}\n{START}assistant\n"
    ids = vocabulary.encode_prompt(CHAT)
    assert vocabulary.decode(ids) == written
    assert ids == vocabulary.encode(written)
    assert ids.count(3) == 2, "special tokens of the template are one token each"


def test_responses_end_as_tokenizer_and_generation_config_say(vocabulary):
    assert (vocabulary.eos_token_id, vocabulary.stop_token_ids, vocabulary.pad_token_id) == (3, (1,), 0)
    word = vocabulary.encode("12")
    assert vocabulary.decode((*word, 3)) == vocabulary.decode((*word, 1)) == "12"
    assert vocabulary.decode((*word, 3, 3)) == f"12{STOP}"


def test_without_a_generation_config_the_model_config_names_the_ends(tmp_path):
    make_policy(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit_json(tmp_path / "config.json", eos_token_id=[1, 3], pad_token_id=2)
    vocabulary = open_policy(str(tmp_path)).vocabulary
    assert (vocabulary.eos_token_id, vocabulary.stop_token_ids, vocabulary.pad_token_id) == (3, (1,), 0)


def test_without_a_filler_the_end_fills_and_without_an_end_of_its_own_that_of_generation_is_taken(tmp_path):
    make_policy(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", eos_token=None, pad_token=None)
    edit_json(tmp_path / "generation_config.json", eos_token_id=1, pad_token_id=None)
    vocabulary = open_policy(str(tmp_path)).vocabulary
    assert (vocabulary.eos_token_id, vocabulary.stop_token_ids, vocabulary.pad_token_id) == (1, (), 1)


def test_rows_of_the_embedding_without_a_token_are_seen_in_the_text(vocabulary):
    one, two = vocabulary.encode("1"), vocabulary.encode("2")
    assert vocabulary.decode((*one, 310, 319, *two)) == f"1{NO_TOKEN * 2}2"
    assert vocabulary.size == 300


def test_half_a_character_is_joined_with_its_other_half(vocabulary):
    ids = vocabulary.encode("ö")
    assert len(ids) == 2
    assert vocabulary.decode(ids) == "ö"


@pytest.mark.parametrize(
    ("options", "prompt", "message"),
    [
        ({"template": None}, CHAT, "is a list of messages, and the tokenizer of .* has no chat template"),
        ({}, (Message("nobody", "x"),), "is refused by the chat template of .*: no such role"),
        ({"begins_with": STOP}, "", r"ends with the eos token 3"),
        ({}, "", "has no tokens in the vocabulary"),
    ],
)
def test_a_prompt_that_cannot_be_written_is_refused_with_the_cause(tmp_path, options, prompt, message):
    vocabulary = _vocabulary(tmp_path, **options)
    with pytest.raises(InputError, match=message):
        vocabulary.encode_prompt(prompt)


def test_a_part_without_a_token_is_refused_and_not_read_as_something_else(tmp_path):
    CharacterVocabulary(TEXT_CHARACTERS).save(tmp_path)
    make_policy(tmp_path / "model")
    vocabulary = DirectoryVocabulary(tmp_path, open_policy(str(tmp_path / "model")).config)
    with pytest.raises(InputError, match=r"'1°' has a part without a token .* reads it as <unk>"):
        vocabulary.encode_prompt("1°")


@pytest.mark.parametrize("characters", [CHARACTERS, TEXT_CHARACTERS])
def test_the_built_in_characters_are_read_again_by_hugging_face_token_for_token(tmp_path, characters):
    built_in = CharacterVocabulary(characters)
    built_in.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = f"{characters}12  {characters[::-1]}"
    assert tuple(tokenizer.encode(text)) == built_in.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (built_in.eos_token_id, built_in.pad_token_id)
    assert len(tokenizer) == built_in.size


def test_a_vocabulary_that_was_written_encodes_as_before(tmp_path, vocabulary):
    make_policy(tmp_path)
    for file in tmp_path.glob("tok*"):
        file.unlink()
    vocabulary.save(tmp_path)
    again = open_policy(str(tmp_path)).vocabulary
    assert again.digest == vocabulary.digest
    assert again.encode_prompt(CHAT) == vocabulary.encode_prompt(CHAT)


def test_the_digest_tells_vocabularies_apart_and_not_directories(tmp_path, vocabulary):
    digests = {vocabulary.digest, _vocabulary(tmp_path / "same").digest}
    assert len(digests) == 1
    for number, options in enumerate(
        ({"template": TEMPLATE + "x"}, {"begins_with": END}, {"eos": END}, {"num_tokens": 290})
    ):
        digests.add(_vocabulary(tmp_path / str(number), **options).digest)
    assert len(digests) == 5
    assert CharacterVocabulary("ab").digest != CharacterVocabulary("ba").digest


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1+1=", "1+1="), ([{"role": "user", "content": "hi"}], (Message("user", "hi"),))],
)
def test_a_prompt_of_json_is_a_text_or_a_list_of_messages(value, expected):
    assert prompt_text(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "=3 must be a non-empty string, or a list of messages"),
        ([], r"=\[\] must be"),
        ([{"role": "user"}], r"\[0\]=.* must have exactly the keys role and content"),
        (
            [{"role": "user", "content": "a"}, {"role": "x", "content": 3}],
            r"\[1\]\.content=3 must be a non-empty string",
        ),
        (["hi"], r"\[0\]='hi' must have"),
    ],
)
def test_another_prompt_is_refused(value, message):
    with pytest.raises(InputError, match=message):
        prompt_text(value)


def _jsonl(tmp_path, *records):
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return TaskConfig(kind="jsonl", path=str(path), eval_items=1, max_prompt_tokens=40)


def test_a_task_asks_in_the_tokens_of_the_directory(tmp_path, vocabulary):
    messages = [{"role": "user", "content": "Größe?"}]
    config = _jsonl(tmp_path, {"prompt": messages, "answer": "Zwölf"}, {"prompt": "1+1=", "answer": "2"})
    task = build_task(config, seed=0, vocabulary=vocabulary)
    prompt = next(task.prompts())
    assert task.decode(prompt.token_ids) == f"{START}user\nGröße?{STOP}\n{START}assistant\n"
    assert prompt.info["answer_ids"] == (*vocabulary.encode("Zwölf"), 3)
    assert task.sft_pairs(1, 0) == [(prompt.token_ids, prompt.info["answer_ids"])]
    task.check_answers_fit(len(vocabulary.encode("Zwölf")) + 1)
    with pytest.raises(InputError, match=r"the answer 'Zwölf' takes \d tokens"):
        task.check_answers_fit(len(vocabulary.encode("Zwölf")))


def test_built_in_tasks_work_with_the_tokens_of_a_directory(vocabulary):
    for config in (
        TaskConfig(num_digits=2, eval_items=5),
        TaskConfig(
            kind="reasoning_gym", name="basic_arithmetic", dataset={"size": 20}, eval_items=5, max_prompt_tokens=200
        ),
    ):
        task = build_task(config, seed=0, vocabulary=vocabulary)
        prompt = next(task.prompts())
        answer = task.scoring_info(prompt.prompt_id)["answer"]
        assert task.decode(prompt.info["answer_ids"]) == answer
        assert task.vocab_size == 300


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "1+" * 30, "answer": "2"}, r"line 1: the prompt has 60 tokens, above task.max_prompt_tokens=40"),
        (
            {"prompt": [{"role": "nobody", "content": "x"}], "answer": "2"},
            "line 1: prompt is refused by the chat template",
        ),
        ({"prompt": [{"role": "user"}], "answer": "2"}, r"line 1: prompt\[0\]="),
    ],
)
def test_a_line_that_the_directory_cannot_ask_is_named(tmp_path, vocabulary, record, message):
    with pytest.raises(InputError, match=message):
        build_task(_jsonl(tmp_path, record, {"prompt": "1+1=", "answer": "2"}), seed=0, vocabulary=vocabulary)


def test_the_built_in_characters_have_no_chat_template(tmp_path):
    config = _jsonl(tmp_path, {"prompt": [{"role": "user", "content": "1"}], "answer": "2"})
    with pytest.raises(InputError, match=r"line 1: prompt is a list of messages, .* set model\.path"):
        build_task(config, seed=0)
