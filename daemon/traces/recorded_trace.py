"""One trace as it is kept, exported and shown. The clients have these structs, too."""

from typing import Literal

import msgspec

TraceKind = Literal["answer", "request", "forwarded"]


class Passes(msgspec.Struct, frozen=True):
    """When a request was where in the engine, monotonic ns; 0: never.

    ``scheduled``: in its first pass; ``prefilled``: all its tokens are in KV; ``finished``: its last one is
    there.
    """

    queued: int = 0
    scheduled: int = 0
    prefilled: int = 0
    finished: int = 0


class Span(msgspec.Struct, frozen=True):
    """One stage, ns: ``start_ns`` after the trace's begin."""

    name: str
    start_ns: int
    duration_ns: int


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One answer or request, from its first moment to its last.

    ``began_at``: ns since 1970. ``links``: the `traceparent` of records behind it, or of the answer that was
    ready. ``error``: the code of a failure. ``tenant``: who asked.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    kind: TraceKind
    session: str = ""
    question: str = ""
    answer_id: str = ""
    tenant: str = ""
    data_version: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    cached: bool = False
    error: str = ""
    began_at: int
    duration_ns: int
    spans: tuple[Span, ...] = ()
    links: tuple[str, ...] = ()
