"""Messages in declared formats, many at a time: the outcome is that of one by one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeds.columns import Columns
from feeds.file_format import load_format
from feeds.payloads.format_decoder import FormatDecoder
from feeds.payloads.protobuf import compiled
from feeds.payloads.schema_registry import Schema
from feeds.source import Incoming
from tests.kit import SECOND, START, TOPIC, QueueSource
from tests.kit.gateway import DecoderRig

FORM = """
description = "trades"
container = "{container}"
null = ["-"]
{more}
[[records]]
kind = "trade"
venue = "V"
float_decimals = {{ price = 2 }}
time = {{ field = "k.t", format = "epoch-ms" }}
fields = {{ symbol = "s", price = "p", size = "q", id = "i", side = "m" }}
side_values = {{ true = "sell", false = "buy" }}
match = {{ field = "e", values = ["trade"] }}
"""
PROTO = """
syntax = "proto3";
message T {
  message K { int64 t = 1; }
  string s = 1; double p = 2; string q = 3; int64 i = 4; bool m = 5; string e = 6; K k = 7;
}
"""
KIND = compiled(Schema("PROTOBUF", PROTO)).kind("T")
CHANGES: list[dict[str, Any]] = [
    {}, {}, {}, {}, {}, {}, {"s": "BBB"}, {"s": "ZZZ"}, {"s": "é"}, {"q": "-"}, {"q": "1e-3"}, {"q": "-1"},
    {"p": -1.5}, {"p": 1.005}, {"e": "other"}, {"k": {"t": 5}}, {"m": False},
]  # fmt: skip


class OneByOne(FormatDecoder):
    """Reads every message by itself."""

    def columns(self, messages: Any) -> Columns:
        return super().columns([msgspec.structs.replace(each, payload=b"") for each in messages])


def written(container: str, document: dict[str, Any]) -> bytes:
    if container == "protobuf":
        made: bytes = KIND(**document).SerializeToString()
        return made
    return msgspec.msgpack.encode(document) if container == "msgpack" else json.dumps(document).encode()


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(CHANGES),
        st.sampled_from(["whole", "whole", "whole", "whole", "whole", "cut", "more"]),
        st.integers(0, 3),  # steps of offsets: some repeat
    ),
    min_size=40,
    max_size=70,
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("container", ["json", "msgpack", "protobuf"])
def test_many_at_a_time_have_the_outcome_of_one_by_one(tmp_path: Path, container: str) -> None:
    """The same records, counts, DLQ records and offsets."""
    (tmp_path / "t.desc").write_bytes(compiled(Schema("PROTOBUF", PROTO)).serialized)
    more = 'schema = "t.desc"\nmessage = "T"' if container == "protobuf" else ""
    text = FORM.format(container=container, more=more)
    if container == "json":
        text = text.replace("float_decimals = { price = 2 }\n", "")
    (tmp_path / "form.toml").write_text(text)

    def outcome(kind: type[FormatDecoder], batch: list[Incoming]) -> Any:
        payloads = kind(load_format(tmp_path / "form.toml", of_messages=True), 1 << 16)
        rig = DecoderRig(QueueSource(), "aaa", "bbb", payloads=payloads)
        try:
            asyncio.run(rig.run(batch))
            records = rig.records().copy()
            records["ts_ring"] = 0
            names = ("foretick_records_unknown_symbol_total", "foretick_records_passed_over_total")
            counts = rig.store.value(names[0]), rig.store.value(names[1], source="test")
            return (
                records.tobytes(),
                rig.dead_letters,
                counts,
                rig.tracker.outstanding(),
                rig.tracker.to_commit(),
            )
        finally:
            rig.close()

    @given(MESSAGES)
    @settings(max_examples=40)
    def run(drawn: list[tuple[dict[str, Any], str, int]]) -> None:
        batch, offset = list[Incoming](), 0
        for n, (change, how, step) in enumerate(drawn):
            at = (START + n * SECOND) // 10**6
            body = {"s": "AAA", "p": 100.25 + n, "q": "2", "i": n, "m": True, "e": "trade", "k": {"t": at}}
            payload = written(container, body | change)
            payload = payload[:-3] if how == "cut" else payload + b"\xc1" if how == "more" else payload
            offset += step
            batch.append(Incoming(TOPIC, 0, offset, b"V:AAA", payload, {}, START + n * SECOND, n % 3))
        assert outcome(FormatDecoder, batch) == outcome(OneByOne, batch)

    run()
