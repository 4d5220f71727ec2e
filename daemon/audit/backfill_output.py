"""Where a backfill's answers go, which also says how far it is: a directory of Parquet files, or a topic.

Each has the `Identity` of its answers, so another question, model or configuration cannot be mixed into it.
"""

import re
import time
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from daemon.audit.backfill import CannotBackfill, Identity, Reached
from daemon.audit.broker import Broker
from daemon.audit.published import Row, parquet_schema, row_of
from feeds.codec import decode_message, encode
from feeds.kafka_sink import KafkaSink
from feeds.market_data import Answer
from feeds.source import PublishRefused
from support.durable_file import replacing

IDENTITY = "foretick.backfill"
"""Key of a file's metadata, and header of a message."""
_MOMENT = ("published_at", "staleness_ns", "epoch", "sequence")
"""Columns of the moment of publication, which is none here."""
_ROWS = 10_000
_FLUSH_S = 30.0


class AnswerOutput(Protocol):
    """Takes the answers of one session after the other."""

    async def reached(self, identity: Identity) -> Reached:
        """What it has of this backfill. Raises CannotBackfill where what it has is of another one."""

    async def write(self, answer: Answer) -> None:
        """The next answer of the session of the newest `reached`."""

    async def flush(self) -> None:
        """What was written so far is safe when this returns."""


def _expect(where: object, found: bytes, identity: Identity) -> Identity:
    """The identity that ``found`` is, the same but for a later ``--from``. Raises CannotBackfill."""
    try:
        other = msgspec.json.decode(found, type=Identity)
    except msgspec.MsgspecError:
        why = f"{where} has answers of no backfill, or of another version's"
        raise CannotBackfill(why) from None
    for name in Identity.__struct_fields__:
        his, mine = getattr(other, name), getattr(identity, name)
        if his != mine and not (name == "since" and his < mine):
            why = f"{where} has answers of another {_NAMES.get(name, name)}: {his}, and this one is {mine}"
            raise CannotBackfill(f"{why}. Write to another place")
    return other


_NAMES = {
    "config": "configuration",
    "revision": "revision of the model",
    "computed": "way to compute",
    "together": "set of questions in a pass",
    "begin": "--begin",
    "since": "--from",
}


class ParquetOutput:
    """A directory with files of up to `_ROWS` answers, each whole, named SESSION.FIRST-VERSION.parquet.

    Raises ModuleNotFoundError without pyarrow, OSError for a directory that cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        import pyarrow.parquet

        self._directory, self._parquet, self._schema = directory, pyarrow.parquet, parquet_schema()
        directory.mkdir(parents=True, exist_ok=True)
        self._identity: Identity | None = None
        self._rows: list[Row] = []
        self._flushed = time.monotonic()

    async def reached(self, identity: Identity) -> Reached:
        """See `AnswerOutput`."""
        self._identity = identity
        own = re.compile(rf"{re.escape(_file_name(identity.session))}\.\d+\.parquet")  # `es` is not `es.1m`
        files = sorted(each for each in self._directory.iterdir() if own.fullmatch(each.name))
        if not files:
            return Reached()
        metadata = self._parquet.read_schema(files[-1]).metadata or {}
        self._identity = _expect(self._directory, metadata.get(IDENTITY.encode(), b""), identity)
        columns = self._parquet.read_table(files[-1], columns=["data_version", "as_of"])
        version, as_of = (columns[name][-1] for name in columns.column_names)
        return Reached(version.as_py(), as_of.value, self._identity.since)

    async def write(self, answer: Answer) -> None:
        """See `AnswerOutput`."""
        self._rows.append(row_of(answer) | dict.fromkeys(_MOMENT))
        if len(self._rows) == _ROWS or time.monotonic() - self._flushed > _FLUSH_S:
            await self.flush()

    async def flush(self) -> None:
        """See `AnswerOutput`."""
        self._flushed = time.monotonic()
        if not self._rows:
            return
        assert self._identity is not None  # `reached` is called first
        import pyarrow as pa

        told = {IDENTITY: msgspec.json.encode(self._identity)}
        table = pa.Table.from_pylist(self._rows, self._schema.with_metadata(told))
        name = f"{_file_name(self._identity.session)}.{self._rows[0]['data_version']:012}.parquet"
        with replacing(self._directory / name) as file:
            self._parquet.write_table(table, file)
        self._rows = []


def _file_name(session: str) -> str:
    return quote(session, safe="")


class TopicOutput:
    """A Kafka topic: answers as the daemon publishes them, with the flag `backfill`."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._broker, self._topic = broker, topic
        self._sink: KafkaSink = broker.sink()
        self._headers: dict[str, bytes] = {}

    async def __aenter__(self) -> "TopicOutput":
        await self._sink.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sink.stop()

    async def reached(self, identity: Identity) -> Reached:
        """See `AnswerOutput`. Raises BrokerError."""
        newest = Reached()
        async with self._broker.reader() as reader:
            for partition, span in (await reader.spans([self._topic])).items():
                async for batch in reader.read(partition, span):
                    for message in batch:
                        answer = _backfilled(message.payload)
                        if answer is None or answer.session != identity.session:
                            continue
                        identity = _expect(self._topic, message.headers.get(IDENTITY, b""), identity)
                        newest = max(newest, Reached(answer.data_version, answer.as_of, identity.since))
        self._headers = {IDENTITY: msgspec.json.encode(identity)}
        return newest

    async def write(self, answer: Answer) -> None:
        """See `AnswerOutput`. One after the other, so that none is missing before one that is there."""
        published = msgspec.structs.replace(answer, published_at=time.time_ns())
        headers = {"answer_id": answer.answer_id.encode(), **self._headers}
        try:
            await self._sink.publish(self._topic, answer.symbol.encode(), encode(published), headers)
        except PublishRefused as error:
            raise CannotBackfill(f"{self._topic} refuses version {answer.data_version}: {error}") from error

    async def flush(self) -> None:
        """See `AnswerOutput`: each is acknowledged when `write` returns."""


def _backfilled(payload: bytes) -> Answer | None:
    """The answer of a backfill; None of other messages."""
    try:
        message: Any = decode_message(payload)
    except ValueError:
        return None
    return message if isinstance(message, Answer) and "backfill" in message.flags else None
