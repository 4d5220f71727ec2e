"""Finding a published answer: by its id in the answers topic, or in a file."""

from pathlib import Path

import msgspec

from feeds.codec import MalformedRecord, decode_message, header_encoding
from feeds.kafka_range import KafkaRange
from feeds.market_data import Answer

ID = "answer_id"


class NoSuchAnswer(Exception):
    """It is not where it was looked for."""


async def by_id(reader: KafkaRange, topic: str, answer_id: str) -> Answer:
    """The newest answer of this id in ``topic``. Raises NoSuchAnswer and BrokerError."""
    found: Answer | None = None
    for partition, span in (await reader.spans([topic])).items():
        async for batch in reader.read(partition, span):
            for message in batch:
                if message.headers.get(ID, b"").decode(errors="replace") != answer_id:
                    continue
                read = decode_message(message.payload, header_encoding(message.headers))
                if isinstance(read, Answer) and (found is None or read.published_at >= found.published_at):
                    found = read
    if found is None:
        raise NoSuchAnswer(f"{topic} has no answer {answer_id!r} (any more)")
    return found


def in_file(path: Path, line: int | None = None) -> Answer:
    """The answer in a file of one answer, or at a ``line`` of one that has an answer a line, from 1.

    Raises NoSuchAnswer.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise NoSuchAnswer(f"cannot read {path}: {error.strerror}") from error
    lines = [each for each in text.splitlines() if each.strip()]
    if line is not None and not 1 <= line <= len(lines):
        raise NoSuchAnswer(f"{path} has no line {line}, it has {len(lines)}")
    try:
        return _answer(text if line is None else lines[line - 1])
    except (MalformedRecord, msgspec.DecodeError) as error:
        if line is None and len(lines) > 1:
            raise NoSuchAnswer(f"{path} has {len(lines)} lines: name one, such as {path}:1") from error
        where = f"line {line} of {path}" if line else str(path)
        raise NoSuchAnswer(f"{where} is no answer in JSON: {error}") from error


def _answer(text: bytes) -> Answer:
    read = decode_message(text)
    if not isinstance(read, Answer):
        raise MalformedRecord("type", f"it is a {type(read).__name__}")
    return read
