"""Every setting there is, read from the dataclasses that hold them.

Owns the walk over a config: sections, what their docstrings say, keys, defaults and allowed values. The command line's
help and `docs/configuration.md` are two renderings of it, so that neither can know a key that the other does not.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any, Literal

from fsdp_async.config import Config

ATTRIBUTES = "Attributes:"
INDENT = "    "
WORDS = {bool: "true, false", int: "an integer", float: "a number", str: "a text", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One setting.

    Attributes:
        name: inside its section.
        default: as it is written on the command line.
        values: what may stand there, in words.
        choices: the words it may be; empty where there are others.
        meaning: what the section's docstring says of it by name; may be empty.
    """

    name: str
    default: str
    values: str
    choices: tuple[str, ...]
    meaning: str


@dataclass(frozen=True)
class Section:
    """Keys that belong together.

    Attributes:
        name: of its dataclass.
        paths: where the section stands in a config; several where one form is used in several places.
        text: its docstring without what is said of single keys.
        keys: in the order in which they are declared.
    """

    name: str
    paths: tuple[str, ...]
    text: str
    keys: tuple[Key, ...]


def sections() -> list[Section]:
    """All sections of a `Config`; the parts that a section is made of come after it."""
    found: dict[type, list[str]] = {}
    for name, annotation in typing.get_type_hints(Config).items():
        _collect(annotation, name, found)
    return [_section(kind, tuple(paths)) for kind, paths in found.items()]


def written(value: Any) -> str:
    """A value as Hydra and YAML read it: null, true, 0.1, a word, [...], {...}."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(value)


def _collect(annotation: Any, path: str, found: dict[type, list[str]]) -> None:
    for part, suffix in _parts(annotation):
        found.setdefault(part, []).append(path + suffix)
        for name, hint in typing.get_type_hints(part).items():
            _collect(hint, f"{path}{suffix}.{name}", found)


def _parts(annotation: Any) -> Iterator[tuple[type, str]]:
    """Dataclasses that `annotation` is made of, and what stands behind the path to one."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        yield annotation, ""
    for argument in typing.get_args(annotation):
        is_sequence = typing.get_origin(annotation) is tuple
        yield from ((part, "[i]" + suffix if is_sequence else suffix) for part, suffix in _parts(argument))


def _section(kind: type, paths: tuple[str, ...]) -> Section:
    text, meanings = _split(cleandoc(kind.__doc__ or ""))
    hints = typing.get_type_hints(kind)
    keys = []
    for field in dataclasses.fields(kind):
        annotation = hints[field.name]
        is_choice = typing.get_origin(annotation) is Literal
        choices = tuple(map(str, typing.get_args(annotation))) if is_choice else ()
        meaning = meanings.get(field.name, "")
        keys.append(Key(field.name, written(_default(field)), _in_words(annotation), choices, meaning))
    return Section(kind.__name__, paths, text, tuple(keys))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _in_words(annotation: Any) -> str:
    if annotation in WORDS:
        return WORDS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_in_words, arguments))
    if origin is tuple:
        return f"a list of {_in_words(arguments[0])}"
    if dataclasses.is_dataclass(annotation):
        return f"`{getattr(annotation, '__name__', annotation)}`"
    return "a mapping"


def _split(docstring: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring, and what its `Attributes:` say of each name."""
    before, _, block = docstring.partition(f"\n{ATTRIBUTES}\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in block.splitlines():
        if line.startswith(INDENT) and not line.startswith(INDENT * 2):
            listed, _, line = line.partition(":")
            names = [name.strip() for name in listed.split(",")]
        for name in names:
            meanings[name] = f"{meanings.get(name, '')} {line.strip()}".strip()
    return before.strip(), meanings
