"""What is fuzzed: every decoder of what comes from outside, or from a file.

A target takes bytes. It may refuse them by the errors that its decoder documents; any other exception, and a
result that does not read back, is a finding.
"""

import atexit
import contextlib
import io
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import fastavro
import msgspec
import numpy as np
from numpy.typing import NDArray

from daemon import protocol
from daemon.api import messages
from daemon.api.anthropic import MessageRequest, Messages
from daemon.api.compatible import Api, ApiError
from daemon.api.generation import Failed, Generate, GenerateAll, ModelCatalog, ModelEntry, Turn
from daemon.api.openai.chat import Chat, ChatRequest
from daemon.api.openai.completions import CompletionRequest, Completions
from daemon.api.openai.responses import ResponseRequest, Responses
from daemon.config.errors import ConfigError
from daemon.config.load import load_config
from daemon.progress import Progress, StoredProgress, decode_stored, encode_stored
from feeds import codec
from feeds.array_frames import elements
from feeds.codec import MalformedRecord, decode_message, decode_record, encode
from feeds.columns.decode import ENCODINGS, ColumnDecoder, warm_up
from feeds.columns.record_columns import RecordColumns
from feeds.decimals import parse_fixed
from feeds.decoding import Undecodable, decoded
from feeds.durations import parse_duration
from feeds.file_format import FormatError, load_format
from feeds.market_data import (
    Answer,
    AnyRecord,
    Bar,
    DataUpdated,
    DeadLetter,
    FlashReady,
    Latency,
    Quote,
    Trade,
)
from feeds.payloads.format_decoder import FormatDecoder
from feeds.payloads.protobuf import compiled
from feeds.payloads.schema_registry import Schema
from feeds.proposals.form import Given, propose
from feeds.proposals.sample import of_text
from feeds.recorded_file import Says, read_items, read_records
from feeds.source import Incoming
from feeds.timestamps import parse_instant, parse_zone
from feeds.zmq_feed import Header, ZmqSource
from flash.confidence import CalibrationError, judge, read_calibration
from ingest.record import ReadRange
from lab.jsonl import TraceError
from lab.simulation.inputs import read_trace
from lab.theory import query_stream
from regions.kv_tensors import KVPool, LayerShape
from regions.offload import snapshot_format
from regions.offload.kv_store import StoredLost
from regions.offload.snapshot_format import Identity, Snapshot, SnapshotError, SnapshotHeader, write_snapshot
from regions.tape import Retention, Tape
from scheduler import costs
from tests.kit import SECOND, START, trade
from tests.kit.samples import SAMPLES
from tests.regions.numbered import FROZEN, append, tape_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    """``seeds``: inputs that are accepted."""

    run: Callable[[bytes], object]
    seeds: Sequence[bytes]


# --- messages in declared formats

_TRADES = """
description = "trades"
container = "{container}"
{more}
[[records]]
kind = "trade"
venue = "X"
float_decimals = {{ price = 2 }}
time = {{ field = "t", format = "epoch-ms" }}
fields = {{ symbol = "s", price = "p", size = "q", id = "i", side = "m" }}
side_values = {{ true = "sell", false = "buy" }}
"""
_TRADE = {"t": START // 10**6, "s": "AAA", "p": 1.25, "q": "2", "i": "7", "m": True}
_AVRO = {"t": "long", "s": "string", "p": "double", "q": "string", "i": "string", "m": "boolean"}
_PROTO = """syntax = "proto3";
message T { int64 t = 1; string s = 2; double p = 3; string q = 4; string i = 5; bool m = 6; }
"""


def _payloads() -> Iterator[tuple[str, Callable[[bytes], None], bytes]]:
    """A target for each encoding: a row of columns that is taken is the message's one record."""
    pool, schema = compiled(Schema("PROTOBUF", _PROTO)), io.BytesIO()
    fields = [{"name": name, "type": kind} for name, kind in _AVRO.items()]
    parsed = fastavro.parse_schema({"type": "record", "name": "T", "fields": fields})
    fastavro.schemaless_writer(schema, parsed, _TRADE)
    seeds = {
        "json": json.dumps({**_TRADE, "p": "1.25"}).encode(),
        "msgpack": msgspec.msgpack.encode(_TRADE),
        "avro": schema.getvalue(),
        "protobuf": pool.kind("T")(**_TRADE).SerializeToString(),
    }
    with TemporaryDirectory() as folder:
        form = Path(folder, "form.toml")
        Path(folder, "schema.avro").write_text(json.dumps({"type": "record", "name": "T", "fields": fields}))
        Path(folder, "schema.protobuf").write_bytes(pool.serialized)
        for container, seed in seeds.items():
            more = "" if container in ("json", "msgpack") else f'schema = "schema.{container}"'
            more += '\nmessage = "T"' if container == "protobuf" else ""
            text = _TRADES.format(container=container, more=more)
            if container == "json":
                text = text.replace("float_decimals = { price = 2 }\n", "")
            form.write_text(text)
            made = FormatDecoder(load_format(form, of_messages=True), 1 << 16)
            made.read_symbols(["X:AAA"])
            yield container, partial(_payload, made), seed


def _payload(decoder: FormatDecoder, payload: bytes) -> None:
    message = Incoming("t", 0, 0, None, payload, ts_recv_ns=START)
    found = [part.record for part in decoder.parts(message).parts]
    assert not any(isinstance(each, MalformedRecord) and each.reason == "internal" for each in found)
    if decoder.columns([message])["taken"][0]:
        (record,) = found
        assert isinstance(record, Trade)


def _proposed(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        propose(of_text(data.decode(errors="replace")), Given("V", "S"), "fuzzed")


# --- records and messages


def _records() -> list[msgspec.Struct]:
    base = {"venue": "V", "symbol": "AAA", "ts_event": START, "ts_recv": START + 5}
    values = dict.fromkeys(("price", "bid", "ask", "open", "high", "low", "close"), "101.25")
    more = {"size": "3", "volume": "7", "interval_ns": SECOND}
    found: list[msgspec.Struct] = []
    for kind in (Trade, Quote, Bar):
        names = {field.name for field in msgspec.structs.fields(kind)}
        members = {name: value for name, value in (base | values | more).items() if name in names}
        found.append(decode_record(json.dumps(members | {"type": kind.__struct_config__.tag}).encode()))
    return found


def _messages() -> list[msgspec.Struct]:
    return [
        DeadLetter(error="no", reason="json", topic="t", partition=1, offset=3, payload=b"\xff{"),
        DataUpdated(session="aaa", data_version=3, as_of=START, bars=1),
        FlashReady(session="aaa", data_version=3, as_of=START, answers=6),
        Answer(
            session="aaa", symbol="V:AAA", question="trend", question_hash="x", text="UP", choice="UP",
            logit_gap=1.5, probability=0.5, data_version=3, as_of=START, model="m", model_revision="r",
            untrained=False, latency=Latency(), reused_tokens=1, computed_tokens=2, flags=("stale",),
        ),
    ]  # fmt: skip


@cache
def _columns() -> ColumnDecoder:
    return ColumnDecoder(["V:AAA"])


def _record(encoding: codec.Encoding) -> Callable[[bytes], None]:
    def run(payload: bytes) -> None:
        taken = _columns().decode([payload], _encodings(encoding))["taken"][0]
        try:
            record = decode_record(payload, encoding, max_bytes=1 << 16)
        except MalformedRecord:
            assert not taken, "the columns took what the codec refuses"
            return
        assert decode_record(encode(record, encoding), encoding) == record

    return run


def _encodings(encoding: str) -> NDArray[np.uint8]:
    return np.array([ENCODINGS[encoding]], np.uint8)


def _message(encoding: codec.Encoding) -> Callable[[bytes], None]:
    def run(payload: bytes) -> None:
        with contextlib.suppress(MalformedRecord):
            message = decode_message(payload, encoding)
            again = decode_message(encode(message, encoding), encoding)
            assert again == message or "nan" in repr(message)

    return run


def _frames(encoding: codec.Encoding) -> Callable[[bytes], None]:
    def run(payload: bytes) -> None:
        with contextlib.suppress(MalformedRecord):
            found = elements(payload, encoding, 1 << 16)
            assert sum(map(len, found)) <= len(payload)

    return run


def _zeromq(data: bytes) -> None:
    source = ZmqSource("fuzz", "tcp://127.0.0.1:1", [""])
    source._incoming(data.split(b"|"), 0)


# --- sockets


def _request(data: bytes) -> None:
    messages.request_id(data)
    with contextlib.suppress(Undecodable):
        request = messages.decode_request(data)
        assert (
            messages.decode_request(messages.encode(request)) == request or b"nan" in repr(request).encode()
        )


def _undecodable(decode: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with contextlib.suppress(Undecodable):
            decode(data)

    return run


REQUESTS = [
    {"type": "ask", "id": 2, "session": "aaa", "question": "Up?", "choices": ["UP", "DOWN"], "max_tokens": 1},
    {"type": "sessions", "id": 3},
    {"type": "answers", "id": 5, "session": "aaa", "question": "trend"},
    {"type": "open", "id": 6, "text": "One two", "max_tokens": 1},
    {"type": "append", "id": 7, "prompt": "nobody", "text": "three"},
    {"type": "label", "id": 11, "session": "aaa", "question": "trend", "data_version": 1, "choice": "UP"},
]
EVENTS: list[msgspec.Struct] = [
    protocol.NotDue("aaa", 1, protocol.VersionInputs((ReadRange(1, 0, 1),), ((1, 2),))),
    Failed(1, "engine", "no"),
    protocol.Fatal("model.path", "no"),
]


def _chat(api: Api[Any], kind: type[msgspec.Struct]) -> Callable[[bytes], None]:
    """A body of an HTTP API, up to what is asked of the engine."""

    def run(data: bytes) -> None:
        with contextlib.suppress(Undecodable, ApiError):
            api.parse(decoded(partial(msgspec.json.decode, type=kind), data), SERVED)

    return run


SERVED = ModelCatalog((ModelEntry("m", "r"),), 0, ("aaa",), 1000, 100)
MESSAGES = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Up?"}]
CHATS: dict[str, tuple[Api[Any], type[msgspec.Struct], dict[str, Any]]] = {
    "openai-chat": (
        Chat(),
        ChatRequest,
        {"model": "session:aaa", "messages": MESSAGES, "stream": True, "n": 2},
    ),
    "openai-completion": (
        Completions(),
        CompletionRequest,
        {"model": "m", "prompt": ["a", "b"], "logprobs": 2},
    ),
    "openai-response": (
        Responses(),
        ResponseRequest,
        {"model": "m", "input": MESSAGES[1:], "temperature": 0.5},
    ),
    "anthropic-message": (
        Messages(),
        MessageRequest,
        {"model": "m", "messages": MESSAGES[1:], "max_tokens": 5, "stop_sequences": ["."]},
    ),
}


def _progress(data: bytes) -> None:
    """A record of the topic of progress."""
    with contextlib.suppress(Undecodable):
        stored = decode_stored(data)
        assert decode_stored(encode_stored(stored)) == stored


PROGRESS = StoredProgress(Progress(1, 20, 120, (START, START + SECOND)), 1, "tcp://127.0.0.1:7801")

# --- files


@cache
def _folder() -> Path:
    made = Path(mkdtemp(prefix="foretick-fuzz-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _file(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(data)
    return path


def _configuration(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        load_config(_file("config.toml", data), {})


def _setting(data: bytes) -> None:
    """`--set KEY=VALUE`, a line each."""
    pairs = (line.partition("=") for line in data.decode(errors="replace").splitlines())
    with contextlib.suppress(ConfigError):
        load_config(None, {}, {key: value for key, _, value in pairs})


def _format(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        load_format(_file("form.toml", data))


def _replayed(form: str, name: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with contextlib.suppress(FormatError):
            for record in read_records(_file(name, data), load_format(form)):
                codec.check_record(record)

    return run


def _table(form: str) -> Callable[[bytes], None]:
    """Row by row and as columns: the same records and refusals."""

    def run(data: bytes) -> None:
        path, found = _file("table", data), []
        for as_columns in (False, True):
            refused: list[tuple[int, str]] = []
            says = Says(lambda line, error, to=refused: to.append((line, str(error))), _ignore, _ignore)
            records: list[AnyRecord] = []
            with contextlib.suppress(FormatError):
                for item in read_items(path, load_format(form), says, as_columns=as_columns):
                    records += item.records() if isinstance(item, RecordColumns) else [item]
            for record in records:
                codec.check_record(record)
            found.append((records, refused))
        assert found[0] == found[1]

    return run


def _ignore(*_: object) -> None:
    """Skipped rows and notices."""


PARQUET = """
description = "fuzzed"
container = "{container}"
[[records]]
kind = "trade"
venue = "T"
symbol = "S"
float_decimals = {{ size = 2 }}
time = {{ field = "time", format = "iso" }}
fields = {{ price = "price", size = "size", id = "id" }}
"""


def _tables() -> Iterator[tuple[str, Callable[[bytes], None], bytes]]:
    """Name, target and seed of each container of tables."""
    import pyarrow as pa
    from pyarrow import parquet

    from tests.feeds import dbn_files

    warm_up()  # kernels, which would count as the time of an input
    made = pa.table(
        {
            "time": pa.array([START, START + SECOND], pa.timestamp("ns", "UTC")),
            "price": pa.array([101, 102], pa.decimal128(9, 2)),
            "size": [1.25, 2.0],
            "id": ["a", "b"],
        }
    )
    packed = {"parquet": io.BytesIO(), "arrow": io.BytesIO()}
    parquet.write_table(made, packed["parquet"], compression="none", write_page_checksum=True)
    with pa.ipc.new_file(packed["arrow"], made.schema) as writer:
        writer.write_table(made)
    for container, out in packed.items():
        form = _file(f"{container}.toml", PARQUET.format(container=container).encode())
        yield container, _table(str(form)), out.getvalue()
    records = dbn_files.trade(START, 10**9, 1), dbn_files.bar(START, (1, 2, 1, 2), 5)
    yield "dbn", _table("databento"), dbn_files.metadata() + b"".join(records)


def _calibration(data: bytes) -> None:
    with contextlib.suppress(CalibrationError):
        found = read_calibration(_file("calibration.json", data), "m", "compact")
        for question in found.questions:
            for logits in ([0.5] * len(question.choices), [100.0, *[-100.0] * (len(question.choices) - 1)]):
                judge(question, logits, 0, 0.9, 0.1)


CALIBRATION: dict[str, Any] = {
    "model": "m",
    "lines": "compact",
    "data": {"tapes": 3},
    "version": 1,
    "questions": [
        {
            "name": "trend",
            "text": "Up?",
            "choices": ["UP", "DOWN"],
            "temperature": 1.5,
            "curves": [{"x": [0.0, 1.0], "y": [0.1, 0.9]}, {"x": [0.0, 1.0], "y": [0.1, 0.9]}],
            "scores": [0.1, 0.2, 0.3],
            "labels": 9,
            "mean_gap": 1.0,
        }
    ],
}


def _profile(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        model = costs.load(_file("profile.json", data))
        assert model.batch_ns([(0, 5), (100, 1)]) >= 0
        assert model.recompute_ns(1000) >= 0


def _simulated(data: bytes) -> None:
    with contextlib.suppress(TraceError):
        list(read_trace(data.splitlines()))


def _queries(data: bytes) -> None:
    with contextlib.suppress(TraceError):
        query_stream.read_trace(data.splitlines())


def _text(data: bytes) -> None:
    text = data.decode(errors="replace")
    for parse in (parse_fixed, parse_duration, parse_instant, parse_zone):
        with contextlib.suppress(ValueError):
            parse(text)


TRACE = (
    b'{"time_ns":0,"request":1,"op":"open","tokens":[1,2]}\n'
    b'{"time_ns":5,"request":1,"op":"append","segments":[[3,4]],"last":true}\n'
)

# --- snapshots


@cache
def _pool() -> KVPool:
    return KVPool([LayerShape(1, 2, 2)], 40, block_size=4)


@cache
def _identity() -> Identity:
    return Identity.of(_pool(), model="m@1", tokenizer="t", frozen=[0] * FROZEN)


def _full() -> Tape:
    tape = tape_of(_pool(), Retention(20), frame_limit=30)
    for i in range(4):
        append(_pool(), tape, [10 * i + j for j in range(7)])
    return tape


@cache
def _written() -> bytes:
    tape = _full()
    header = SnapshotHeader("t", _identity(), 4, tape.state, 12345, b"owner")
    write_snapshot(_folder() / "seed.kv", header, _pool(), tape.live_ranges)
    tape.release()
    return (_folder() / "seed.kv").read_bytes()


def _snapshot(data: bytes) -> None:
    """The bytes are a file; those that are accepted can be loaded."""
    with contextlib.suppress(SnapshotError):
        _resume(_opened(_file("t.kv", data)))


def _opened(path: Path) -> Snapshot:
    snapshot = Snapshot.open(path)
    snapshot.expect(_identity())
    return snapshot


def _header(data: bytes) -> None:
    """The bytes are the header of a file whose checksums are right."""
    size = sum(snapshot_format._sizes(_own_header()))
    prefix = struct.pack("<8sIQQ", snapshot_format.MAGIC, snapshot_format.FORMAT, len(data), size)
    seal = snapshot_format._digest(prefix + data)
    kv = bytes(size)
    whole = prefix + data + seal + kv + blake2b(seal + kv, digest_size=32).digest()
    with contextlib.suppress(SnapshotError):
        path = _file("t.kv", whole)
        _resume(_opened(path))


@cache
def _own_header() -> SnapshotHeader:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(_header_of(_written())), type=SnapshotHeader)


def _header_of(data: bytes) -> SnapshotHeader:
    (_, _, size, _) = struct.unpack_from("<8sIQQ", data)
    return msgspec.msgpack.decode(data[28 : 28 + size], type=SnapshotHeader)


def _resume(snapshot: Snapshot) -> None:
    pool, tape = _pool(), tape_of(_pool(), Retention(20), frame_limit=30)
    stored = snapshot_format.Restoring(pool, snapshot)
    try:
        with contextlib.suppress(ValueError, StoredLost):
            tape.resume(snapshot.header.state, stored)
            tape.swap_in(0)
    finally:
        tape.release()


def _toml() -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "examples").glob("*.toml"))]


def targets() -> dict[str, Target]:
    """By name."""
    records, others = _records(), _messages()
    ask = GenerateAll(
        (Generate(id=1, session="aaa", turns=(Turn("user", "Up?"),), tenant="desk", weight=2.0),)
    )
    commands = [ask, protocol.EndInput(), protocol.StopEngine(1.0)]
    header = Header("trade.v1", "json", "x", 3)
    packed = b"|".join([b"t", msgspec.msgpack.encode(header), trade("V:AAA", START)])
    found = {
        "request": Target(_request, [msgspec.msgpack.encode(each) for each in REQUESTS]),
        "reply": Target(
            _undecodable(messages.decode_reply), [messages.encode(messages.ErrorReply(1, "busy", "no"))]
        ),
        "command": Target(_undecodable(protocol.decode_command), [protocol.encode(c) for c in commands]),
        "event": Target(_undecodable(protocol.decode_event), [protocol.encode(each) for each in EVENTS]),
        "zeromq": Target(_zeromq, [packed]),
        "progress": Target(_progress, [encode_stored(PROGRESS)]),
        "configuration": Target(_configuration, _toml()),
        "setting": Target(_setting, [b"bars.interval=1s\npool.blocks=3", b"sessions.0.name=x"]),
        "format": Target(
            _format, [path.read_bytes() for path in sorted((ROOT / "feeds/formats").glob("*.toml"))]
        ),
        "calibration": Target(_calibration, [json.dumps(CALIBRATION).encode()]),
        "profile": Target(_profile, [msgspec.json.encode(costs.guess(16))]),
        "text": Target(_text, [b"1s", b"100.25", b"2026-03-02T14:30:00Z", b"Europe/Berlin", b"+01:00"]),
        "snapshot": Target(_snapshot, [_written()]),
        "snapshot-header": Target(_header, [msgspec.msgpack.encode(_own_header())]),
        "trace": Target(_simulated, [TRACE]),
        "queries": Target(_queries, [b'{"tokens":[1,2],"arrival":0}\n', b'{"text":"ab","arrival":1.5}']),
    }
    encodings: tuple[codec.Encoding, ...] = ("json", "msgpack")
    for encoding in encodings:
        encoded = [encode(each, encoding) for each in records]  # type: ignore[arg-type]  # these are
        array = b"[" + b",".join(encoded) + b"]" if encoding == "json" else b"\x93" + b"".join(encoded)
        found[f"record-{encoding}"] = Target(_record(encoding), encoded)
        found[f"frame-{encoding}"] = Target(_frames(encoding), [array])
        found[f"message-{encoding}"] = Target(
            _message(encoding),
            [encode(each, encoding) for each in [*records, *others]],  # type: ignore[arg-type]
        )
    for name, (api, kind, body) in CHATS.items():
        found[name] = Target(_chat(api, kind), [msgspec.json.encode(body)])
    for sample in SAMPLES:
        name = "2020-01-01.csv" if sample.form != "binance_capture" else "tape.jsonl"
        found[f"replay-{sample.form}"] = Target(_replayed(sample.form, name), [sample.content.encode()[:400]])
    for name, run, seed in _tables():
        found[f"replay-{name}"] = Target(run, [seed])
    for name, run, seed in _payloads():
        found[f"payload-{name}"] = Target(run, [seed])
    found["proposal"] = Target(_proposed, [b"time,price,size\n1709632800,1.5,2\n", b'{"t":1,"p":"2"}'])
    return found
