"""Published answers of a topic as rows of a table: a line each, in CSV, JSON lines or Parquet."""

import csv
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from daemon.audit.bar_table import FROM_BAR, BarTable
from daemon.audit.broker import Broker
from feeds.codec import decode_message
from feeds.kafka_range import KafkaRange, OffsetsGone
from feeds.market_data import Answer
from feeds.source import Incoming, Partition

COLUMNS = (
    "as_of", "session", "symbol", "question", "data_version", "text", "value", "choice", "probability",
    "choice_set", "uncalibrated", "act", "abstain_reason", "logit_gap", "flags", "model", "model_revision",
    "published_at", "staleness_ns", "answer_id", "epoch", "sequence",
)  # fmt: skip
"""Members of an answer, in the order of the table's columns; times are ns since 1970."""
BAR_COLUMNS = tuple(f"bar_{name}" for name in FROM_BAR)
RIGHT_COLUMNS = ("right", "is_right")
_TEXT_LISTS = ("choice_set", "flags")
_CHUNK = 10_000
_APART_NS = 60_000_000_000

Row = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """Which answers: of these sessions and questions (all where empty), by the time of their data, ns."""

    sessions: frozenset[str] = frozenset()
    questions: frozenset[str] = frozenset()
    since_ns: int | None = None
    until_ns: int | None = None

    def has(self, answer: Answer) -> bool:
        """Whether it is one of them."""
        return (
            (self.since_ns is None or self.since_ns <= answer.as_of)
            and (self.until_ns is None or answer.as_of < self.until_ns)
            and (not self.sessions or answer.session in self.sessions)
            and (not self.questions or answer.question in self.questions)
        )


async def published(broker: Broker, topic: str, wanted: Wanted) -> AsyncGenerator[Answer, None]:
    """The answers of a topic, partition by partition; one that was published again comes once.

    An answer is published after its data, so reading begins where the topic's clock says ``since_ns``, and a
    minute before, for clocks that are apart. What retention deletes meanwhile is missing. Raises BrokerError.
    """
    async with broker.reader() as reader:
        for partition, span in (await reader.spans([topic])).items():
            first: int | None = span.start
            if wanted.since_ns is not None:
                first = await reader.offset_at(partition, max(0, wanted.since_ns - _APART_NS))
            if first is None:
                continue
            seen = set[str]()  # an answer is published again on its own partition
            async for batch in _left(reader, partition, range(first, span.stop)):
                for record in batch:
                    answer = _answer_in(record.payload)
                    if answer is not None and wanted.has(answer) and answer.answer_id not in seen:
                        seen.add(answer.answer_id)
                        yield answer


async def _left(
    reader: KafkaRange, partition: Partition, span: range
) -> AsyncGenerator[list[Incoming], None]:
    """The records of a span, from where the topic begins now, if that is later."""
    while True:
        try:
            async for batch in reader.read(partition, span):
                yield batch
                span = range(batch[-1].offset + 1, span.stop)
        except OffsetsGone as error:
            span = range(max(error.first, span.start), span.stop)
        else:
            return


def _answer_in(payload: bytes) -> Answer | None:
    try:
        message = decode_message(payload)
    except ValueError:
        return None
    return message if isinstance(message, Answer) else None


def row_of(answer: Answer) -> Row:
    """An answer's members by column."""
    return {name: getattr(answer, name) for name in COLUMNS}


def bar_row(answer: Answer, bars: BarTable) -> Row:
    """The bar that it was read from, by column; null where that is not there."""
    found = bars.row(answer.session, answer.symbol, answer.as_of, answer.answer_id)
    values = [None] * len(FROM_BAR) if found is None else [getattr(found, name) for name in FROM_BAR]
    return dict(zip(BAR_COLUMNS, values, strict=True))


def right_row(answer: Answer, right: str | None) -> Row:
    """What was right, by column."""
    return {"right": right, "is_right": None if right is None else answer.text == right}


@contextmanager
def csv_writer(file: IO[str], columns: Sequence[str] = COLUMNS) -> Iterator[Callable[[Row], None]]:
    """Rows as lines under a header; lists joined by a space, what is unknown empty."""
    writer = csv.writer(file)
    writer.writerow(columns)

    def write(row: Row) -> None:
        plain = {name: " ".join(row[name] or ()) for name in _TEXT_LISTS}
        writer.writerow([({**row, **plain})[name] for name in columns])

    yield write


@contextmanager
def json_writer(file: IO[str], columns: Sequence[str] = COLUMNS) -> Iterator[Callable[[Row], None]]:
    """Rows as JSON objects, a line each."""
    encoder = msgspec.json.Encoder()
    yield lambda row: print(encoder.encode({name: row[name] for name in columns}).decode(), file=file)


def parquet_schema(columns: Sequence[str] = COLUMNS) -> Any:
    """Types of the columns (`pyarrow.Schema`). Raises ModuleNotFoundError without pyarrow."""
    import pyarrow as pa

    texts = (
        *("session", "symbol", "question", "text", "value", "choice"),
        *("model", "model_revision", "answer_id", "uncalibrated", "abstain_reason"),
        *BAR_COLUMNS,
        "right",
    )
    reals = ("probability", "logit_gap")
    kinds = {
        **dict.fromkeys(COLUMNS, pa.int64()),
        **dict.fromkeys(texts, pa.string()),
        **dict.fromkeys(reals, pa.float64()),
        **dict.fromkeys(("act", "is_right"), pa.bool_()),
        **dict.fromkeys(_TEXT_LISTS, pa.list_(pa.string())),
        **dict.fromkeys(("as_of", "published_at"), pa.timestamp("ns", "UTC")),
    }
    return pa.schema([(name, kinds[name]) for name in columns])


@contextmanager
def parquet_writer(path: Path, columns: Sequence[str] = COLUMNS) -> Iterator[Callable[[Row], None]]:
    """Rows in a Parquet file, 10,000 a group. Raises ModuleNotFoundError without pyarrow."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = parquet_schema(columns)
    waiting: list[Row] = []
    with ParquetWriter(path, schema) as file:

        def flush() -> None:
            file.write_table(pa.Table.from_pylist(waiting, schema))
            waiting.clear()

        def write(row: Row) -> None:
            waiting.append(row)
            if len(waiting) == _CHUNK:
                flush()

        yield write
        if waiting:
            flush()


WRITERS: dict[str, Callable[..., Any]] = {
    ".csv": csv_writer,
    ".jsonl": json_writer,
    ".parquet": parquet_writer,
}
"""By the file's suffix."""
