"""Text and tokens.

Owns the vocabularies that a task may speak: characters, for policies built from sizes, and the tokenizer of a Hugging
Face directory, with its chat template and its ends. It promises that whatever it encodes has a token for every part. A
vocabulary can be written as files that Hugging Face reads. What is asked is `tasks.py`'s business.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from fsdp_async.errors import InputError

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = string.digits + string.ascii_lowercase + " >=+-*/.,"
TEXT_CHARACTERS = CHARACTERS + "".join(sorted({*string.ascii_uppercase, *string.punctuation, "\n"} - {*CHARACTERS}))
"""Printable ASCII and the end of a line. Shared characters have the same tokens."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
GENERATION_FILE = "generation_config.json"
NO_TOKEN = "�"
"""Stands in text for a row of the embedding that has no token."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


PromptText = str | tuple[Message, ...]
"""What is asked: text, or a conversation that the policy is to go on with."""


class Vocabulary(Protocol):
    """Text <-> token ids.

    All ids are below `size`. A response ends with `eos_token_id` or one of `stop_token_ids`; `pad_token_id` only fills.
    """

    @property
    def size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eos_token_id(self) -> int:
        """The end that right answers have."""
        ...

    @property
    def pad_token_id(self) -> int:
        """Filler."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Other ends that a response may have."""
        ...

    def encode_prompt(self, prompt: PromptText) -> tuple[int, ...]:
        """What the policy reads.

        Raises:
            InputError: a part has no token, or there is no way to write a conversation.
        """
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """What the policy is to write, without its end.

        Raises:
            InputError: a part has no token.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens without their end; other special tokens by their names."""
        ...

    @property
    def digest(self) -> str:
        """The same for two vocabularies that encode alike."""
        ...

    @property
    def generation_config(self) -> Any:
        """How Hugging Face should generate: at least the ends and the filler."""
        ...

    def save(self, directory: Path) -> None:
        """Write a Hugging Face tokenizer into `directory`."""
        ...


class CharacterVocabulary:
    """One token a character: 3 special tokens and `characters`."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, characters: str = CHARACTERS) -> None:
        self._characters = characters
        self._texts = (*SPECIAL_TOKENS, *characters)
        self._ids = {text: index for index, text in enumerate(self._texts)}
        self.size = len(self._texts)
        self.pad_token_id, self.eos_token_id = self._ids["<pad>"], self._ids["<eos>"]

    def encode_prompt(self, prompt: PromptText) -> tuple[int, ...]:
        """As `encode`; a conversation is refused."""
        if not isinstance(prompt, str):
            raise InputError(
                "is a list of messages, and the built-in characters have no chat template; write it as a text, or set "
                "model.path to a directory whose tokenizer has one"
            )
        return self.encode(prompt)

    def encode(self, text: str) -> tuple[int, ...]:
        """One id a character."""
        if unknown := set(text) - set(self._characters):
            raise InputError(f"has characters {sorted(unknown)} outside {self._characters!r}")
        return tuple(self._ids[character] for character in text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """One character a token."""
        return "".join(self._texts[token] for token in _without_end(token_ids, (self.eos_token_id,)))

    @property
    def digest(self) -> str:
        """Of the tokens in their order."""
        return hashlib.sha256(json.dumps(self._texts).encode()).hexdigest()

    @property
    def generation_config(self) -> Any:
        """Its end and its filler."""
        return GenerationConfig(eos_token_id=self.eos_token_id, pad_token_id=self.pad_token_id)

    def save(self, directory: Path) -> None:
        """Write the same vocabulary as a tokenizer of the tokenizers library."""
        tokenizer = Tokenizer(WordLevel(dict(self._ids), unk_token="<unk>"))
        tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # a dot would not match the end of a line
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ).save_pretrained(directory)


class DirectoryVocabulary:
    """The tokenizer of a Hugging Face directory.

    A prompt that is a text gets the special tokens that the tokenizer puts around a text, one that is a list of
    messages is written by the chat template, up to where the answer begins. Answers get none. The end of an answer is
    the tokenizer's eos; `generation_config.json` (without it `config.json`) may name more ends.

    Args:
        directory: holds the tokenizer's files.
        model_config: the transformers config beside it.

    Raises:
        InputError: no tokenizer, or one that cannot be read; no token that ends a response.
    """

    def __init__(self, directory: Path, model_config: Any) -> None:
        self._directory = directory
        self._tokenizer = _load_tokenizer(directory)
        self.generation_config = _load_generation_config(directory, model_config)
        ends = [
            i for i in (self._tokenizer.eos_token_id, *_listed(self.generation_config.eos_token_id)) if i is not None
        ]
        if not ends:
            raise InputError(
                f"model.path={directory}: neither the tokenizer nor {GENERATION_FILE} has an eos token, so no response "
                "could end; add eos_token to tokenizer_config.json"
            )
        self.eos_token_id = int(ends[0])
        self.stop_token_ids = tuple(sorted({*map(int, ends[1:])} - {self.eos_token_id}))
        pads = (self._tokenizer.pad_token_id, self.generation_config.pad_token_id, self.eos_token_id)
        self.pad_token_id = int(next(i for i in pads if i is not None))
        known = self._tokenizer.get_vocab()
        self._known = frozenset(known.values())
        self.size = 1 + max(*self._known, self.eos_token_id, self.pad_token_id, *self.stop_token_ids)

    def encode_prompt(self, prompt: PromptText) -> tuple[int, ...]:
        """By the chat template, or with the tokenizer's own special tokens."""
        if isinstance(prompt, str):
            ids = self._checked(self._tokenizer.encode(prompt), prompt)
        else:
            ids = self._checked(self._apply_template(prompt), prompt)
        if isinstance(prompt, str) and ids[-1] == self.eos_token_id:
            raise InputError(
                f"ends with the eos token {self.eos_token_id}, after which nothing is to be said; have the tokenizer "
                f"of {self._directory} add none (add_eos_token)"
            )
        return ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Without special tokens."""
        return self._checked(self._tokenizer.encode(text, add_special_tokens=False), text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """As the tokenizer joins them; ids without a token are shown as `NO_TOKEN`."""
        ids = _without_end(token_ids, (self.eos_token_id, *self.stop_token_ids))
        return "".join(
            self._tokenizer.decode([*run], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if is_known
            else NO_TOKEN * len([*run])
            for is_known, run in groupby(ids, key=self._known.__contains__)
        )

    @property
    def digest(self) -> str:
        """Of all that decides how text is encoded, and of the ends."""
        rules = self._tokenizer.backend_tokenizer.to_str() if self._tokenizer.is_fast else None
        ends = [self.eos_token_id, self.pad_token_id, *self.stop_token_ids]
        facts = [sorted(self._tokenizer.get_vocab().items()), rules, ends, self._tokenizer.chat_template]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def save(self, directory: Path) -> None:
        """Write the same tokenizer."""
        self._tokenizer.save_pretrained(directory)

    def _apply_template(self, messages: tuple[Message, ...]) -> Sequence[int]:
        if self._tokenizer.chat_template is None:
            raise InputError(
                f"is a list of messages, and the tokenizer of {self._directory} has no chat template; write it as a "
                "text, or add chat_template.jinja to the directory"
            )
        try:
            ids: Sequence[int] = self._tokenizer.apply_chat_template(
                [asdict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise InputError(f"is refused by the chat template of {self._directory}: {error}") from error
        return ids

    def _checked(self, ids: Sequence[int], text: PromptText) -> tuple[int, ...]:
        if not ids:
            raise InputError(f"has no tokens in the vocabulary of {self._directory}")
        if (unknown := self._tokenizer.unk_token_id) is not None and unknown in ids:
            raise InputError(
                f"{text!r:.80} has a part without a token in the vocabulary of {self._directory}, which reads it as "
                f"{self._tokenizer.unk_token}; use another tokenizer, or leave that part out"
            )
        return tuple(map(int, ids))


def _load_tokenizer(directory: Path) -> Any:
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        # transformers would make up an empty one.
        raise InputError(
            f"model.path={directory} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); save one there with "
            "tokenizer.save_pretrained"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # tokenizers raises Exception itself for a file that it cannot parse.
        raise InputError(
            f"model.path={directory}: its tokenizer cannot be read ({error}); save it again with "
            "tokenizer.save_pretrained"
        ) from error
    for how in ("is_local", "local_files_only"):
        # How it was read here would be written with it.
        tokenizer.init_kwargs.pop(how, None)
    return tokenizer


def _load_generation_config(directory: Path, model_config: Any) -> Any:
    if not (directory / GENERATION_FILE).is_file():
        return GenerationConfig.from_model_config(model_config)
    try:
        return GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise InputError(
            f"model.path={directory}: {GENERATION_FILE} cannot be read ({error}); mend it or take it away"
        ) from error


def _without_end(token_ids: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    return token_ids[:-1] if len(token_ids) and token_ids[-1] in ends else token_ids


def _listed(value: int | Sequence[int] | None) -> Sequence[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def prompt_text(value: object) -> PromptText:
    """A prompt as JSON holds it: a text, or a list of {"role": str, "content": str}.

    Raises:
        InputError: it is neither.
    """
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return tuple(_message(index, item) for index, item in enumerate(value))
    raise InputError(f"={value!r:.80} must be a non-empty string, or a list of messages")


def _message(index: int, item: object) -> Message:
    if not isinstance(item, Mapping) or item.keys() != {"role", "content"}:
        raise InputError(f"[{index}]={item!r:.80} must have exactly the keys role and content")
    for key in ("role", "content"):
        if not isinstance(item[key], str) or not item[key]:
            raise InputError(f"[{index}].{key}={item[key]!r:.80} must be a non-empty string")
    return Message(item["role"], item["content"])
