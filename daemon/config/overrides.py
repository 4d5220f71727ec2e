"""Overrides of the file's values. They follow the configuration's types, so an unknown key is an error."""

import copy
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from daemon.config.errors import ConfigError
from daemon.config.former_keys import KEYS, plain


class Layered:
    """The raw values of the file with overrides on top, and the origin of each override (by dotted key)."""

    def __init__(self, config: type[msgspec.Struct], file_values: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = copy.deepcopy(dict(file_values))
        self.origins: dict[str, str] = {}
        self._type = inspect.type_info(config)

    def set(self, key: str, value: object, origin: str) -> None:
        """Set the dotted `key`; text is parsed as the key's type. Raises ConfigError."""
        parts = key.split(".")
        node: Any = self.values
        kind: inspect.Type = self._type
        for depth, part in enumerate(parts):
            here = ".".join(parts[:depth])
            kind = _child(kind, part, here, origin)
            slot = _slot(node, part, here, origin)
            if depth == len(parts) - 1:
                node[slot] = _read(kind, value, key, origin) if isinstance(value, str) else value
            else:
                node = node.setdefault(slot, {}) if isinstance(node, dict) else node[slot]
                if not isinstance(node, dict | list):  # the file may hold anything there
                    at = ".".join(parts[: depth + 1])
                    raise ConfigError.of(at, f"expected a table or a list, got {node!r}")
        self.origins[key] = origin


def bare(kind: inspect.Type) -> inspect.Type:
    """The type without its description, without `None` and without `words`."""
    kinds = [each for each in _alternatives(kind) if not isinstance(each, inspect.NoneType)]
    if len(kinds) > 1:
        kinds = [each for each in kinds if not isinstance(each, inspect.LiteralType)]
    (found,) = kinds
    return found


def words(kind: inspect.Type) -> tuple[str, ...]:
    """What a key takes beside values of its `bare` type, such as `auto`."""
    found = bare(kind)
    literals = (each for each in _alternatives(kind) if isinstance(each, inspect.LiteralType))
    return tuple(str(value) for each in literals if each is not found for value in each.values)


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """The types of a union, or the type itself, without descriptions."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if not isinstance(kind, inspect.UnionType):
        return [kind]
    return [found for each in kind.types for found in _alternatives(each)]


def _child(kind: inspect.Type, part: str, here: str, origin: str) -> inspect.Type:
    """The type of the key `part` inside a value of type `kind`."""
    kind = bare(kind)
    if isinstance(kind, inspect.VarTupleType):
        if not part.isdecimal():
            raise _problem(f"{here}.{part}", f"{here} is a list: name its element by number", origin)
        return kind.item_type
    fields = fields_of(kind)
    if part not in fields:
        key = f"{here}.{part}" if here else part
        raise _problem(key, no_such_key(key, fields), origin)
    return fields[part]


def fields_of(kind: inspect.Type) -> dict[str, inspect.Type]:
    """The keys of a table, with their types; none of anything else."""
    kind = bare(kind)
    return {f.encode_name: f.type for f in kind.fields} if isinstance(kind, inspect.StructType) else {}


def no_such_key(key: str, keys: Iterable[str]) -> str:
    """What is said of a dotted key whose last part is none of ``keys``."""
    if instead := KEYS.get(plain(key)):
        return f"there is no such key any more: {instead}"
    close = difflib.get_close_matches(key.rpartition(".")[2], keys, n=1)
    return f"there is no such key{f'; did you mean {close[0]}?' if close else ''}"


def type_at(kind: type, steps: Iterable[str]) -> inspect.Type:
    """The type of what these keys and indices lead to, which exists."""
    found = inspect.type_info(kind)
    for step in steps:
        found = _child(found, step, "", "")
    return found


def _slot(node: Any, part: str, here: str, origin: str) -> Any:
    if isinstance(node, dict):
        return part
    if int(part) >= len(node):
        raise _problem(f"{here}.{part}", f"{here} has only {len(node)} elements", origin)
    return int(part)


def _read(kind: inspect.Type, text: str, key: str, origin: str) -> object:
    """Text stays text where the type is text; a list may be JSON or comma separated; all else is JSON."""
    if text in words(kind):
        return text
    kind = bare(kind)
    if isinstance(kind, inspect.StrType | inspect.LiteralType | inspect.CustomType):
        return text
    if isinstance(kind, inspect.VarTupleType) and not text.lstrip().startswith("["):
        if isinstance(bare(kind.item_type), inspect.StrType):
            return [item.strip() for item in text.split(",")] if text else []
        raise _problem(key, "expected a JSON list", origin)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the second: brackets nested a thousand deep
        raise _problem(key, f"cannot read {text!r}", origin) from None


def _problem(key: str, message: str, origin: str) -> ConfigError:
    return ConfigError.of(key, f"{message} (from {origin})")
