"""The traces of the newest answers and requests, which also go to an exporter. On the event loop."""

from collections import OrderedDict
from collections.abc import Callable

from daemon.traces.recorded_trace import Trace
from daemon.traces.trace_context import TraceContext, Tracer, trace_id_of

MakeTrace = Callable[[], Trace]
"""A trace is made when it is looked at, or off the event loop."""
KEPT = 1000
PER_TRACE = 16
"""Requests of one trace id that are kept."""
Makers = OrderedDict[str, tuple[MakeTrace, ...]]


class RecentTraces:
    """As many of standing questions as of requests: at most ``kept`` trace ids of each.

    So clients that ask often push out none of the answers'. ``export`` gets each that is sampled.
    """

    def __init__(
        self,
        tracer: Tracer | None = None,
        kept: int = KEPT,
        export: Callable[[MakeTrace], None] = lambda make: None,
    ) -> None:
        self.tracer, self.kept = tracer or Tracer(), kept
        self._answers: Makers = OrderedDict()
        self._requests: Makers = OrderedDict()
        self._export = export

    def answered(self, context: TraceContext, make: MakeTrace) -> None:
        """A standing question's answer, in place of the same one, published before."""
        self._keep(self._answers, context, (make,))

    def requested(self, context: TraceContext, make: MakeTrace) -> None:
        """A request has ended; a client may give several the same trace id."""
        earlier = self._requests.get(context.trace_id, ())
        self._keep(self._requests, context, (*earlier, make)[-PER_TRACE:])

    def find(self, name: str) -> list[Trace]:
        """The traces of a trace id or an answer id, oldest first; none where they are not kept any more."""
        trace_id = trace_id_of(name)
        found = (*self._answers.get(trace_id, ()), *self._requests.get(trace_id, ()))
        return sorted((make() for make in found), key=lambda trace: trace.began_at)

    def _keep(self, kept: Makers, context: TraceContext, makers: tuple[MakeTrace, ...]) -> None:
        if context.sampled:
            self._export(makers[-1])
        kept[context.trace_id] = makers
        kept.move_to_end(context.trace_id)
        if len(kept) > self.kept:
            kept.popitem(last=False)
