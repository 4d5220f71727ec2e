"""Records of producers that are not ours, over real Kafka and a real schema registry, up to the ring."""

import asyncio
import base64
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from feeds.connectors.kafka import KafkaSourceConnector
from feeds.payloads.protobuf import compiled
from feeds.payloads.schema_registry import Schema as OwnSchema
from feeds.payloads.settings import FormatRule, RegistrySettings
from tests.kit import until
from tests.kit.fixtures import RealKafka
from tests.kit.gateway import DecoderRig
from tests.kit.kafka import create_topics
from tests.kit.registry import RegistryServer

pytestmark = pytest.mark.kafka
TRADES = 40
KINDS = (
    "json", "avro", "java", "protobuf", "descriptors", "java_protobuf", "debezium", "msgpack", "array", "csv"
)  # fmt: skip
MIXED = ("array", "csv")
"""Those of one topic, which a header tells apart."""
AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Trade",
    "namespace": "md",
    "fields": [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "symbol", "type": "string"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 4}},
        {"name": "size", "type": "double"},
    ],
}
COMMON = 'syntax = "proto3"; package md; message Amount { double value = 1; }'
PROTOBUF = """
syntax = "proto3";
package md;
import "common.proto";
import "google/protobuf/timestamp.proto";
message Trade { google.protobuf.Timestamp at = 1; string symbol = 2; string price = 3; Amount size = 4; }
"""
FORM = """
description = "{name}"
container = "{container}"
[[records]]
kind = "trade"
venue = "V"
{more}
"""
FORMS = {
    "json": FORM.format(
        name="console", container="json",
        more='time = { field = "at", format = "iso" }\n'
        'fields = { symbol = "$topic", price = "price", size = "size" }',
    ),
    "avro": FORM.format(
        name="avro", container="avro",
        more='time = { field = "at", format = "epoch-us" }\nfloat_decimals = { size = 3 }\n'
        'fields = { symbol = "symbol", price = "price", size = "size" }',
    ),
    "protobuf": FORM.format(
        name="protobuf", container="protobuf",
        more='time = { field = "at", format = "epoch-s" }\nfloat_decimals = { size = 3 }\n'
        'fields = { symbol = "symbol", price = "price", size = "size.value" }',
    ),
    "debezium": FORM.format(
        name="debezium", container="json",
        more='time = { field = "payload.after.at", format = "epoch-us" }\n'
        'fields = { symbol = "$key", price = "payload.after.price", size = "payload.after.size" }\n'
        'match = { field = "payload.op", values = ["c"] }',
    ),
    "msgpack": FORM.format(
        name="msgpack", container="msgpack",
        more='time = { field = "at", format = "epoch-us" }\nfloat_decimals = { size = 3 }\n'
        'fields = { symbol = "symbol", price = "price", size = "size" }',
    ),
    "array": FORM.format(
        name="array", container="json",
        more='time = { field = "at", format = "epoch-us" }\neach = "trades"\n'
        'fields = { symbol = "$.symbol", price = "price", size = "size" }',
    ),
    "csv": FORM.format(
        name="lines", container="csv\"\nheader = false\ndelimiter = \";",
        more='time = { field = 0, format = "epoch-us" }\nfields = { symbol = 1, price = 2, size = 3 }',
    ),
}  # fmt: skip
USED_BY = {
    "json": ["json"],
    "avro": ["avro", "java"],
    "protobuf": ["protobuf", "descriptors", "java_protobuf"],
    "debezium": ["debezium"],
    "msgpack": ["msgpack"],
}
JAVA = """
import io.apicurio.registry.serde.avro.AvroKafkaSerializer
import org.apache.avro.Schema
import org.apache.avro.generic.GenericData
import org.apache.kafka.clients.producer.KafkaProducer
import org.apache.kafka.clients.producer.ProducerRecord
import org.apache.kafka.common.serialization.StringSerializer
import java.nio.ByteBuffer

def (bootstrap, registry, topic, text, rows) = args as List
def schema = new Schema.Parser().parse(text)
def settings = [
    "bootstrap.servers": bootstrap, "compression.type": "lz4",
    "apicurio.registry.url": registry, "apicurio.registry.auto-register": "true",
    "apicurio.registry.headers.enabled": "false", "apicurio.registry.use-id": "contentId",
]
def serializer = new AvroKafkaSerializer()
serializer.configure(settings, false)
def producer = new KafkaProducer(settings, new StringSerializer(), serializer)
rows.split(";").each { row ->
    def (at, symbol, price, size) = row.split(",") as List
    def record = new GenericData.Record(schema)
    record.put("at", at as long)
    record.put("symbol", symbol)
    record.put("price", ByteBuffer.wrap(new BigDecimal(price).setScale(4).unscaledValue().toByteArray()))
    record.put("size", size as double)
    producer.send(new ProducerRecord(topic, symbol, record)).get()
}
producer.close()
"""

JAVA_PROTOBUF = """
import com.google.protobuf.DescriptorProtos.FileDescriptorSet
import com.google.protobuf.Descriptors.FileDescriptor
import com.google.protobuf.DynamicMessage
import com.google.protobuf.Timestamp
import io.apicurio.registry.serde.protobuf.ProtobufKafkaSerializer
import org.apache.kafka.clients.producer.KafkaProducer
import org.apache.kafka.clients.producer.ProducerRecord
import org.apache.kafka.common.serialization.StringSerializer

def (bootstrap, registry, topic, descriptors, rows) = args as List
def known = ["google/protobuf/timestamp.proto": Timestamp.descriptor.file]
def last = null
FileDescriptorSet.parseFrom(descriptors.decodeBase64()).fileList.each { file ->
    if (!known[file.name]) {
        last = FileDescriptor.buildFrom(file, file.dependencyList.collect { known[it] } as FileDescriptor[])
        known[file.name] = last
    }
}
def settings = [
    "bootstrap.servers": bootstrap, "compression.type": "gzip",
    "apicurio.registry.url": registry, "apicurio.registry.auto-register": "true",
    "apicurio.registry.headers.enabled": "false", "apicurio.registry.use-id": "contentId",
]
def serializer = new ProtobufKafkaSerializer()
serializer.configure(settings, false)
def producer = new KafkaProducer(settings, new StringSerializer(), serializer)
def trade = last.findMessageTypeByName("Trade"), amount = last.findMessageTypeByName("Amount")
rows.split(";").each { row ->
    def (at, symbol, price, size) = row.split(",") as List
    def micros = at as long
    def nanos = (micros % 1000000 * 1000) as int
    def time = Timestamp.newBuilder().setSeconds(micros.intdiv(1000000)).setNanos(nanos)
    def value = DynamicMessage.newBuilder(amount).setField(amount.findFieldByName("value"), size as double)
    def record = DynamicMessage.newBuilder(trade)
        .setField(trade.findFieldByName("at"), time.build())
        .setField(trade.findFieldByName("symbol"), symbol)
        .setField(trade.findFieldByName("price"), price)
        .setField(trade.findFieldByName("size"), value.build())
    producer.send(new ProducerRecord(topic, symbol, record.build())).get()
}
producer.close()
"""
WHOLE = """
syntax = "proto3";
package md;
import "google/protobuf/timestamp.proto";
message Amount { double value = 1; }
message Trade { google.protobuf.Timestamp at = 1; string symbol = 2; string price = 3; Amount size = 4; }
"""


def moments() -> list[int]:
    """Event times in us, one a second, up to now."""
    now = time.time_ns() // 1000
    return [now - (TRADES - n) * 1_000_000 for n in range(TRADES)]


def price(n: int) -> str:
    return f"{100 + n}.{n % 10}5"


def units(n: int) -> tuple[int, int]:
    """Price and size of trade ``n`` in 1e-9."""
    return (100 + n) * 10**9 + (n % 10) * 10**8 + 5 * 10**7, (n + 1) * 10**9 + 125 * 10**6


@pytest.fixture(scope="module")
def registry() -> Iterator[RegistryServer]:
    with RegistryServer() as made:
        yield made


def send_json(kafka: RealKafka, topic: str, times: list[int]) -> None:
    """By Kafka's own console producer, packed by zstd."""
    rows = [
        json.dumps({"at": _iso(at), "price": price(n), "size": "SIZE"}).replace('"SIZE"', f"{n + 1}.125")
        for n, at in enumerate(times)
    ]
    assert kafka.server is not None
    kafka.server.run_tool(
        "org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", kafka.bootstrap, "--topic", topic,
        "--compression-codec", "zstd", text="\n".join(rows) + "\n",
    )  # fmt: skip


def _iso(at: int) -> str:
    seconds, micros = divmod(at, 10**6)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{micros:06}Z"


def produce(
    kafka: RealKafka, topic: str, payloads: Sequence[bytes | None], key: str = "", **headers: str
) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "compression.type": "snappy"})
    for payload in payloads:
        producer.produce(topic, payload, key, headers=headers)
    assert producer.flush(30) == 0


def send_avro(kafka: RealKafka, registry: RegistryServer, topic: str, symbol: str, times: list[int]) -> None:
    """By confluent-kafka; the second half in a schema with another member, after one that is gone."""
    client = SchemaRegistryClient({"url": registry.url})
    newer = {**AVRO, "fields": [{"name": "flags", "type": "int", "default": 0}, *AVRO["fields"]]}
    half, payloads = TRADES // 2, list[bytes | None]()
    for schema, numbers in ((AVRO, range(half)), (newer, range(half, TRADES))):
        serialize = AvroSerializer(client, json.dumps(schema))
        for n in numbers:
            value = {
                "at": times[n],
                "symbol": symbol,
                "price": Decimal(price(n)),
                "size": n + 1.125,
                "flags": 1,
            }
            payloads.append(serialize({**value, "flags": 1}, SerializationContext(topic, MessageField.VALUE)))
    produce(kafka, topic, payloads)


def send_protobuf(
    kafka: RealKafka, registry: RegistryServer, topic: str, symbol: str, times: list[int]
) -> None:
    """In the registry's frame; the schema imports another one of the registry, and one of Protobuf."""
    client = SchemaRegistryClient({"url": registry.url})
    client.register_schema("common.proto", Schema(COMMON, "PROTOBUF"))
    common = SchemaReference("common.proto", "common.proto", 1)
    number = client.register_schema(f"{topic}-value", Schema(PROTOBUF, "PROTOBUF", [common]))
    own = OwnSchema("PROTOBUF", PROTOBUF, {"common.proto": OwnSchema("PROTOBUF", COMMON)})
    kind, payloads = compiled(own).kind("md.Trade"), list[bytes | None]()
    for n, at in enumerate(times):
        value: Any = kind(symbol=symbol, price=price(n))
        value.size.value = n + 1.125
        value.at.FromMicroseconds(at)
        payloads.append(b"\0" + number.to_bytes(4, "big") + b"\0" + value.SerializeToString())
    produce(kafka, topic, payloads)


def send_debezium(kafka: RealKafka, topic: str, symbol: str, times: list[int]) -> None:
    """What its connector writes of a table, with deletes, their tombstones, and a heartbeat of its own."""
    payloads: list[bytes | None] = []
    for n, at in enumerate(times):
        after = {"at": at, "price": price(n), "size": f"{n + 1}.125"}
        payload = {"op": "c", "before": None, "after": after, "source": {"table": "trades"}}
        payloads.append(json.dumps({"schema": {"type": "struct"}, "payload": payload}).encode())
        if n % 10 == 0:
            gone = {"op": "d", "before": after, "after": None}
            payloads += [json.dumps({"schema": None, "payload": gone}).encode(), None]
    produce(kafka, topic, payloads, key=symbol)


def send_descriptors(
    kafka: RealKafka, registry: RegistryServer, topic: str, symbol: str, times: list[int]
) -> None:
    """By confluent-kafka's serializer, which registers compiled schemas."""
    client = SchemaRegistryClient({"url": registry.url})
    own = OwnSchema("PROTOBUF", PROTOBUF, {"common.proto": OwnSchema("PROTOBUF", COMMON)})
    kind = compiled(own).kind("md.Trade")
    serialize = ProtobufSerializer(kind, client, {"use.deprecated.format": False})
    payloads: list[bytes | None] = []
    for n, at in enumerate(times):
        value: Any = kind(symbol=symbol, price=price(n))
        value.size.value = n + 1.125
        value.at.FromMicroseconds(at)
        payloads.append(serialize(value, SerializationContext(topic, MessageField.VALUE)))
    produce(kafka, topic, payloads)


def send_java_protobuf(
    kafka: RealKafka, registry: RegistryServer, topic: str, symbol: str, times: list[int]
) -> None:
    """By Apicurio's serializer, which names the message in front of it, and registers the schema."""
    rows = ";".join(f"{at},{symbol},{price(n)},{n + 1}.125" for n, at in enumerate(times))
    descriptors = base64.b64encode(compiled(OwnSchema("PROTOBUF", WHOLE)).serialized).decode()
    registry.run_script(JAVA_PROTOBUF, kafka.bootstrap, registry.native, topic, descriptors, rows)


def send_msgpack(kafka: RealKafka, topic: str, symbol: str, times: list[int]) -> None:
    rows = [{"at": at, "symbol": symbol, "price": price(n), "size": n + 1.125} for n, at in enumerate(times)]
    produce(kafka, topic, [msgspec.msgpack.encode(row) for row in rows])


def send_mixed(kafka: RealKafka, topic: str, names: Mapping[str, str], times: list[int]) -> None:
    """Ten trades a message, as an array in JSON and as lines; a header says which."""
    arrays, texts = list[bytes](), list[bytes]()
    for first in range(0, TRADES, 10):
        part = range(first, first + 10)
        trades = [{"at": times[n], "price": price(n), "size": f"{n + 1}.125"} for n in part]
        arrays.append(json.dumps({"symbol": names["array"], "trades": trades}).encode())
        lines = [f"{times[n]};{names['csv']};{price(n)};{n + 1}.125\n" for n in part]
        texts.append("".join(lines).encode())
    produce(kafka, topic, arrays, form="array")
    produce(kafka, topic, texts, form="csv")


async def test_every_encoding_over_real_kafka(
    real_kafka: RealKafka, registry: RegistryServer, tmp_path: Path
) -> None:
    suffix = uuid.uuid4().hex[:8]
    topics = {kind: f"{'mixed' if kind in MIXED else kind}.{suffix}" for kind in KINDS}
    await create_topics(real_kafka.bootstrap, dict.fromkeys(topics.values(), 1))
    for name, text in FORMS.items():
        (tmp_path / f"{name}.toml").write_text(text)
    names = {kind: kind.upper() for kind in KINDS} | {"json": topics["json"]}
    times = moments()
    rows = ";".join(f"{at},{names['java']},{price(n)},{n + 1}.125" for n, at in enumerate(times))
    native = (real_kafka.bootstrap, registry.native, topics["java"], json.dumps(AVRO), rows)
    await asyncio.to_thread(registry.run_script, JAVA, *native)
    await asyncio.to_thread(send_json, real_kafka, topics["json"], times)
    await asyncio.to_thread(send_avro, real_kafka, registry, topics["avro"], names["avro"], times)
    await asyncio.to_thread(send_protobuf, real_kafka, registry, topics["protobuf"], names["protobuf"], times)
    own = topics["descriptors"], names["descriptors"], times
    await asyncio.to_thread(send_descriptors, real_kafka, registry, *own)
    own = topics["java_protobuf"], names["java_protobuf"], times
    await asyncio.to_thread(send_java_protobuf, real_kafka, registry, *own)
    await asyncio.to_thread(send_debezium, real_kafka, topics["debezium"], names["debezium"], times)
    await asyncio.to_thread(send_msgpack, real_kafka, topics["msgpack"], names["msgpack"], times)
    await asyncio.to_thread(send_mixed, real_kafka, topics["csv"], names, times)
    unknown = b"\0" + (99999).to_bytes(4, "big") + b"\0"
    await asyncio.to_thread(produce, real_kafka, topics["avro"], [unknown])
    connector = KafkaSourceConnector(
        bootstrap=real_kafka.bootstrap,
        topics=tuple(dict.fromkeys(topics.values())),
        group=f"formats.{suffix}",
        progress_topic=f"progress.{suffix}",
        formats=(
            *(
                FormatRule(str(tmp_path / f"{name}.toml"), tuple(topics[kind] for kind in kinds))
                for name, kinds in USED_BY.items()
            ),
            *(FormatRule(str(tmp_path / f"{name}.toml"), header=f"form={name}") for name in MIXED),
        ),
        registry=RegistrySettings(url=registry.url),
    )  # fmt: skip
    findings = await asyncio.to_thread(lambda: list(connector.check()))
    assert [each.message for each in findings if not each.ok] == []
    source = connector.open("test", 1.0)
    rig = DecoderRig(source, *names.values(), upper=False, payloads=connector.payloads(1 << 20))
    await source.start()
    reading = asyncio.create_task(rig.ingest.run())
    try:
        wanted = len(KINDS) * TRADES
        await until(lambda: rig.passed() >= wanted and bool(rig.dead_letters), 60)
        found = rig.records()
        for number, kind in enumerate(KINDS):
            own = found[found["symbol"] == number]
            assert own["ts_event"].tolist() == [at * 1000 for at in times], kind
            assert list(zip(own["a"].tolist(), own["b"].tolist(), strict=True)) == [
                units(n) for n in range(TRADES)
            ], kind
        (refused,) = rig.dead_letters
        assert (refused.reason, refused.topic) == ("schema", topics["avro"])
        assert "99999" in refused.error
        assert rig.store.value("foretick_records_passed_over_total", source="test") == TRADES // 10
        assert (
            rig.store.value("foretick_messages_empty_total", source="test", kind="tombstone") == TRADES // 10
        )
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await source.stop()
        rig.close()
