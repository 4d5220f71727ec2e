"""The spans that records came from, by their header `traceparent`: links of the answers that read them."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial

from daemon.traces.trace_context import TRACEPARENT, read_traceparent
from feeds.market_data import InputRange
from feeds.source import Incoming

KEPT = 1024
"""Headers of a partition that are kept, the newest ones: seconds of any feed."""
MOST = 8
"""Links of one answer, of its newest records."""


class RecordLinks:
    """On the event loop. ``source`` is empty where there is one only, as in an `InputRange`."""

    def __init__(self, kept: int = KEPT) -> None:
        self._found = defaultdict[tuple[str, str, int], deque[tuple[int, bytes]]](partial(deque, maxlen=kept))

    def keep(self, source: str, messages: Sequence[Incoming]) -> None:
        """Note the headers of these messages, in order of their offsets within a partition."""
        for each in messages:
            if (header := each.headers.get(TRACEPARENT)) is not None:
                self._found[source, each.topic, each.partition].append((each.offset, header))

    def of(self, inputs: Iterable[InputRange]) -> tuple[str, ...]:
        """The headers of records in these ranges, at most `MOST`, newest first; none that cannot be read."""
        if not self._found:
            return ()
        headers = (
            header.decode("latin-1")
            for each in inputs
            for offset, header in reversed(self._found.get((each.source, each.topic, each.partition), ()))
            if each.first_offset <= offset <= each.last_offset
        )
        read = dict.fromkeys(header for header in headers if read_traceparent(header) is not None)
        return tuple(read)[:MOST]
