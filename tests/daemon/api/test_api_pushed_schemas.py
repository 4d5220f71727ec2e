"""Pushed bodies whose schema a registry has: it is asked for once, and waited for a while."""

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema as Stored
from confluent_kafka.schema_registry import SchemaRegistryError
from starlette.routing import Route

from daemon.api import pushes as pushing
from daemon.api.pushes import Pushes
from feeds.batch_body import BodyFormat
from feeds.codec import decode_record
from feeds.market_data import Trade
from feeds.payloads.schema_registry import SchemaRegistry
from feeds.push_source import PushedSource, PushLimits
from metrics.store import MetricStore
from tests.kit.http import http_server, request

SCHEMA = {
    "type": "record",
    "name": "Trade",
    "fields": [
        {"name": "t", "type": "long"},
        {"name": "s", "type": "string"},
        {"name": "p", "type": "string"},
        {"name": "q", "type": "string"},
    ],
}
FORM = """
description = "trades"
container = "avro"
[[records]]
kind = "trade"
venue = "V"
time = { field = "t", format = "epoch-ms" }
fields = { symbol = "s", price = "p", size = "q" }
"""
NOW_MS = 1_723_161_255_000


class Client:
    """A registry's client: it knows one schema, and does not answer while it is ``away``."""

    def __init__(self) -> None:
        self.away, self.asked = False, 0

    def get_schema(self, number: int) -> Any:
        self.asked += 1
        if self.away:
            raise OSError("no route")
        if number != 7:
            raise SchemaRegistryError(404, 40403, "not found")
        return Stored(json.dumps(SCHEMA), "AVRO")


def body(number: int, symbol: str) -> bytes:
    file = io.BytesIO()
    fastavro.schemaless_writer(file, SCHEMA, {"t": NOW_MS, "s": symbol, "p": "101.5", "q": "2"})
    return b"\0" + number.to_bytes(4, "big") + file.getvalue()


async def test_a_body_is_read_by_the_schema_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "desk.toml").write_text(FORM)
    client = Client()
    form = BodyFormat.load(str(tmp_path / "desk.toml"), SchemaRegistry(client))
    source = PushedSource("http", PushLimits(formats={"desk": form}))
    await source.start()
    store = MetricStore.local({"source": ["http"], "session": []})
    taken = Pushes({"http": source}, store, 1 << 16)
    batches = source.batches()
    async with http_server(Route("/v1/data", taken.serve, methods=["POST"])) as server:

        async def push(sent: bytes) -> tuple[int, Any]:
            reply = await request(
                server.port, "POST", "/v1/data?format=desk", sent, {"content-type": "application/avro"}
            )
            return reply.status, json.loads(reply.body)

        for symbol in ("AAA", "BBB"):
            status, told = await push(body(7, symbol))
            assert (status, told["accepted"], told["refused"]) == (202, 1, 0), told
        assert client.asked == 1
        (*_, newest) = await anext(batches)
        found = decode_record(newest.payload, "json", 1 << 16)
        assert isinstance(found, Trade)
        assert (found.symbol, str(found.price)) == ("BBB", "101.5")
        status, told = await push(body(9, "AAA"))
        assert (status, told["errors"][0]["reason"]) == (422, "schema")
        client.away = True
        monkeypatch.setattr(pushing, "_REGISTRY_S", 0.05)
        status, told = await push(body(8, "AAA"))
        assert status == 429
        assert "does not answer" in json.dumps(told)
    await source.stop()
