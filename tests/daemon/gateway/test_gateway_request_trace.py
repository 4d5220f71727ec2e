"""Who may look at a trace, and what a trace of several generations tells."""

from dataclasses import replace

import pytest

from daemon.api.generation import Failed, Finished, Generate, Turn
from daemon.api.messages import GetTrace, QueryError, ReplyMetadata
from daemon.gateway.request_trace import RequestTrace, visible_traces
from daemon.tenants import LOCAL, Client, Tenant
from daemon.traces.recent_traces import RecentTraces
from daemon.traces.recorded_trace import Passes, Trace, TraceKind
from daemon.traces.trace_context import TraceContext

WEST, EAST = Tenant("west", ("w*",)), Tenant("east", ("*",))
CHIEF = Tenant("chief", ("w*",), operator=True)
CONTEXT = TraceContext("4" * 32, "5" * 16, "6" * 16)


def finished(number: int, **members: object) -> Finished:
    known: dict[str, object] = {
        "text": "",
        "finish": "stop",
        "stop": None,
        "metadata": ReplyMetadata(data_version=3),
    }
    known |= {"prompt_tokens": 10, "reused_tokens": 4, "answer_tokens": 1, "passes": Passes(1, 2, 3, 4)}
    return Finished(id=number, **(known | members))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "session", "tenant", "seen_by"),
    [
        ("answer", "west", "", {"", "west", "east", "chief"}),
        ("answer", "other", "", {"", "east"}),
        ("request", "west", "west", {"", "west", "chief"}),
        ("request", "west", "east", {"", "east", "chief"}),
        ("request", "", "west", {"", "west", "chief"}),
    ],
)
def test_a_tenant_sees_answers_of_its_sessions_and_its_own_requests(
    kind: TraceKind, session: str, tenant: str, seen_by: set[str]
) -> None:
    traces = RecentTraces(kept=7)
    trace = Trace(
        trace_id="4" * 32,
        span_id="5" * 16,
        kind=kind,
        session=session,
        tenant=tenant,
        began_at=1,
        duration_ns=1,
    )
    (traces.answered if kind == "answer" else traces.requested)(CONTEXT, lambda: trace)
    for each in (LOCAL, WEST, EAST, CHIEF):
        asked = GetTrace(1, "4" * 32), Client(each, "")
        if each.name in seen_by:
            assert visible_traces(traces, *asked).traces == (trace,)
        else:
            with pytest.raises(QueryError, match=r"traces.kept is 7.*unknown_trace"):
                visible_traces(traces, *asked)


def test_a_request_is_kept_when_its_last_generation_has_ended() -> None:
    traces, events = RecentTraces(), list[object]()
    asked = [Generate(session="s", turns=(Turn("user", "a long text"),))] * 3
    request = replace(RequestTrace.of(traces, CONTEXT, asked, "west"), began=0)
    for number, event in enumerate((finished(7), Failed(8, "timeout", "late"))):
        request.hear(number, events.append, event)
    assert traces.find(CONTEXT.trace_id) == []
    request.hear(2, events.append, finished(9, reused_tokens=1))
    (trace,) = traces.find(CONTEXT.trace_id)
    assert (trace.parent_id, trace.tenant, trace.session, trace.error) == ("6" * 16, "west", "s", "timeout")
    assert (trace.reused_tokens, trace.computed_tokens, trace.data_version) == (5, 7 + 10, 3)
    assert [span.name for span in trace.spans if span.name.startswith("prefill")] == [
        "prefill 1",
        "prefill 2",
    ]
    assert len(events) == 3
