"""CPU time to decode a record of each encoding of messages, beside its library's own decoding."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bench.figures import Figure, Goal, Setting
from bench.run import MeasurementFailed, SuiteRun
from daemon.config.schema import SourceConfig
from feeds import columns
from feeds.codec import MalformedRecord
from feeds.file_format import load_format
from feeds.payloads.format_decoder import FormatDecoder
from feeds.payloads.payload_decoder import PayloadDecoder, WireDecoder
from feeds.source import Incoming

if TYPE_CHECKING:
    from feeds.payloads.schema_registry import Schema, SchemaRegistry

GOAL = Goal(2.0)
_FEW_US = 500.0
"""Of a batch of few messages, whose columns cost what they do whatever their length: a hundred such batches a
second are then at most 5 % of a core.
"""
_BATCH, _FEW, _ARRAY = 2000, 20, 10
_NOW = 1_767_225_600 * 10**9
_FORM = """
description = "measured"
container = "{container}"
{more}
[[records]]
kind = "trade"
venue = "BENCH"
time = {{ field = "t", format = "epoch-ms" }}
fields = {{ symbol = "s", price = "p", size = "q", id = "i", side = "m" }}
side_values = {{ true = "sell", false = "buy" }}
{record}
"""
_TYPES = {"t": "long", "s": "string", "p": "double", "q": "double", "i": "long", "m": "boolean"}
_FLOATS = "float_decimals = { price = 2, size = 5 }"
_MESSAGE = (
    'syntax = "proto3"; message T { int64 t=1; string s=2; double p=3; double q=4; int64 i=5; bool m=6; }'
)


@dataclass(frozen=True)
class _Encoding:
    """Payloads, what decodes messages of them, and what its library does with one payload.

    ``records``: of a message. ``one_by_one``: no columns are made of them. ``batch``: messages that come
    together.
    """

    name: str
    payloads: Sequence[bytes]
    decoder: PayloadDecoder
    bare: Callable[[bytes], Any]
    records: int = 1
    one_by_one: bool = False
    batch: int = _BATCH


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Trades of 16 symbols, a record a message, decoded to columns: 2,000 messages at a time, as a source
    yields them, or 20, as they come while nothing waits. The reference is the library's own decoding of the
    same payloads in the same process: of JSON and msgpack msgspec's into Python's objects, of Avro
    fastavro's, of Protobuf the class that its descriptors make, of CSV Python's. Compiled code reads all but
    Avro, which that library decodes first, and arrays and lines, whose records are read one by one. Records
    a second are those of one core.
    """
    count, repeats = run.sized((100_000, 5), (4000, 1))
    columns.warm_up()
    with TemporaryDirectory() as folder:
        try:
            encodings = list(_encodings(Path(folder), count))
        except ModuleNotFoundError as error:
            raise MeasurementFailed(
                f"{error.name} is missing: pip install 'foretick[avro,protobuf]'"
            ) from None
        for each in encodings:
            messages = [
                Incoming("t", 0, n, None, payload, {}, _NOW) for n, payload in enumerate(each.payloads)
            ]
            ours = [_timed(_ours, each, messages) for _ in range(repeats)]
            bare = [_timed(_bare, each, messages) for _ in range(repeats)]
            pairs = [a / b for a, b in zip(ours, bare, strict=True)]
            setting: Setting = {"messages": each.name}
            yield Figure("records a second", round(count / median(ours)), setting=setting)
            yield Figure(
                "CPU time a record",
                median(ours) / count * 1e6,
                "us",
                setting=setting,
                against="library's own decoding",
                reference=median(bare) / count * 1e6,
                paired=median(pairs),
                goal=GOAL if each.batch == _BATCH else None,
                n=repeats,
                low=min(ours) / count * 1e6,
                high=max(ours) / count * 1e6,
            )
            if each.batch != _BATCH:
                took, goal = median(ours) / count * each.batch * 1e6, Goal(_FEW_US, of="ours")
                yield Figure("CPU time a batch", took, "us", setting=setting, goal=goal)


def _timed(work: Callable[[_Encoding, Sequence[Incoming]], None], *given: Any) -> float:
    began = time.process_time()
    work(*given)
    return time.process_time() - began


def _ours(encoding: _Encoding, messages: Sequence[Incoming]) -> None:
    if encoding.one_by_one:
        parts = [part for each in messages for part in encoding.decoder.parts(each).parts]
        unusable = sum(isinstance(each.record, MalformedRecord) for each in parts)
        if unusable or len(parts) != len(messages) * encoding.records:
            raise MeasurementFailed(f"{encoding.name}: {unusable} of {len(parts)} records are unusable")
        return
    for start in range(0, len(messages), encoding.batch):
        rows = encoding.decoder.columns(messages[start : start + encoding.batch])
        if not rows["taken"].all():
            raise MeasurementFailed(
                f"{encoding.name}: {int((rows['taken'] == 0).sum())} records are not plain"
            )


def _bare(encoding: _Encoding, messages: Sequence[Incoming]) -> None:
    decode = encoding.bare
    for each in messages:
        decode(each.payload)


def _trades(count: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(7)
    prices = 1_000_000 + np.cumsum(random.integers(-1, 2, count))
    sizes, symbols = random.integers(1, 100_000, count), random.integers(0, 16, count)
    return [
        {
            "t": _NOW // 10**6 - count + n,
            "s": f"S{symbols[n]:02}",
            "p": float(prices[n]) / 100,
            "q": float(sizes[n]) / 10**5,
            "i": n,
            "m": bool(n % 2),
        }
        for n in range(count)
    ]


def _encodings(folder: Path, count: int) -> Iterator[_Encoding]:
    trades = _trades(count)
    texts = [{**each, "p": f"{each['p']:.2f}", "q": f"{each['q']:.5f}"} for each in trades]
    yield from _of_text(folder, trades, texts)
    packed = [msgspec.msgpack.encode(each) for each in trades]
    yield _Encoding("msgpack", packed, _decoder(folder, "msgpack", record=_FLOATS), msgspec.msgpack.decode)
    yield from _of_schemas(folder, trades)


def _decoder(
    folder: Path,
    container: str,
    more: str = "",
    record: str = "",
    registry: SchemaRegistry | None = None,
    form: str = _FORM,
) -> FormatDecoder:
    path = folder / "form.toml"
    path.write_text(form.format(container=container, more=more, record=record))
    made = FormatDecoder(load_format(path, of_messages=True), 1 << 20, registry)
    made.read_symbols([f"BENCH:S{n:02}" for n in range(16)])
    return made


def _of_text(folder: Path, trades: list[dict[str, Any]], texts: list[dict[str, Any]]) -> Iterator[_Encoding]:
    wire = WireDecoder(SourceConfig().max_message_bytes)
    wire.read_symbols([f"BENCH:S{n:02}" for n in range(16)])
    own = [msgspec.json.encode(_own(each)) for each in texts]
    bare = msgspec.json.decode
    yield _Encoding("our own, JSON", own, wire, bare)
    yield _Encoding(f"our own, JSON, {_FEW} at a time", own, wire, bare, batch=_FEW)
    plain = _decoder(folder, "json")
    encode = msgspec.json.encode
    encoded = [encode(each) for each in texts]
    yield _Encoding("JSON, numbers as text", encoded, plain, bare)
    yield _Encoding(f"JSON, numbers as text, {_FEW} at a time", encoded, plain, bare, batch=_FEW)
    in_ns = [encode({**each, "t": each["t"] * 10**6}) for each in texts]
    of_ns = _decoder(folder, "json", form=_FORM.replace("epoch-ms", "epoch-ns"))
    yield _Encoding("JSON, numbers as text, times in ns", in_ns, of_ns, bare)
    yield _Encoding("JSON, numbers", [encode(each) for each in trades], plain, bare)
    beyond = [encode({**each, "n": "Zürich, 東京"}) for each in texts]
    yield _Encoding("JSON, numbers as text, a text beyond ASCII", beyond, plain, bare)
    arrays = [encode(texts[at : at + _ARRAY]) for at in range(0, len(texts), _ARRAY)]
    yield _Encoding(f"JSON, an array of {_ARRAY}", arrays, plain, bare, _ARRAY, one_by_one=True)
    lines = [f"{','.join(map(str, each.values()))}\n".lower().encode() for each in texts]
    csv_form = _FORM.replace('"t"', "0")
    for index, name in enumerate("spqim", 1):
        csv_form = csv_form.replace(f'= "{name}"', f"= {index}")
    cells = _decoder(folder, "csv", "header = false", form=csv_form)
    yield _Encoding("CSV, a line", lines, cells, _cells, one_by_one=True)


def _cells(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode())))


class _OneSchema:
    """A registry of one schema, which it has."""

    failed = 0

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def get(self, _number: int) -> Schema:
        return self._schema


def _of_schemas(folder: Path, trades: list[dict[str, Any]]) -> Iterator[_Encoding]:
    import fastavro

    from feeds.payloads.protobuf import compiled
    from feeds.payloads.schema_registry import Schema

    fields = [{"name": name, "type": kind} for name, kind in _TYPES.items()]
    schema = {"type": "record", "name": "T", "fields": fields}
    (folder / "t.avsc").write_text(json.dumps(schema))
    parsed = fastavro.parse_schema(schema)

    def written(trade: dict[str, Any]) -> bytes:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, trade)
        return stream.getvalue()

    read, payloads = fastavro.schemaless_reader, [written(each) for each in trades]
    avro = _decoder(folder, "avro", 'schema = "t.avsc"', _FLOATS)
    yield _Encoding("Avro", payloads, avro, lambda data: read(io.BytesIO(data), parsed, None))
    registry: Any = _OneSchema(Schema("AVRO", json.dumps(schema)))
    framed = [b"\0\0\0\0\7" + each for each in payloads]
    registered = _decoder(folder, "avro", record=_FLOATS, registry=registry)
    yield _Encoding(
        "Avro, of a registry", framed, registered, lambda data: read(io.BytesIO(data[5:]), parsed, None)
    )
    pool = compiled(Schema("PROTOBUF", _MESSAGE))
    (folder / "t.desc").write_bytes(pool.serialized)
    kind = pool.kind("T")
    protobuf = _decoder(folder, "protobuf", 'schema = "t.desc"\nmessage = "T"', _FLOATS)
    serialized = [kind(**each).SerializeToString() for each in trades]
    yield _Encoding("Protobuf", serialized, protobuf, kind.FromString)


def _own(trade: dict[str, Any]) -> dict[str, Any]:
    at = trade["t"] * 10**6
    side = "sell" if trade["m"] else "buy"
    return {
        "type": "trade", "venue": "BENCH", "symbol": trade["s"], "ts_event": at, "ts_recv": at,
        "price": trade["p"], "size": trade["q"], "side": side, "id": str(trade["i"]),
    }  # fmt: skip
