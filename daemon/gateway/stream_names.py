"""The streams that records were read from, by their numbers in the ring (`ingest.record.stream_number`)."""

from collections.abc import Sequence

from daemon.protocol import NameStream
from feeds.market_data import InputRange
from ingest.record import ReadRange, stream_number


class StreamNames:
    """Their names. ``several``: there are several sources, so that ranges name theirs."""

    def __init__(self, *, several: bool = False) -> None:
        self._several = several
        self._names: dict[int, NameStream] = {}

    def name(self, *streams: NameStream) -> None:
        """Records are read from these streams, or were, before the snapshot that they are in."""
        for each in streams:
            self._names[stream_number(each.source, each.topic, each.partition)] = each

    def ranges(self, reads: Sequence[ReadRange]) -> list[InputRange]:
        """The same with names; none where a stream has no name."""
        if any(each.stream not in self._names for each in reads):
            return []
        return [self._range(self._names[each.stream], each) for each in reads]

    def find(self, number: int) -> NameStream | None:
        """The stream with this number; None where it has no name."""
        return self._names.get(number)

    def _range(self, stream: NameStream, read: ReadRange) -> InputRange:
        source = stream.source if self._several else ""
        return InputRange(stream.topic, stream.partition, read.first, read.last, source)
