"""Constrained text: one of several choices, or JSON of a schema of choices and numbers.

A schema becomes a sequence of parts, each one of several texts or a number. After every token the grammar
names the tokens that may follow: those whose bytes go on with some part. Text of any content has no part, so
a schema with it is refused.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, takewhile
from typing import Any

import msgspec

from engine.model.vocabulary import Vocabulary

MAX_CHOICES = 1024
MAX_PARTS = 256
MAX_SCHEMA_BYTES = 1 << 14
"""Longest schema, as JSON: other requests wait while it is read."""
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$schema", "$id", "$comment"})
_NUMBER = re.compile(rb"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,9})?")
_NUMBER_BEGUN = re.compile(rb"-?((0|[1-9][0-9]{0,8})(\.[0-9]{0,9})?)?")
_INTEGER = re.compile(rb"-?(0|[1-9][0-9]{0,8})")
_INTEGER_BEGUN = re.compile(rb"-?(0|[1-9][0-9]{0,8})?")


class BadSchema(ValueError):
    """A schema that no grammar can keep; the message says where and why."""


@dataclass(frozen=True)
class OneOf:
    """One of these texts, as bytes, in their order."""

    texts: tuple[bytes, ...]

    @classmethod
    def of(cls, texts: Iterable[str]) -> OneOf:
        """Of texts in any order."""
        return cls(tuple(sorted({text.encode() for text in texts})))

    def begun(self, written: bytes) -> bool:
        """Whether ``written`` begins one."""
        at = bisect_left(self.texts, written)
        return at < len(self.texts) and self.texts[at].startswith(written)

    def done(self, written: bytes) -> bool:
        """Whether ``written`` is one."""
        at = bisect_left(self.texts, written)
        return at < len(self.texts) and self.texts[at] == written

    @property
    def bytes(self) -> frozenset[int]:
        """The bytes that it may take."""
        return frozenset(b"".join(self.texts))


@dataclass(frozen=True)
class Number:
    """A JSON number with at most nine digits on either side of the point, or an integer."""

    integer: bool = False

    def begun(self, written: bytes) -> bool:
        """Whether ``written`` begins one."""
        return (_INTEGER_BEGUN if self.integer else _NUMBER_BEGUN).fullmatch(written) is not None

    def done(self, written: bytes) -> bool:
        """Whether ``written`` is one."""
        return (_INTEGER if self.integer else _NUMBER).fullmatch(written) is not None

    @property
    def bytes(self) -> frozenset[int]:
        """The bytes that it may take."""
        return frozenset(b"-0123456789" if self.integer else b"-0123456789.")


Part = OneOf | Number
Place = tuple[int, bytes]
"""A part's number, and what is written of it."""
Path = tuple[str, ...]
Places = frozenset[Place]
"""Where the text may be: more than one place where a part may end or go on."""


def choice_parts(choices: Sequence[str]) -> tuple[Part, ...]:
    """The grammar of one of ``choices``, as written. Raises BadSchema for an empty or too long list."""
    if not choices or not all(choices) or len(choices) > MAX_CHOICES:
        raise BadSchema(f"choices: give 1 to {MAX_CHOICES} texts, none of them empty")
    return (OneOf.of(choices),)


def schema_parts(schema: Any) -> tuple[Part, ...]:
    """The grammar of JSON of ``schema``. Raises BadSchema for one that asks for anything else.

    It may be an enum, a const, a boolean, a number, an integer, null, or an object of such, whose properties
    are all written, in their order.
    """
    schema_json(schema)
    try:
        parts = _merged(_parts(schema, ("schema",)))
    except RecursionError:
        raise _too_deep() from None
    if len(parts) > MAX_PARTS:
        raise BadSchema(f"the schema has more than {MAX_PARTS} parts")
    return parts


def schema_json(schema: Any) -> bytes:
    """A schema as JSON. Raises BadSchema for one that is too long or nested too deeply."""
    try:
        written = msgspec.json.encode(schema)
    except RecursionError:
        raise _too_deep() from None
    if len(written) > MAX_SCHEMA_BYTES:
        raise BadSchema(f"the schema has {len(written)} bytes, the limit is {MAX_SCHEMA_BYTES}")
    return written


def choice_texts(parts: Sequence[Part]) -> dict[str, str]:
    """The whole JSON for each text that ``parts`` leave open, for a model that chooses and cannot write.

    Raises BadSchema unless exactly one part is a list of texts, and all else is constant.
    """
    fixed = [part.texts[0] if isinstance(part, OneOf) and len(part.texts) == 1 else None for part in parts]
    if fixed.count(None) == 1:
        at = fixed.index(None)
        open_, before, after = parts[at], parts[:at], parts[at + 1 :]
        listed = [text.decode() for text in open_.texts] if isinstance(open_, OneOf) else []
        if listed and all(text.startswith('"') for text in listed):
            ends = [b"".join(part.texts[0] for part in each if isinstance(part, OneOf)).decode()
                    for each in (before, after)]  # fmt: skip
            return {json.loads(text): ends[0] + text + ends[1] for text in listed}
    raise BadSchema("the schema must have exactly one enum, of texts, and beside it constants only")


def _too_deep() -> BadSchema:
    return BadSchema("the schema is nested too deeply")


def _parts(schema: Any, here: Path) -> list[Part]:
    if not isinstance(schema, Mapping):
        raise _bad(here, " must be an object")
    members = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    kind = members.pop("type", None)
    if "enum" in members or "const" in members:
        listed = members.pop("enum") if "enum" in members else [members.pop("const")]
        _nothing_else(members, here)
        if not isinstance(listed, list) or not 0 < len(listed) <= MAX_CHOICES:
            raise _bad(here, f".enum must have 1 to {MAX_CHOICES} values")
        return [OneOf.of(map(_json, listed))]
    match kind:
        case "boolean":
            _nothing_else(members, here)
            return [OneOf.of(("true", "false"))]
        case "null":
            _nothing_else(members, here)
            return [OneOf((b"null",))]
        case "number" | "integer":
            _nothing_else(members, here)
            return [Number(kind == "integer")]
        case "object":
            return _object(members, here)
    raise _bad(
        here,
        f": type {kind!r} cannot be kept here; an enum, a const, number, integer, boolean, null, or an "
        "object of these can",
    )


def _object(members: dict[str, Any], here: Path) -> list[Part]:
    properties = members.pop("properties", {})
    members.pop("additionalProperties", None)
    required = members.pop("required", [])
    _nothing_else(members, here)
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise _bad(here, ": properties must be an object, and required a list")
    if unknown := [name for name in required if name not in properties]:
        raise _bad(here, f".required names {unknown}, which are no properties")
    parts: list[Part] = [OneOf((b"{",))]
    for n, (name, each) in enumerate(properties.items()):
        parts.append(OneOf((f"{', ' if n else ''}{_json(name)}: ".encode(),)))
        parts += _parts(each, (*here, "properties", name))
    return [*parts, OneOf((b"}",))]


def _nothing_else(members: Mapping[str, Any], here: Path) -> None:
    if members:
        raise _bad(here, f": {', '.join(sorted(members))} cannot be kept here")


def _bad(here: Path, why: str) -> BadSchema:
    return BadSchema(".".join(here) + why)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Neighbours with a single text each as one."""
    merged: list[Part] = []
    for alone, run in groupby(parts, lambda part: isinstance(part, OneOf) and len(part.texts) == 1):
        if alone:
            merged.append(OneOf((b"".join(part.texts[0] for part in run if isinstance(part, OneOf)),)))
        else:
            merged += run
    return tuple(merged)


class TextGrammar:
    """Keeps one answer to ``parts``. Raises BadSchema where the vocabulary cannot write some of them."""

    def __init__(self, parts: Sequence[Part], vocabulary: Vocabulary, stop_ids: frozenset[int]) -> None:
        self._parts, self._vocabulary = tuple(parts), vocabulary
        self._stop_ids = tuple(sorted(stop_ids))
        self._ends = stop_ids
        self._after = lru_cache(maxsize=64)(self._find)
        self._forced = lru_cache(maxsize=64)(self._longest)
        self._known: list[int] = []  # the answer so far, and the places after each token
        self._states: list[Places] = [self._settled(frozenset({(0, b"")}))]
        needed = frozenset().union(*(part.bytes for part in self._parts))
        if not stop_ids or not needed <= vocabulary.single_bytes:  # then a token can always follow
            raise BadSchema("the model's tokenizer has no end token, or cannot write every byte of this")

    def allowed(self, output: Sequence[int], left: int) -> tuple[int, ...]:
        """Token ids that may follow ``output``, of this answer; at most ``left`` more will come."""
        at = self._at(output)
        ends = self._stop_ids if (len(self._parts), b"") in at else ()
        return (*self._after(at), *ends)

    def forced(self, output: Sequence[int]) -> int | None:
        """The longest token that may follow ``output`` where all that may begin one text; else None."""
        return self._forced(self._at(output))

    def complete(self, output: Sequence[int]) -> bool:
        """Whether ``output`` is whole and nothing may follow."""
        at = self._at(output)
        return not self._after(at)

    def _at(self, output: Sequence[int]) -> Places:
        states, known = self._states, self._known
        if list(output[: len(known)]) != known:  # drafts were rejected
            common = takewhile(lambda pair: pair[0] == pair[1], zip(known, output, strict=False))
            kept = sum(1 for _ in common)
            del states[kept + 1 :], known[kept:]
        for token in output[len(known) :]:
            states.append(self._after(states[-1]).get(token, frozenset()))
            known.append(token)
        return states[-1]

    def _find(self, at: Places) -> dict[int, Places]:
        found = self._vocabulary.allowed(at, self._step)
        # an end token may have a text: it still ends the answer wherever it comes
        return {token: places for token, places in found.items() if token not in self._ends}

    def _longest(self, at: Places) -> int | None:
        written = self._vocabulary.bytes_of
        after = self._after(at)
        if not after or (len(self._parts), b"") in at:
            return None
        longest = max(after, key=lambda token: len(written[token]))
        return longest if all(written[longest].startswith(written[token]) for token in after) else None

    def _step(self, at: Places, byte: int) -> Places | None:
        went = [
            (part, written)
            for part, before in at
            if part < len(self._parts) and self._parts[part].begun(written := before + bytes([byte]))
        ]
        return self._settled(frozenset(went)) if went else None

    def _settled(self, places: Places) -> Places:
        """``places``, and the beginning of the part after each that may be done."""
        found, waiting = set(places), list(places)
        while waiting:
            part, written = waiting.pop()
            after = (part + 1, b"")
            if part < len(self._parts) and self._parts[part].done(written) and after not in found:
                found.add(after)
                waiting.append(after)
        return frozenset(found)
