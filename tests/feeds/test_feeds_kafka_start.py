"""Where a partition is begun, before a consumer that a test answers for."""

from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.structs import OffsetAndTimestamp

from feeds.kafka_start import KafkaStart

P = TopicPartition("t", 0)
MINUTE_MS = 60_000
FIRST_MS = 28_000_000 * MINUTE_MS
"""Time of the first record."""


class Answers:
    """A consumer of 180 records, one a minute.

    ``silent``: fetches that get no answer in time; ``marks``: offsets from this one on are marks of
    transactions, which a fetch reads over.
    """

    def __init__(self, silent: int = 0, marks: int = 180) -> None:
        self.silent, self.marks, self.at = silent, marks, 0

    def resume(self, partition: TopicPartition) -> None:
        pass

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.at = offset

    async def position(self, partition: TopicPartition) -> int:
        return self.at

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {P: 0}

    async def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
        return {P: OffsetAndTimestamp(-(-(times[P] - FIRST_MS) // MINUTE_MS), times[P])}

    async def getmany(self, partition: TopicPartition, **_: object) -> dict[TopicPartition, list[Any]]:
        if self.silent:
            self.silent -= 1
            return {}
        if self.at >= self.marks:
            self.at = 180
            return {}
        found = ConsumerRecord("t", 0, self.at, FIRST_MS + self.at * MINUTE_MS, 0, None, b"", None, 0, 0, ())
        self.at += 1
        return {P: [found]}


@pytest.mark.parametrize(
    ("consumer", "begins"),
    [
        (Answers(), 109),  # ten minutes before the last committed record
        (Answers(silent=20), 109),  # a busy broker does not say that it has no record there
        (Answers(marks=113), 102),  # 119, 118 and 116 are marks: the next look is at 112
    ],
)
async def test_it_begins_as_long_before_what_is_committed_as_windows_span(
    consumer: Answers, begins: int
) -> None:
    start = KafkaStart("in", "committed", True, lambda: 0)
    start.set_retention(10 * MINUTE_MS * 10**6, skips=False, few=0)
    await start.resume(consumer, P, 120, None)
    assert consumer.at == begins
