"""Documents of JSON, msgpack, Avro or Protobuf: values at paths, as exact text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from feeds.codec import MalformedRecord
from feeds.decimals import BinaryFloat
from feeds.file_format import Ref
from feeds.number_texts import JsonNumber

ABSENT = object()
"""There is no value."""
_MAX_DIGITS = 1000
"""Of an integer; Python refuses to print much longer ones."""


@dataclass(frozen=True, slots=True)
class Document:
    """A row: see `feeds.file_rows.Row`. ``value``: the document itself, or an element of an array in it."""

    line: int
    received: int
    document: Any
    value: Any
    width = 0

    def get(self, ref: Ref) -> str | None:
        """The value at a path as text; None where there is none, and of arrays and objects."""
        return text_of(ref, self._at(str(ref)))

    def is_null(self, ref: Ref) -> bool:
        """Whether null stands at a path."""
        return self._at(str(ref)) is None

    def elements(self, ref: str, of: str = "") -> Sequence["Document"]:
        """See `feeds.file_rows.Row`."""
        found = self._at(ref)
        if of and (found is None or found is ABSENT):
            return []
        if not isinstance(found, list):
            raise MalformedRecord("type", f"{of or 'each'}: there is no array at {ref}")
        return [Document(self.line, self.received, self.document, element) for element in found]

    def _at(self, ref: str) -> Any:
        from_document, names = _path(ref)
        return at_names(self.document if from_document else self.value, names)


@lru_cache(maxsize=4096)
def _path(ref: str) -> tuple[bool, tuple[str, ...]]:
    """Whether a path begins at the whole document, and its names."""
    if ref == "@":
        return False, ()
    first, *more = ref.split(".")
    return (True, tuple(more)) if first == "$" else (False, (first, *more))


def at_names(value: Any, names: Iterable[str]) -> Any:
    """What stands in a value behind these names, one in the other; `ABSENT` if there is none."""
    for name in names:
        value = value.get(name, ABSENT) if type(value) is dict else member(value, name)
    return value


def member(value: Any, name: str) -> Any:
    """A member of an object, or an element of an array; `ABSENT` if there is none."""
    if isinstance(value, dict):
        return value.get(name, ABSENT)
    if isinstance(value, list):
        return value[int(name)] if name.isdecimal() and int(name) < len(value) else ABSENT
    return ABSENT


def text_of(ref: Ref, value: Any) -> str | None:
    """A value as exact text. Raises MalformedRecord: of a type that has none."""
    if isinstance(value, str):
        return value
    if value is None or value is ABSENT or isinstance(value, dict | list):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if value.bit_length() > 3 * _MAX_DIGITS:
            raise MalformedRecord("type", f"{ref}: an integer of more than {_MAX_DIGITS} digits")
        return JsonNumber(value)
    if isinstance(value, float):
        return BinaryFloat(repr(value))
    if isinstance(value, Decimal):
        return JsonNumber(f"{value:f}")
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    raise MalformedRecord("type", f"{ref}: a value of type {type(value).__name__} is neither number nor text")
