"""What is kept of traces: bounded, the newest, and none of the answers' because of clients'."""

from collections import OrderedDict
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from daemon.traces.recent_traces import PER_TRACE, MakeTrace, RecentTraces
from daemon.traces.recorded_trace import Trace, TraceKind
from daemon.traces.trace_context import TraceContext, Tracer

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60)


def made(context: TraceContext, kind: TraceKind, number: int) -> Trace:
    return Trace(
        trace_id=context.trace_id, span_id=context.span_id, kind=kind, began_at=number, duration_ns=1
    )


@given(st.integers(1, 5), STEPS)
def test_the_newest_of_each_kind_are_kept(kept: int, steps: list[tuple[bool, int]]) -> None:
    traces = RecentTraces(kept=kept)
    answers, requests = OrderedDict[int, list[int]](), OrderedDict[int, list[int]]()
    for number, (is_answer, name) in enumerate(steps):
        context = TraceContext(f"{name + 1:032x}", f"{number + 1:016x}")
        known = answers if is_answer else requests
        known[name] = [number] if is_answer else [*known.get(name, []), number][-PER_TRACE:]
        known.move_to_end(name)
        if len(known) > kept:
            known.popitem(last=False)
        keep = traces.answered if is_answer else traces.requested
        keep(context, partial(made, context, "answer" if is_answer else "request", number))
    for name in range(7):
        expected = sorted(answers.get(name, []) + requests.get(name, []))
        assert [trace.began_at for trace in traces.find(f"{name + 1:032x}")] == expected


def test_an_answer_is_found_by_its_id_and_exported_if_it_is_sampled() -> None:
    exported: list[MakeTrace] = []
    traces = RecentTraces(Tracer(0.5), export=exported.append)
    for number in range(50):
        context = traces.tracer.of_answer(f"s:q:{number}")
        traces.answered(context, partial(made, context, "answer", number))
        assert [trace.began_at for trace in traces.find(f"s:q:{number}")] == [number]
        assert bool(exported and exported[-1]().began_at == number) == context.sampled
    assert 0 < len(exported) < 50
    assert traces.find("s:q:50") == []
