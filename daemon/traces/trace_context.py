"""Which trace a piece of work belongs to: W3C Trace Context (https://www.w3.org/TR/trace-context-1/)."""

import hashlib
import random
import re
from contextvars import ContextVar

import msgspec

TRACEPARENT = "traceparent"
"""Name of the header, over HTTP and on Kafka's records."""
MAX_CHARS = 512
"""Of a header that is read; a later version of the standard may be longer than the 55 of this one."""
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_ALL = 1 << 64


class TraceContext(msgspec.Struct, frozen=True):
    """The root span of a piece of work: its trace, its own id, and its parent's, empty without one.

    ``sampled``: its trace is to be exported, which whoever is called with it should do, too.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = False

    @property
    def traceparent(self) -> str:
        """The header that names this span as the parent of what follows."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


current: ContextVar[TraceContext | None] = ContextVar("current trace", default=None)
"""Of the request that is being answered."""


def read_traceparent(header: str) -> TraceContext | None:
    """The caller's span; None for a header that the standard tells to ignore (section 3.2.2)."""
    found = _FORM.fullmatch(header) if len(header) <= MAX_CHARS else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, sampled=bool(int(flags, 16) & 1))


def trace_id_of(name: str) -> str:
    """A trace id as it is; of an answer id, that of the answer's trace: the first half of its SHA-256."""
    return name if _TRACE_ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:32]


class Tracer:
    """Begins traces, and has ``ratio`` of them exported, of those that no caller began. 0: none."""

    def __init__(self, ratio: float = 0.0) -> None:
        self._below = int(ratio * _ALL)

    def begin(self, traceparent: str = "") -> TraceContext:
        """Of a request: a span of the caller's trace, or the root of another one."""
        span_id = f"{random.getrandbits(64) or 1:016x}"
        if traceparent and (caller := read_traceparent(traceparent)) is not None:
            return TraceContext(caller.trace_id, span_id, caller.span_id, caller.sampled)
        trace_id = f"{random.getrandbits(128) or 1:032x}"
        return TraceContext(trace_id, span_id, sampled=self._samples(trace_id))

    def of_answer(self, answer_id: str) -> TraceContext:
        """Of a standing question's answer: by its id, so that it is the same when it is published again."""
        digest = hashlib.sha256(answer_id.encode()).hexdigest()
        return TraceContext(digest[:32], digest[32:48], sampled=self._samples(digest[:32]))

    def _samples(self, trace_id: str) -> bool:
        return int(trace_id[16:], 16) < self._below
