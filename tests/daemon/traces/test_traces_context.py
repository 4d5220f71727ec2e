"""Trace contexts beside the standard's own words, ids of answers, and the share that is exported."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.traces.trace_context import Tracer, read_traceparent, trace_id_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
HEX = st.text("0123456789abcdef")


def is_valid(header: str) -> bool:
    """Section 3.2.2 of the standard, step by step."""
    parts = header.split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2]:
        return False
    if any(set(part) - set("0123456789abcdef") for part in parts[:4]):
        return False
    if parts[0] == "ff" or (parts[0] == "00" and len(parts) > 4):
        return False
    return set(parts[1]) != {"0"} and set(parts[2]) != {"0"}


@given(
    st.one_of(
        st.text(max_size=60),
        st.builds(lambda *parts: "-".join(parts), HEX, HEX, HEX, HEX),
        st.builds(
            lambda version, flags, more: f"{version}-{TRACE}-{SPAN}-{flags}{more}",
            st.sampled_from(["00", "01", "cc", "ff", "0G"]),
            st.sampled_from(["00", "01", "03", "ff", "1"]),
            st.sampled_from(["", "-", "-what", "x"]),
        ),
    )
)
def test_a_header_is_read_where_the_standard_reads_it(header: str) -> None:
    read = read_traceparent(header)
    assert (read is not None) == is_valid(header), header
    if read is not None:
        assert (read.trace_id, read.span_id) == tuple(header.split("-")[1:3])
        assert read.sampled == bool(int(header.split("-")[3], 16) & 1)


@pytest.mark.parametrize(
    "header",
    [
        GOOD.upper(),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{GOOD}-x",
        f"01-{GOOD[3:]}-{'x' * 600}",
    ],
)
def test_what_is_no_header_begins_another_trace(header: str) -> None:
    begun = Tracer(1.0).begin(header)
    assert (begun.trace_id != TRACE, begun.parent_id, begun.sampled) == (True, "", True)


def test_a_request_goes_on_its_callers_trace() -> None:
    for ratio in (0.0, 1.0):
        for flags, sampled in (("00", False), ("01", True)):
            begun = Tracer(ratio).begin(f"00-{TRACE}-{SPAN}-{flags}")
            assert (begun.trace_id, begun.parent_id, begun.sampled) == (TRACE, SPAN, sampled)
            assert begun.span_id not in (SPAN, "0" * 16)
            assert read_traceparent(begun.traceparent) is not None
    first, second = (Tracer().begin() for _ in range(2))
    assert first.trace_id != second.trace_id


def test_an_answer_has_the_same_trace_whenever_it_is_published() -> None:
    answer_id = "btcusdt:abc:1700000000000000000"
    first, again = (Tracer(1.0).of_answer(answer_id) for _ in range(2))
    assert first == again
    assert first.trace_id == hashlib.sha256(answer_id.encode()).hexdigest()[:32] == trace_id_of(answer_id)
    assert trace_id_of(first.trace_id) == first.trace_id
    assert first.parent_id == ""


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_the_ratio_is_the_share_of_traces_that_are_exported(ratio: float) -> None:
    tracer = Tracer(ratio)
    sampled = sum(tracer.of_answer(f"a:{number}").sampled for number in range(4000))
    assert abs(sampled / 4000 - ratio) < 0.03  # five standard deviations at one half
    assert (sampled in (0, 4000)) == (ratio in (0.0, 1.0))
