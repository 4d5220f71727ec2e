"""Links of answers with the spans of their records, beside a search of all that was kept."""

from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.record_links import MOST, RecordLinks
from feeds.market_data import InputRange
from feeds.source import Incoming

STREAMS = [("", "t", 0), ("", "t", 1), ("b", "t", 0)]
SPAN = "00f067aa0ba902b7"


def header(number: int) -> str:
    return f"00-{number + 1:032x}-{SPAN}-01"


def message(topic: str, partition: int, offset: int, headers: dict[str, bytes]) -> Incoming:
    return Incoming(topic, partition, offset, None, b"", headers, 0)


@given(
    st.lists(st.tuples(st.sampled_from(STREAMS), st.sampled_from(["good", "bad", "none"])), max_size=80),
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from(STREAMS), st.integers(0, 40), st.integers(0, 40)), max_size=3),
)
def test_the_newest_headers_in_the_ranges_are_found(
    sent: list[tuple[tuple[str, str, int], str]],
    kept: int,
    asked: list[tuple[tuple[str, str, int], int, int]],
) -> None:
    links = RecordLinks(kept)
    found: dict[tuple[str, str, int], list[tuple[int, str]]] = {each: [] for each in STREAMS}
    offsets = dict.fromkeys(STREAMS, 0)
    for number, (stream, kind) in enumerate(sent):
        source, topic, partition = stream
        written = {"good": header(number // 2), "bad": "00-xyz", "none": None}[kind]
        headers = {} if written is None else {"traceparent": written.encode()}
        links.keep(source, [message(topic, partition, offsets[stream], headers)])
        if written is not None:
            found[stream].append((offsets[stream], written))
        offsets[stream] += 1
    expected: list[str] = []
    for stream, first, last in asked:
        for offset, written in reversed(found[stream][-kept:]):
            if first <= offset <= last and written != "00-xyz" and written not in expected:
                expected.append(written)
    ranges = [
        InputRange(topic, number, first, last, source) for (source, topic, number), first, last in asked
    ]
    assert links.of(ranges) == tuple(expected[:MOST])
