"""Traces of clients' requests: what is kept of them, and who may look at them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Self

from daemon import protocol
from daemon.api import messages
from daemon.api.generation import Failed, Finished, Generate
from daemon.gateway.pending import OnReply
from daemon.tenants import Client, Tenant
from daemon.traces.recent_traces import RecentTraces
from daemon.traces.recorded_trace import Passes, Trace
from daemon.traces.spans import request_spans
from daemon.traces.trace_context import TraceContext, Tracer
from feeds.market_data import Answer


class _End(NamedTuple):
    """What is kept of a generation: none of its texts. ``passes``: None of one that failed, by ``code``."""

    passes: Passes | None = None
    data_version: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    code: str = ""

    @classmethod
    def of(cls, event: Finished | Failed) -> Self:
        """Of its last event."""
        if isinstance(event, Failed):
            return cls(code=event.code)
        version = event.metadata.data_version or 0
        return cls(event.passes, version, event.reused_tokens, event.computed_tokens)


@dataclass(frozen=True)
class RequestTrace:
    """Of the ``generations`` of one request: it is kept when the last one has ended."""

    traces: RecentTraces
    context: TraceContext
    session: str
    question: str
    generations: int
    tenant: str
    began: int = field(default_factory=time.monotonic_ns)
    _ended: dict[int, _End] = field(default_factory=dict)

    @classmethod
    def of(cls, traces: RecentTraces, context: TraceContext, asked: Sequence[Generate], tenant: str) -> Self:
        """Of what is ``asked``, which begins now."""
        first = asked[0]
        question = "" if first.question is None else first.question.name
        return cls(traces, context, first.session, question, len(asked), tenant)

    def hear(self, number: int, on_event: OnReply, event: protocol.ReplyEvent) -> None:
        """An event of the generation with this number, for ``on_event``."""
        if isinstance(event, Finished | Failed) and number not in self._ended:
            self._ended[number] = _End.of(event)
            if len(self._ended) == self.generations:
                now = time.monotonic_ns()
                self.traces.requested(self.context, partial(self._made, now, time.time_ns() - now))
        on_event(event)

    def _made(self, now: int, ahead_ns: int) -> Trace:
        ends = self._ended.values()
        return Trace(
            trace_id=self.context.trace_id,
            span_id=self.context.span_id,
            parent_id=self.context.parent_id,
            kind="request",
            session=self.session,
            question=self.question,
            tenant=self.tenant,
            data_version=max(each.data_version for each in ends),
            reused_tokens=sum(each.reused_tokens for each in ends),
            computed_tokens=sum(each.computed_tokens for each in ends),
            error=next((each.code for each in ends if each.code), ""),
            began_at=self.began + ahead_ns,
            duration_ns=now - self.began,
            spans=request_spans(self.began, [each.passes for each in ends if each.passes], now),
        )


def ready_trace(
    context: TraceContext,
    answer: Answer | None,
    session: str,
    tenant: str,
    at_ns: int,
    tracer: Tracer,
    data_version: int = 0,
) -> Trace:
    """Of a request that was answered at once, ns since 1970: by a standing ``answer``, a kept response, or
    the ready position of ``data_version``.
    """
    return Trace(
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_id=context.parent_id,
        kind="request",
        session=session,
        question="" if answer is None else answer.question,
        answer_id="" if answer is None else answer.answer_id,
        tenant=tenant,
        data_version=data_version if answer is None else answer.data_version,
        cached=True,
        began_at=at_ns,
        duration_ns=0,
        links=() if answer is None else (tracer.of_answer(answer.answer_id).traceparent,),
    )


def visible_traces(traces: RecentTraces, request: messages.GetTrace, client: Client) -> messages.TraceReply:
    """What the client may see of a trace. Raises QueryError."""
    found = tuple(each for each in traces.find(request.trace) if _sees(client.tenant, each))
    if not found:
        raise messages.QueryError(
            "unknown_trace",
            f"no trace of {request.trace!r} is kept here; traces.kept is {traces.kept}: the newest answers, "
            "and as many requests",
        )
    return messages.TraceReply(request.id, found)


def _sees(tenant: Tenant, trace: Trace) -> bool:
    """Of requests only one's own, unless one is an operator."""
    own = trace.kind == "answer" or tenant.operator or trace.tenant == tenant.name
    return own and (not trace.session or tenant.sees(trace.session))
