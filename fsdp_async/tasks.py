"""Prompts.

Owns the tasks (built-in sorting of digits, a JSONL file, a dataset of reasoning-gym) and the deterministic endless
stream of training prompts, in whatever vocabulary the policy has (`tokenization.py`). Evaluation prompts are fixed and
never appear in the stream. It scores nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from fsdp_async.backends import resolve_backend
from fsdp_async.checks import require_choice
from fsdp_async.errors import ConfigError, InputError
from fsdp_async.tokenization import (
    CHARACTERS,
    TEXT_CHARACTERS,
    CharacterVocabulary,
    PromptText,
    Vocabulary,
    prompt_text,
)
from fsdp_async.types import Prompt

MAX_DIGITS = 6
"""`sort_digits` lists all its items (10 to the power of this many), which takes seconds here and ever longer above."""
TaskKind = Literal["sort_digits", "jsonl", "reasoning_gym"]
Pair = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is asked.

    `sort_digits`: "4927>" wants "2479". `jsonl`: each line of `path` is {"prompt": str, "answer": str}; the last
    `eval_items` lines are for evaluation. `reasoning_gym`: its dataset `name` with the options `dataset` ({size: 1000,
    seed: 0} and what else that dataset knows), each question once; the last `eval_items` are for evaluation. The
    built-in characters are digits, lower-case letters, space and >=+-*/., and, with `reasoning_gym`, all of ASCII. With
    model.path the tokenizer there decides, and a prompt of `jsonl` may be a list of {"role": str, "content": str},
    which its chat template writes.
    """

    kind: TaskKind = "sort_digits"
    num_digits: int = 4
    path: str | None = None
    name: str | None = None
    dataset: Mapping[str, Any] | None = None
    eval_items: int = 512
    max_prompt_tokens: int = 16

    def __post_init__(self) -> None:
        require_choice("task.kind", self.kind, get_args(TaskKind))
        if self.num_digits < 1 or self.eval_items < 1 or self.max_prompt_tokens < 1:
            raise ConfigError(
                f"task.num_digits={self.num_digits}, eval_items={self.eval_items}, "
                f"max_prompt_tokens={self.max_prompt_tokens}: each must be at least 1"
            )
        if self.kind == "jsonl":
            self._check_jsonl()
        elif self.kind == "sort_digits":
            self._check_sort_digits()
        elif self.name is None:
            raise ConfigError(
                "task.kind=reasoning_gym needs task.name, a dataset's name (basic_arithmetic, for instance)"
            )
        self._refuse_inert()

    def _refuse_inert(self) -> None:
        """An option of another kind."""
        kinds = {"num_digits": "sort_digits", "path": "jsonl", "name": "reasoning_gym", "dataset": "reasoning_gym"}
        for name, kind in kinds.items():
            if kind != self.kind and (value := getattr(self, name)) != getattr(TaskConfig, name):
                raise ConfigError(
                    f"task.{name}={value} has no effect with task.kind={self.kind}; leave it out, or set "
                    f"task.kind={kind}"
                )

    def _check_sort_digits(self) -> None:
        if self.num_digits > MAX_DIGITS:
            raise ConfigError(
                f"task.num_digits={self.num_digits}: all prompts are listed, so at most {MAX_DIGITS}; for longer ones "
                "write a file and set task.kind=jsonl"
            )
        if self.num_digits + 1 > self.max_prompt_tokens:
            raise ConfigError(
                f"task.num_digits={self.num_digits} makes prompts of {self.num_digits + 1} tokens, above "
                f"task.max_prompt_tokens={self.max_prompt_tokens}; raise the latter"
            )
        if self.eval_items > 10**self.num_digits // 2:
            raise ConfigError(
                f"task.eval_items={self.eval_items}: {self.num_digits} digits make only {10**self.num_digits} prompts, "
                "and training needs at least half of them"
            )

    def _check_jsonl(self) -> None:
        if self.path is None:
            raise ConfigError('task.kind=jsonl needs task.path, a file of lines {"prompt": ..., "answer": ...}')
        if not Path(self.path).is_file():
            raise ConfigError(f"task.path={self.path}: no regular file; give an existing JSONL file")


@dataclass(frozen=True)
class Item:
    """One question in text; `prompt_id` is stable over runs, `info` is for reward functions."""

    prompt_id: str
    prompt: PromptText
    answer: str
    info: Mapping[str, Any] = field(default_factory=dict)


Located = tuple[str, Item]
"""An item and where it comes from, for messages."""


class Task:
    """A finite set of items, split into training and evaluation; built by `build_task`."""

    def __init__(
        self, name: str, training: list[Item], evaluation: list[Item], *, seed: int, vocabulary: Vocabulary
    ) -> None:
        self.name = name
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self.pad_token_id = vocabulary.pad_token_id
        self.eos_token_id = vocabulary.eos_token_id
        self.stop_token_ids = vocabulary.stop_token_ids
        self._training = training
        self._evaluation = evaluation
        self._seed = seed
        self._position = 0

    def prompts(self) -> Iterator[Prompt]:
        """Training prompts without end: every epoch holds each item once, in an order drawn from seed and epoch."""
        while True:
            epoch, offset = divmod(self._position, len(self._training))
            order = list(range(len(self._training)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            for index in order[offset:]:
                self._position += 1
                yield self._prompt(self._training[index], epoch)

    def check_answers_fit(self, max_response_tokens: int) -> None:
        """Refuse answers that could never be given in full.

        Raises:
            InputError: an answer, with its EOS, is longer than `max_response_tokens`; names the first one.
        """
        for item in (*self._training, *self._evaluation):
            if (num_tokens := len(self._answer_ids(item))) > max_response_tokens:
                raise InputError(
                    f"{item.prompt_id}: the answer {item.answer!r:.80} takes {num_tokens} tokens with its end, above "
                    f"rollout.max_response_tokens={max_response_tokens}; no response could ever be right: raise it"
                )

    def eval_prompts(self) -> list[Prompt]:
        """The fixed evaluation prompts, in a fixed order."""
        return [self._prompt(item, 0) for item in self._evaluation]

    def sft_pairs(self, num: int, seed: int) -> list[Pair]:
        """`num` pairs (prompt tokens, answer tokens with EOS), drawn from the training items with replacement."""
        generator = random.Random(f"sft/{seed}")
        return [
            (self.vocabulary.encode_prompt(item.prompt), self._answer_ids(item))
            for item in (generator.choice(self._training) for _ in range(num))
        ]

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a response that says `text`, without its end."""
        return self.vocabulary.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without its end; other special tokens by their names."""
        return self.vocabulary.decode(token_ids)

    def scoring_info(self, prompt_id: str) -> Mapping[str, Any]:
        """What a reward function may know of a prompt: `answer`, and with reasoning-gym `dataset`, `options`, `entry`.

        Raises:
            InputError: no item of this task has that id.
        """
        if prompt_id not in self._by_id:
            raise InputError(f"no item of task {self.name} is called {prompt_id!r}; score prompts of this task only")
        item = self._by_id[prompt_id]
        return {"answer": item.answer, **item.info}

    @cached_property
    def _by_id(self) -> dict[str, Item]:
        return {item.prompt_id: item for item in (*self._training, *self._evaluation)}

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; iterators made before are not moved."""
        self._position = int(state["position"])

    def _answer_ids(self, item: Item) -> tuple[int, ...]:
        return (*self.encode(item.answer), self.eos_token_id)

    def _prompt(self, item: Item, epoch: int) -> Prompt:
        info = {"answer_ids": self._answer_ids(item)}
        return Prompt(item.prompt_id, self.vocabulary.encode_prompt(item.prompt), self.name, info, epoch)


def build_task(config: TaskConfig, *, seed: int, vocabulary: Vocabulary | None = None) -> Task:
    """The configured task; `seed` orders the stream and does not change which items are for evaluation.

    `vocabulary` None takes the built-in characters for that kind of task.

    Raises:
        InputError: a malformed line of a JSONL file, named with its number; or a prompt of that file that is both for
            training and for evaluation; or an item that has a part without a token, no answer, or too long a prompt.
        ConfigError: reasoning-gym is not installed, or does not know the dataset or its options.
    """
    vocabulary = vocabulary or CharacterVocabulary(_characters(config))
    located = {"sort_digits": _sort_items, "jsonl": _jsonl_items, "reasoning_gym": _gym_items}[config.kind](config)
    items: list[Item] = []
    seen: set[PromptText] = set()
    for where, item in located:
        _check_item(item, where, vocabulary, config.max_prompt_tokens)
        # Each question of a dataset once: a small one repeats itself. In a file it is the user's weighting.
        if config.kind != "reasoning_gym" or item.prompt not in seen:
            items.append(item)
            seen.add(item.prompt)
    evaluation, training = items[-config.eval_items :], items[: -config.eval_items]
    where = f"task.name={config.name}" if config.kind == "reasoning_gym" else f"task.path={config.path}"
    if not training:
        more = "raise task.dataset.size" if config.kind == "reasoning_gym" else "add lines"
        raise InputError(
            f"{where} holds {len(items)} items, of which task.eval_items={config.eval_items} are for "
            f"evaluation; nothing is left to train on: {more}, or lower task.eval_items"
        )
    _refuse_overlap(training, evaluation, where)
    return Task(config.kind, training, evaluation, seed=seed, vocabulary=vocabulary)


def _characters(config: TaskConfig) -> str:
    return TEXT_CHARACTERS if config.kind == "reasoning_gym" else CHARACTERS


def _refuse_overlap(training: list[Item], evaluation: list[Item], where: str) -> None:
    """A prompt trained on says nothing about accuracy; the same prompt twice in training is the user's weighting."""
    trained = {item.prompt: item.prompt_id for item in training}
    answers: dict[PromptText, Item] = {}
    for item in evaluation:
        if (other := answers.setdefault(item.prompt, item)).answer != item.answer:
            raise InputError(
                f"{where}: {other.prompt_id} and {item.prompt_id} are for evaluation, ask the same, "
                f"{item.prompt!r:.80}, and want different answers, so one can never be right; remove one"
            )
        if item.prompt in trained:
            raise InputError(
                f"{where}: {trained[item.prompt]} and {item.prompt_id} ask the same, {item.prompt!r:.80}, and the "
                "latter is for evaluation; remove one, or move them to the same side of task.eval_items"
            )


def _sort_items(config: TaskConfig) -> Iterator[Located]:
    """All digit strings, in one fixed shuffled order."""
    numbers = [f"{number:0{config.num_digits}d}" for number in range(10**config.num_digits)]
    random.Random("sort_digits").shuffle(numbers)
    for digits in numbers:
        yield f"sort/{digits}", Item(f"sort/{digits}", f"{digits}>", "".join(sorted(digits)))


def _jsonl_items(config: TaskConfig) -> Iterator[Located]:
    assert config.path is not None
    try:
        # Lines end in \n alone: str.splitlines would also cut at characters that JSON allows inside a string.
        lines = Path(config.path).read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"task.path={config.path}: {error.strerror}; give a JSONL file that can be read") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{config.path}, line {number}"
            yield where, _jsonl_item(line, where, f"jsonl/{number}")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(record := dict(pairs)) != len(pairs):
        raise ValueError(f"a key comes twice: {[key for key, _ in pairs]}")
    return record


def _jsonl_item(line: bytes, where: str, prompt_id: str) -> Item:
    try:
        record = json.loads(line.decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested without end
        raise InputError(f"{where}: not JSON ({error}); each line must be one object") from error
    if not isinstance(record, dict) or record.keys() != {"prompt", "answer"}:
        raise InputError(f"{where}: need exactly the keys prompt and answer, got {record!r:.80}")
    try:
        prompt = prompt_text(record["prompt"])
    except InputError as error:
        raise InputError(f"{where}: prompt{error}") from error
    return Item(prompt_id, prompt, record["answer"])


def _check_item(item: Item, where: str, vocabulary: Vocabulary, max_prompt_tokens: int) -> None:
    for key, text in (("prompt", item.prompt), ("answer", item.answer)):
        if not text or not isinstance(text, str | tuple):
            raise InputError(f"{where}: {key}={text!r} must be a non-empty string")
    try:
        num_tokens = len(vocabulary.encode_prompt(item.prompt))
    except InputError as error:
        raise InputError(f"{where}: prompt {error}") from error
    try:
        vocabulary.encode(item.answer)
    except InputError as error:
        raise InputError(f"{where}: answer {error}") from error
    if num_tokens > max_prompt_tokens:
        raise InputError(
            f"{where}: the prompt has {num_tokens} tokens, above task.max_prompt_tokens="
            f"{max_prompt_tokens}; raise it or shorten the prompt"
        )


def _gym_items(config: TaskConfig) -> Iterator[Located]:
    name, options = str(config.name), dict(config.dataset or {})
    try:
        entries = list(resolve_backend("reasoning_gym").entries(name, options))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"task.name={name}, task.dataset={options}: {error}") from error
    for index, entry in enumerate(entries):
        info = {"dataset": name, "options": options, "entry": entry}
        yield f"{name}, entry {index}", Item(f"{name}/{index}", entry["question"], entry["answer"], info)
