"""Where the time of one answer went: the stages that the daemon has measured, at their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from daemon.ages import Times
from daemon.traces.recorded_trace import Passes, Span, Trace
from daemon.traces.trace_context import TraceContext
from feeds.market_data import Answer, Latency

MAX_SOURCE_NS = 3_600_000_000_000
"""A record that lay longer at its source is not shown as having been on its way."""


@dataclass(frozen=True)
class AnswerMoments:
    """When a standing question's answer was where, monotonic ns; ``ahead_ns``: of the wall clock.

    ``taken``: the gateway handed it to its sinks; ``delivered``: they had it.
    """

    times: Times
    passes: Passes
    taken: int
    delivered: int
    ahead_ns: int

    @property
    def began(self) -> int:
        """When the newest record's source had it; when this daemon had it, if that is not known."""
        at_source = self.times.source - self.ahead_ns
        return at_source if 0 < self.times.ring - at_source < MAX_SOURCE_NS else self.times.ring

    def spans(self, took: Latency) -> tuple[Span, ...]:
        """Its stages, from its newest record on.

        The bar of that record stays open until another one closes it; the line's own tokens wait for a pass,
        and are prefilled, before the question's are.
        """
        drained = self.times.ring + took.ring_wait_ns
        closed = max(drained, self.times.closed)
        made = closed + took.bars_ns
        moments = [
            ("source", self.times.ring),
            ("ring_wait", drained),
            ("open_bar", closed),
            ("bars", made),
            ("tokenise", made + took.tokenise_ns),
            ("append", self.passes.queued),
            *_in_engine(self.passes),
            ("hand_over", self.taken),
            ("publish", self.delivered),
        ]
        return tuple(placed(moments, self.began))


def answer_trace(
    context: TraceContext, answer: Answer, moments: AnswerMoments, links: tuple[str, ...], error: str = ""
) -> Trace:
    """Of a standing question's answer; ``error``: why no sink has it."""
    return Trace(
        trace_id=context.trace_id,
        span_id=context.span_id,
        kind="answer",
        session=answer.session,
        question=answer.question,
        answer_id=answer.answer_id,
        data_version=answer.data_version,
        reused_tokens=answer.reused_tokens,
        computed_tokens=answer.computed_tokens,
        error=error,
        began_at=moments.began + moments.ahead_ns,
        duration_ns=max(0, moments.delivered - moments.began),
        spans=moments.spans(answer.latency),
        links=links,
    )


def request_spans(began: int, all_passes: Sequence[Passes], ended: int) -> tuple[Span, ...]:
    """Stages of a request, monotonic ns: of each of its generations, if it has several."""
    found: list[Span] = []
    for number, passes in enumerate(all_passes, 1):
        stages = placed([("send", passes.queued), *_in_engine(passes), ("reply", ended)], began)
        suffix = f" {number}" if len(all_passes) > 1 else ""
        found += [Span(each.name + suffix, each.start_ns, each.duration_ns) for each in stages]
    return tuple(found)


def placed(moments: Sequence[tuple[str, int]], began: int) -> Iterator[Span]:
    """A span up to each moment, monotonic ns, from the one before; what is over by then takes no time."""
    at = began
    for name, until in moments:
        if until > at:
            yield Span(name, at - began, until - at)
            at = until


def _in_engine(passes: Passes) -> list[tuple[str, int]]:
    return [("queue", passes.scheduled), ("prefill", passes.prefilled), ("decode", passes.finished)]
