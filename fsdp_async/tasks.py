"""Prompts.

Owns the tasks (built-in sorting of digits, a JSONL file, a dataset of reasoning-gym), their character tokenizer and the
deterministic endless stream of training prompts. Evaluation prompts are fixed and never appear in the stream. It
scores nothing.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from fsdp_async.backends import resolve_backend
from fsdp_async.checks import require_choice
from fsdp_async.errors import ConfigError, InputError
from fsdp_async.types import Prompt

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = string.digits + string.ascii_lowercase + " >=+-*/.,"
TEXT_CHARACTERS = CHARACTERS + "".join(sorted({*string.ascii_uppercase, *string.punctuation, "\n"} - {*CHARACTERS}))
"""What `reasoning_gym` may ask in: printable ASCII and the end of a line. Shared characters have the same tokens."""
MAX_DIGITS = 6
"""`sort_digits` lists all its items (10 to the power of this many), which takes seconds here and ever longer above."""
TaskKind = Literal["sort_digits", "jsonl", "reasoning_gym"]
Pair = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is asked.

    `sort_digits`: "4927>" wants "2479". `jsonl`: each line of `path` is {"prompt": str, "answer": str} over digits,
    lower-case letters, space and >=+-*/.,; the last `eval_items` lines are for evaluation. `reasoning_gym`: its dataset
    `name` with the options `dataset` ({size: 1000, seed: 0} and what else that dataset knows), each question once; the
    last `eval_items` are for evaluation. Questions and answers must be ASCII.
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


def build_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token a character: 3 special tokens and 45 characters, or `characters`."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # a dot would not match the end of a line
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@dataclass(frozen=True)
class Item:
    """One question in text; `prompt_id` is stable over runs, `info` is for reward functions."""

    prompt_id: str
    prompt: str
    answer: str
    info: Mapping[str, Any] = field(default_factory=dict)


class Task:
    """A finite set of items, split into training and evaluation; built by `build_task`."""

    def __init__(
        self, name: str, training: list[Item], evaluation: list[Item], *, seed: int, characters: str = CHARACTERS
    ) -> None:
        self.name = name
        self.tokenizer = build_tokenizer(characters)
        self._texts = (*SPECIAL_TOKENS, *characters)
        self.vocab_size = len(self.tokenizer)
        self.pad_token_id = int(self.tokenizer.convert_tokens_to_ids("<pad>"))
        self.eos_token_id = int(self.tokenizer.convert_tokens_to_ids("<eos>"))
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
            if (num_tokens := len(item.answer) + 1) > max_response_tokens:
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
            (self.encode(item.prompt), self._answer_ids(item))
            for item in (generator.choice(self._training) for _ in range(num))
        ]

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, one a character."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without its end, one character a token; other special tokens by their names."""
        stop = len(token_ids) - (token_ids[-1:] == (self.eos_token_id,))
        return "".join(self._texts[token] for token in token_ids[:stop])

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
        return Prompt(item.prompt_id, self.encode(item.prompt), self.name, info, epoch)


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """The configured task; `seed` orders the stream and does not change which items are for evaluation.

    Raises:
        InputError: a malformed line of a JSONL file, named with its number; or a prompt of that file that is both for
            training and for evaluation; or an entry of a dataset that has characters without a token, or no answer.
        ConfigError: reasoning-gym is not installed, or does not know the dataset or its options.
    """
    items = {"sort_digits": _sort_items, "jsonl": _jsonl_items, "reasoning_gym": _gym_items}[config.kind](config)
    evaluation, training = items[-config.eval_items :], items[: -config.eval_items]
    where = f"task.name={config.name}" if config.kind == "reasoning_gym" else f"task.path={config.path}"
    if not training:
        more = "raise task.dataset.size" if config.kind == "reasoning_gym" else "add lines"
        raise InputError(
            f"{where} holds {len(items)} items, of which task.eval_items={config.eval_items} are for "
            f"evaluation; nothing is left to train on: {more}, or lower task.eval_items"
        )
    _refuse_overlap(training, evaluation, where)
    return Task(config.kind, training, evaluation, seed=seed, characters=_characters(config))


def _characters(config: TaskConfig) -> str:
    return TEXT_CHARACTERS if config.kind == "reasoning_gym" else CHARACTERS


def _refuse_overlap(training: list[Item], evaluation: list[Item], where: str) -> None:
    """A prompt trained on says nothing about accuracy; the same prompt twice in training is the user's weighting."""
    trained = {item.prompt: item.prompt_id for item in training}
    answers: dict[str, Item] = {}
    for item in evaluation:
        if (other := answers.setdefault(item.prompt, item)).answer != item.answer:
            raise InputError(
                f"{where}: {other.prompt_id} and {item.prompt_id} are for evaluation, ask the same, "
                f"{item.prompt!r:.80}, and want different answers, so one can never be right; remove one"
            )
        if item.prompt in trained:
            raise InputError(
                f"{where}: {trained[item.prompt]} and {item.prompt_id} ask the same, {item.prompt!r}, and the latter "
                "is for evaluation; remove one, or move them to the same side of task.eval_items"
            )


def _sort_items(config: TaskConfig) -> list[Item]:
    """All digit strings, in one fixed shuffled order."""
    numbers = [f"{number:0{config.num_digits}d}" for number in range(10**config.num_digits)]
    random.Random("sort_digits").shuffle(numbers)
    return [Item(f"sort/{digits}", f"{digits}>", "".join(sorted(digits))) for digits in numbers]


def _jsonl_items(config: TaskConfig) -> list[Item]:
    assert config.path is not None
    try:
        # Lines end in \n alone: str.splitlines would also cut at characters that JSON allows inside a string.
        lines = Path(config.path).read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"task.path={config.path}: {error.strerror}; give a JSONL file that can be read") from error
    items = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            items.append(
                _jsonl_item(line, f"{config.path}, line {number}", f"jsonl/{number}", config.max_prompt_tokens)
            )
    return items


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(record := dict(pairs)) != len(pairs):
        raise ValueError(f"a key comes twice: {[key for key, _ in pairs]}")
    return record


def _jsonl_item(line: bytes, where: str, prompt_id: str, max_prompt_tokens: int) -> Item:
    try:
        record = json.loads(line.decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested without end
        raise InputError(f"{where}: not JSON ({error}); each line must be one object") from error
    if not isinstance(record, dict) or record.keys() != {"prompt", "answer"}:
        raise InputError(f"{where}: need exactly the keys prompt and answer, got {record!r:.80}")
    return _checked_item(Item(prompt_id, record["prompt"], record["answer"]), where, CHARACTERS, max_prompt_tokens)


def _checked_item(item: Item, where: str, characters: str, max_prompt_tokens: int) -> Item:
    for key, text in (("prompt", item.prompt), ("answer", item.answer)):
        if not isinstance(text, str) or not text:
            raise InputError(f"{where}: {key}={text!r} must be a non-empty string")
        if unknown := set(text) - set(characters):
            raise InputError(f"{where}: {key} has characters {sorted(unknown)} outside {characters!r}")
    if len(item.prompt) > max_prompt_tokens:
        raise InputError(
            f"{where}: the prompt has {len(item.prompt)} tokens, above task.max_prompt_tokens="
            f"{max_prompt_tokens}; raise it or shorten the prompt"
        )
    return item


def _gym_items(config: TaskConfig) -> list[Item]:
    """Each question of the dataset once, in its order: a small one repeats itself."""
    name, options = str(config.name), dict(config.dataset or {})
    try:
        entries = list(resolve_backend("reasoning_gym").entries(name, options))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"task.name={name}, task.dataset={options}: {error}") from error
    items: dict[str, Item] = {}
    for index, entry in enumerate(entries):
        info = {"dataset": name, "options": options, "entry": entry}
        item = Item(f"{name}/{index}", entry["question"], entry["answer"], info)
        _checked_item(item, f"{name}, entry {index}", TEXT_CHARACTERS, config.max_prompt_tokens)
        items.setdefault(item.prompt, item)
    return list(items.values())
