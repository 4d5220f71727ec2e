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
        found: dict[str, None] = {}
        for each in inputs:
            for offset, header in reversed(self._found.get((each.source, each.topic, each.partition), ())):
                if offset < each.first_offset or len(found) == MOST:
                    break
                read = read_traceparent(header.decode("latin-1")) if offset <= each.last_offset else None
                if read is not None:
                    found[read.traceparent] = None
        return tuple(found)
