"""Stages at their places: in order, without gaps that nothing explains, and within their trace."""

from hypothesis import given
from hypothesis import strategies as st

from daemon.ages import Times
from daemon.traces.recorded_trace import Passes
from daemon.traces.spans import AnswerMoments, answer_trace, placed, request_spans
from daemon.traces.trace_context import Tracer
from feeds.market_data import Latency
from tests.kit.engine_events import ANSWER
from tests.kit.top import listed_answer

MS = 1_000_000
MOMENTS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 50)), max_size=8)


@given(MOMENTS, st.integers(0, 30))
def test_each_nanosecond_belongs_to_the_first_stage_that_was_not_over(
    moments: list[tuple[str, int]], began: int
) -> None:
    expected: list[tuple[int, int]] = []
    for at in range(began, max([began, *(until for _, until in moments)])):
        owner = next(index for index, (_, until) in enumerate(moments) if until > at)
        if not expected or expected[-1][0] != owner:
            expected.append((owner, 0))
        expected[-1] = owner, expected[-1][1] + 1
    found = list(placed(moments, began))
    assert [(span.name, span.duration_ns) for span in found] == [(moments[i][0], n) for i, n in expected]
    at = 0
    for span in found:
        assert span.start_ns == at
        at += span.duration_ns


def test_an_answer_passes_all_stages_from_its_source_to_its_sinks() -> None:
    latency = Latency(
        ring_wait_ns=1 * MS, bars_ns=2 * MS, tokenise_ns=3 * MS, queue_ns=5 * MS, forward_ns=9 * MS
    )
    answer = listed_answer("up", latency=latency, answer_id="aaa:up:1")
    ahead = 1_700_000_000_000_000_000
    times = Times(1, ahead + 90 * MS, 100 * MS, closed=150 * MS)
    passes = Passes(180 * MS, 185 * MS, 190 * MS, 194 * MS)
    moments = AnswerMoments(times, passes, 196 * MS, 200 * MS, ahead)
    trace = answer_trace(Tracer().of_answer("aaa:up:1"), answer, moments, ("link",))
    assert [(span.name, span.start_ns // MS, span.duration_ns // MS) for span in trace.spans] == [
        ("source", 0, 10),
        ("ring_wait", 10, 1),
        ("open_bar", 11, 49),
        ("bars", 60, 2),
        ("tokenise", 62, 3),
        ("append", 65, 25),
        ("queue", 90, 5),
        ("prefill", 95, 5),
        ("decode", 100, 4),
        ("hand_over", 104, 2),
        ("publish", 106, 4),
    ]
    assert (trace.began_at, trace.duration_ns) == (ahead + 90 * MS, 110 * MS)
    assert (trace.session, trace.question, trace.answer_id, trace.links) == (
        "aaa",
        "up",
        "aaa:up:1",
        ("link",),
    )


def test_a_source_that_tells_no_time_or_a_wrong_one_has_no_stage() -> None:
    ahead = 1_700_000_000_000_000_000
    for source in (0, ahead + 101, 2 * ahead):
        moments = AnswerMoments(Times(1, source, 100), Passes(), 200, 300, ahead)
        trace = answer_trace(Tracer().of_answer("x"), ANSWER, moments, ())
        assert trace.spans[0].name == "ring_wait"
        assert trace.began_at == ahead + 100


def test_generations_of_one_request_are_told_apart() -> None:
    one = request_spans(10, [Passes(11, 12, 14, 18)], 20)
    assert [(span.name, span.start_ns, span.duration_ns) for span in one] == [
        ("send", 0, 1), ("queue", 1, 1), ("prefill", 2, 2), ("decode", 4, 4), ("reply", 8, 2),
    ]  # fmt: skip
    two = request_spans(10, [Passes(11, 12, 14, 18), Passes(11, 13, 15, 17)], 20)
    assert {span.name for span in two} == {f"{span.name} {n}" for span in one for n in (1, 2)}
    assert request_spans(10, [], 20) == ()
