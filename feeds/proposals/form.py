"""A format and what is not certain about it, proposed for a sample."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from feeds.durations import Duration
from feeds.file_format import FormatError, Ref
from feeds.proposals.fields import Fields, fields_of, usual_gap
from feeds.proposals.sample import Row, Sample
from feeds.timestamps import time_parser

_KINDS = 20
"""Words of a column that may tell kinds of records apart, at most."""
_MOST = 0.9
"""Part of the rows that one declaration has to read, or else kinds are separated."""


@dataclass(frozen=True)
class Given:
    """What the user says. ``venue``, ``symbol``: of all records; empty where a column tells them.

    ``time_format``, ``zone``: of times; empty where the values tell.
    """

    venue: str = ""
    symbol: str = ""
    time_format: str = ""
    zone: str = ""


@dataclass(frozen=True)
class Declared:
    """One kind of record: its fields, and the words that tell it from others."""

    fields: Fields
    match: Ref | None = None
    words: Sequence[str] = ()
    interval_ns: int = 0
    repeats: bool = False
    """Bars with an opening that stood before, and other prices."""


@dataclass(frozen=True)
class Proposal:
    """``text``: of the format's file. ``notes``: what is not certain, for the user."""

    text: str
    records: Sequence[Declared]
    notes: Sequence[str] = field(default_factory=tuple)


def propose(sample: Sample, given: Given, description: str) -> Proposal:
    """A format for the sample. Raises FormatError: nothing in it is a trade, a quote or a bar."""
    records, passed_over = _records(sample)
    if not records:
        seen = ", ".join(str(ref) for ref in sample.rows[0])[:300]
        raise FormatError(
            "no trade, quote or bar: they need a time and a price with a size, bid and ask, or open, high, "
            f"low and close. There is: {seen}"
        )
    notes: list[str] = []
    tables = [_table(sample, given, each, notes) for each in records]
    lines = [f"description = {_text(description)}", f"container = {_text(sample.container)}"]
    if sample.container == "csv":
        lines += [f"delimiter = {_text(sample.delimiter)}"] * (sample.delimiter != ",")
        lines += ["header = false"] * (not sample.header)
        lines += [f"skip_lines = {sample.skip_lines}"] * bool(sample.skip_lines)
    if records[0].fields.decimal == ",":
        lines.append('decimal = ","')
    if passed_over is not None:
        tables.append(f"[passed_over]\nothers = {{ field = {_ref(passed_over)} }}")
    return Proposal("\n".join(lines) + "\n\n" + "\n\n".join(tables) + "\n", records, notes)


def _records(sample: Sample) -> tuple[list[Declared], Ref | None]:
    """The kinds of records, and the column of words that tells them apart, if rows without one have it."""
    whole = fields_of(sample.rows)
    if whole is not None and _share(sample.rows, whole) >= _MOST:
        return [_declared(sample.rows, whole)], None
    best: list[Declared] = []
    column, covered = None, 0
    looked_at = sample.around or sample.rows
    for ref in dict.fromkeys(ref for row in looked_at for ref in row):
        groups: dict[str, list[Row]] = {}
        for row, around in zip(sample.rows, looked_at, strict=True):
            value = around.get(ref)
            if isinstance(value, str):
                groups.setdefault(value, []).append(row)
        if not 0 < len(groups) <= _KINDS:
            continue
        found = {word: each for word, rows in groups.items() if (each := fields_of(rows)) is not None}
        count = sum(len(groups[word]) for word in found)
        if count > covered:
            covered, column = count, ref
            best = [_declared(rows, fields, ref, words) for fields, words, rows in _alike(found, groups)]
    rest = (
        column is not None
        and any(isinstance(around.get(column), str) for around in looked_at)
        and covered < len(sample.rows)
    )
    return best, column if rest else None


def _alike(
    found: Mapping[str, Fields], groups: Mapping[str, Sequence[Row]]
) -> list[tuple[Fields, list[str], list[Row]]]:
    """Words of the same fields together."""
    alike: list[tuple[Fields, list[str], list[Row]]] = []
    for word, fields in found.items():
        for known, words, rows in alike:
            if known == fields:
                words.append(word)
                rows += groups[word]
                break
        else:
            alike.append((fields, [word], list(groups[word])))
    return alike


def _share(rows: Sequence[Row], fields: Fields) -> float:
    """The part of the rows that have all fields that are needed."""
    optional = {"side", "id", "bid_size", "ask_size", "volume"}
    refs = [*fields.time.refs, *(ref for name, ref in fields.fields.items() if name not in optional)]
    return sum(all(row.get(ref) not in (None, "") for ref in refs) for row in rows) / len(rows)


def _declared(
    rows: Sequence[Row], fields: Fields, match: Ref | None = None, words: Sequence[str] = ()
) -> Declared:
    interval, repeats = 0, False
    if fields.kind == "bar" and (parse := time_parser(fields.time.format)) is not None:
        by_symbol: dict[object, list[int]] = {}
        for row in rows:
            text = " ".join(str(row.get(ref)) for ref in fields.time.refs)
            try:
                moment = parse(text).ns
            except (ValueError, OverflowError):
                continue
            by_symbol.setdefault(row.get(fields.fields.get("symbol", "")), []).append(moment)
        longest = max(by_symbol.values(), key=len, default=[])
        interval, repeats = usual_gap(sorted(longest)), len(set(longest)) < len(longest)
    return Declared(fields, match, tuple(words), interval, repeats)


def _table(sample: Sample, given: Given, declared: Declared, notes: list[str]) -> str:
    fields = declared.fields
    lines = ["[[records]]", f"kind = {_text(fields.kind)}"]
    places = dict(fields.fields)
    for name in ("venue", "symbol"):
        value = getattr(given, name)
        if value:
            places.pop(name, None)
        elif name not in places and name == "symbol" and _keys_are_symbols(sample):
            places["symbol"] = "$key"
        elif name not in places:
            value = "VENUE" if name == "venue" else "SYMBOL"
            notes.append(f"no column tells the {name}: say --{name}, or edit {value} in the format")
        if value:
            lines.append(f"{name} = {_text(value)}")
    if declared.match is not None:
        words = ", ".join(map(_text, declared.words))
        lines.append(f"match = {{ field = {_ref(declared.match)}, values = [{words}] }}")
    if sample.each:
        lines.append(f"each = {_text(sample.each)}")
    if fields.kind == "bar":
        lines.append(f'interval = "{Duration(declared.interval_ns)}"')
        notes.append('the time of a bar is taken for its opening: otherwise declare stamp = "close"')
        if declared.repeats and sample.is_live:
            notes.append("bars come several times: match those that are finished by the member that says so")
        elif declared.repeats:
            lines.append('ready = "last"')
            notes.append("bars come several times: the last one of each counts")
    lines.append(_time(given, fields, notes))
    lines.append(f"fields = {{ {', '.join(f'{name} = {_ref(ref)}' for name, ref in places.items())} }}")
    if fields.side_values:
        sides = ", ".join(f"{_key(word)} = {_text(side)}" for word, side in fields.side_values.items())
        lines.append(f"side_values = {{ {sides} }}")
        if set(fields.side_values) == {"true", "false"}:
            notes.append("true is taken for a buyer who was the maker, so that the aggressor sold")
    if sample.is_typed and fields.float_decimals:
        decimals = ", ".join(f"{name} = {count}" for name, count in fields.float_decimals.items())
        lines.append(f"float_decimals = {{ {decimals} }}")
        notes.append("numbers are binary floats: float_decimals are those of the sample")
    return "\n".join(lines)


def _time(given: Given, fields: Fields, notes: list[str]) -> str:
    time = fields.time
    found = given.time_format or time.format
    refs = ", ".join(map(_ref, time.refs))
    place = refs if len(time.refs) == 1 else f"[{refs}]"
    zone = given.zone
    if not time.has_zone and not zone:
        notes.append("times have no zone: they are taken for UTC; otherwise say --zone")
    if time.others and not given.time_format:
        notes.append(f"times fit {found!r} and {', '.join(map(repr, time.others))}: say --time-format")
    more = f", zone = {_text(zone)}" if zone else ""
    return f"time = {{ field = {place}, format = {_text(found)}{more} }}"


def _keys_are_symbols(sample: Sample) -> bool:
    return bool(sample.keys) and all(sample.keys) and len(set(sample.keys)) <= len(sample.keys) // 2 + 1


def _text(value: str) -> str:
    """A string of TOML, whose escapes are those of JSON."""
    return json.dumps(value)


def _ref(ref: Ref) -> str:
    return str(ref) if isinstance(ref, int) else _text(ref)


def _key(word: str) -> str:
    """A key of TOML."""
    return word if word and word.replace("_", "").isalnum() and word.isascii() else _text(word)
