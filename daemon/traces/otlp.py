"""Traces in the JSON of OTLP (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding)."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from daemon.traces.recorded_trace import Trace
from daemon.traces.trace_context import read_traceparent

Json = dict[str, Any]
_INTERNAL, _SERVER, _ERROR = 1, 2, 2
"""Of `SpanKind` and `StatusCode`."""
_LAST_ID = (1 << 64) - 1


def encode_traces(traces: Sequence[Trace], resource: Mapping[str, str]) -> bytes:
    """An `ExportTraceServiceRequest`; ``resource``: attributes of the daemon."""
    scope = {"name": "foretick", "version": version("foretick")}
    spans = [span for trace in traces for span in _spans(trace)]
    about = {"attributes": _attributes(resource)}
    made = {"resource": about, "scopeSpans": [{"scope": scope, "spans": spans}]}
    return msgspec.json.encode({"resourceSpans": [made]})


def _spans(trace: Trace) -> Iterator[Json]:
    """The root, and a child for each stage, whose ids follow the root's."""
    root: Json = {
        **_span(trace, trace.span_id, trace.kind, trace.began_at, trace.duration_ns),
        "kind": _SERVER if trace.kind == "request" else _INTERNAL,
        "attributes": _attributes(_about(trace)),
        "links": [
            {"traceId": found.trace_id, "spanId": found.span_id}
            for found in map(read_traceparent, trace.links)
            if found is not None
        ],
    }
    if trace.parent_id:
        root["parentSpanId"] = trace.parent_id
    if trace.error:
        root["status"] = {"code": _ERROR, "message": trace.error}
    yield root
    first = int(trace.span_id, 16)
    for number, stage in enumerate(trace.spans, 1):
        span_id = f"{(first + number - 1) % _LAST_ID + 1:016x}"  # zero is none
        yield {
            **_span(trace, span_id, stage.name, trace.began_at + stage.start_ns, stage.duration_ns),
            "kind": _INTERNAL,
            "parentSpanId": trace.span_id,
        }


def _span(trace: Trace, span_id: str, name: str, start: int, duration: int) -> Json:
    times = {"startTimeUnixNano": str(start), "endTimeUnixNano": str(start + duration)}
    return {"traceId": trace.trace_id, "spanId": span_id, "name": name, **times}


def _about(trace: Trace) -> dict[str, str | int | bool]:
    """What is known of it, by names of our own."""
    known: dict[str, str | int | bool] = {
        "session": trace.session,
        "question": trace.question,
        "answer_id": trace.answer_id,
        "tenant": trace.tenant,
        "data_version": trace.data_version,
        "reused_tokens": trace.reused_tokens,
        "computed_tokens": trace.computed_tokens,
        "cached": trace.cached,
    }
    return {f"foretick.{name}": value for name, value in known.items() if value != ""}


def _attributes(values: Mapping[str, str | int | bool]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: str | int | bool) -> Json:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case _:
            return {"stringValue": value}
