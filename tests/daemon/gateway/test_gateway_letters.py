"""DLQ records: what they keep, how often they are logged, and answers that a sink refuses."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from daemon.gateway.checkpoint.delivery import RefusedMessage
from daemon.gateway.dead_letters import HEADER_BYTES, LETTER_BYTES, DeadLetterLog, unpublished, unreadable
from daemon.gateway.originals import Originals
from daemon.protocol import NameStream
from feeds.codec import MalformedRecord, decode_message, encode
from feeds.connector import SinkRoute
from feeds.market_data import Answer, DeadLetter, InputRange
from feeds.source import CommitPoint, Incoming, PublishRefused
from tests.daemon.gateway.test_gateway_publish import Rig
from tests.kit import TOPIC, MemorySink, until
from tests.kit.engine_events import NUMBER, answered

WHY = MalformedRecord("json", "not JSON")


def message(payload: bytes = b"{", **more: object) -> Incoming:
    return replace(Incoming(TOPIC, 2, 9, None, payload, ts_recv_ns=5), **more)


@given(payload=st.binary(max_size=64), key=st.none() | st.binary(max_size=9), header=st.binary(max_size=9))
def test_a_letter_keeps_bytes_key_and_headers_through_its_json(
    payload: bytes, key: bytes | None, header: bytes
) -> None:
    dead_letter = unreadable(message(payload, key=key, headers={"h": header}), WHY)
    read = decode_message(encode(dead_letter))
    assert read == dead_letter
    assert isinstance(read, DeadLetter)
    assert (read.payload, read.key, read.headers, read.stage) == (payload, key, {"h": header}, "read")
    assert (read.topic, read.partition, read.offset, read.whole) == (TOPIC, 2, 9, True)
    assert read.failed_at == 5


def test_what_is_too_long_for_a_letter_is_cut_and_says_so() -> None:
    many = {f"h{n}": b"x" * 1000 for n in range(100)}
    dead_letter = unreadable(
        message(b"x" * (LETTER_BYTES + 1), key=b"k" * (HEADER_BYTES + 1), headers=many), WHY
    )
    assert (len(dead_letter.payload), dead_letter.size, dead_letter.whole) == (
        LETTER_BYTES,
        LETTER_BYTES + 1,
        False,
    )
    assert dead_letter.key is None
    assert len(encode(dead_letter)) < 1 << 20


def test_an_answer_that_cannot_be_sent_keeps_key_and_headers() -> None:
    answer = answered("aaa", 1, 2).answer
    dead_letter = unpublished(
        RefusedMessage(answer, "answers.v1", b"V:AAA", encode(answer), {"a": b"b"}, "too_large", "no")
    )
    assert (dead_letter.stage, dead_letter.reason, dead_letter.partition, dead_letter.offset) == (
        "produce",
        "too_large",
        -1,
        -1,
    )
    assert (dead_letter.topic, dead_letter.key, dead_letter.headers) == ("answers.v1", b"V:AAA", {"a": b"b"})
    assert decode_message(dead_letter.payload) == answer


async def test_a_refused_answer_is_a_dead_letter_and_another_message_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.gateway.dead_letters._EVERY_NS", 3600 * 10**9)
    sink = MemorySink()

    def refuses(payload: bytes) -> bool:
        if b'"answer"' not in payload and b'"flash_ready"' not in payload:
            return False
        raise PublishRefused("5 bytes are too many", "too_large")

    sink.refuses = refuses
    r = Rig(SinkRoute(sink, "answers.v1", "u", "dlq.v1", "u"))
    r.arrive("aaa", 0, 1)
    with caplog.at_level(logging.WARNING):
        r.committed("aaa", 1, 2)
        r.answer("aaa", 1, 2)
        await until(lambda: r.publisher.outbox.delivery.waiting == 0)
    dead_letters = sink.messages("dlq.v1")
    read = [decode_message(each.payload) for each in dead_letters if isinstance(each, DeadLetter)]
    assert all(isinstance(each, Answer) and each.inputs == [InputRange(TOPIC, 0, 0, 0)] for each in read)
    assert {(each.stage, each.reason) for each in dead_letters if isinstance(each, DeadLetter)} == {
        ("produce", "too_large")
    }
    assert len(dead_letters) == r.count("foretick_dead_letters_total", stage="produce") == 6
    assert r.count("foretick_answers_failed_total", reason="publish") == 6
    lines = [line.message for line in caplog.records if "DLQ record" in line.message]
    assert len(lines) == 1
    assert {at: point.offset for at, point in r.tracker.to_commit().items()} == {
        (TOPIC, 0): 1
    }  # its inputs are done
    assert await r.publisher.outbox.delivery.stop(60.0) == 0


def holding_letters() -> MemorySink:
    """It acknowledges no letter until ``acknowledging`` is set."""
    sink = MemorySink()
    sink.holds = lambda payload: b'"dead_letter"' in payload
    sink.acknowledging.clear()
    return sink


async def test_inputs_of_a_refused_answer_are_done_once_its_letter_is_acknowledged() -> None:
    sink = holding_letters()
    sink.refuses = lambda payload: b'"answer"' in payload and b'"dead_letter"' not in payload
    r = Rig(SinkRoute(sink, "answers.v1", dead_letters="dlq.v1"))
    r.arrive("aaa", 0, 1)
    r.committed("aaa", 1, 2)
    r.answer("aaa", 1, 2)
    await until(lambda: len(sink.messages("dlq.v1")) == 6)
    assert r.tracker.to_commit() == {(TOPIC, 0): CommitPoint(0)}
    sink.acknowledging.set()
    await until(lambda: r.publisher.outbox.delivery.waiting == 0)
    assert r.tracker.to_commit() == {(TOPIC, 0): CommitPoint(1)}
    assert r.count("foretick_answers_failed_total", reason="publish") == 6
    assert await r.publisher.outbox.delivery.stop(60.0) == 0


async def test_versions_wait_for_the_letters_of_records_that_they_cover() -> None:
    """A restart from a snapshot of such a version would not read the record again."""
    sink = holding_letters()
    r = Rig(SinkRoute(sink, "answers.v1", dead_letters="dlq.v1"))
    progress = r.publisher.progress
    r.arrive("aaa", 0, 1, 2)
    r.publisher.record_refused(unreadable(message(), WHY), "aaa", (NUMBER, 1))
    for version in (1, 2):
        r.committed("aaa", version, 1 + version)
        r.answer("aaa", version, 1 + version)
    await until(lambda: r.publisher.outbox.delivery.waiting == 1)
    assert progress.of("aaa").version == 1
    assert r.tracker.to_commit() == {(TOPIC, 0): CommitPoint(1)}
    sink.acknowledging.set()
    await until(lambda: progress.of("aaa").version == 2)
    assert r.tracker.to_commit() == {(TOPIC, 0): CommitPoint(2)}
    assert await r.publisher.outbox.delivery.stop(60.0) == 0


async def test_a_letter_of_an_earlier_engine_holds_nothing_back() -> None:
    sink = holding_letters()
    r = Rig(SinkRoute(sink, "answers.v1", dead_letters="dlq.v1"))
    progress = r.publisher.progress
    r.arrive("aaa", 0)
    r.publisher.record_refused(unreadable(message(), WHY), "aaa", (NUMBER, 0))
    r.publisher.forget()
    r.tracker.clear()
    r.arrive("aaa", 0)  # read again, and refused again
    r.publisher.record_refused(unreadable(message(), WHY), "aaa", (NUMBER, 0))
    r.committed("aaa", 1, 3)
    r.answer("aaa", 1, 3)
    await until(lambda: r.publisher.outbox.delivery.waiting == 2)
    assert progress.of("aaa").version == 0
    sink.acknowledging.set()
    await until(lambda: progress.of("aaa").version == 1)
    assert await r.publisher.outbox.delivery.stop(60.0) == 0


async def test_a_sink_that_stops_before_it_has_a_letter_does_not_settle_it() -> None:
    sink = MemorySink()
    sink.acknowledging.clear()
    r, settled = Rig(SinkRoute(sink, "answers.v1", dead_letters="dlq.v1")), list[int]()
    r.publisher.outbox.dead_letter(unreadable(message(), WHY), lambda: settled.append(1))
    await until(lambda: sink.messages("dlq.v1"))
    await sink.stop()
    await until(lambda: r.publisher.outbox.delivery.waiting == 0)
    assert settled == []
    assert await r.publisher.outbox.delivery.stop(60.0) == 0


async def test_an_answer_refused_while_the_daemon_stops_still_becomes_a_letter() -> None:
    sink = MemorySink()
    sink.refuses = lambda payload: b'"answer"' in payload
    r = Rig(SinkRoute(sink, "answers.v1", dead_letters="dlq.v1"))
    r.arrive("aaa", 0, 1)
    r.committed("aaa", 1, 2)
    r.answer("aaa", 1, 2)
    assert await r.publisher.outbox.delivery.stop(60.0) == 0
    assert len(sink.messages("dlq.v1")) == 6


async def test_a_refused_letter_makes_no_letter() -> None:
    sink = MemorySink()
    sink.refuses = lambda payload: True
    r = Rig(SinkRoute(sink, "answers.v1", dead_letters="dlq.v1"))
    settled: list[int] = []
    r.publisher.outbox.dead_letter(unreadable(message(), WHY), lambda: settled.append(1))
    await until(lambda: r.publisher.outbox.delivery.waiting == 0)
    assert settled == [1]
    assert r.count("foretick_dead_letters_total", stage="read") == 1
    assert await r.publisher.outbox.delivery.stop(60.0) == 0


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(["json", "price"])), max_size=60))
def test_one_line_a_second_for_each_reason_says_how_many_were_left_out(
    arrivals: list[tuple[int, str]],
) -> None:
    said: list[str] = []
    log = logging.Logger("letters")
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # collects
    now, clock = 0, [0]
    dead_letters = DeadLetterLog(log, lambda: clock[0])
    last: dict[str, int] = {}
    silent: dict[str, int] = {}
    expected: list[tuple[str, int]] = []
    for wait_ms, reason in arrivals:
        now += wait_ms * 1_000_000
        clock[0] = now
        dead_letters.note(unreadable(message(), MalformedRecord(reason, "no")))  # type: ignore[arg-type]  # a reason
        if reason in last and now - last[reason] < 1_000_000_000:
            silent[reason] = silent.get(reason, 0) + 1
        else:
            last[reason] = now
            expected.append((reason, silent.pop(reason, 0)))
    assert len(said) == len(expected)
    for line, (reason, more) in zip(said, expected, strict=True):
        assert f": {reason}: no" in line
        assert (f"({more} more" in line) is (more > 0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5)), max_size=30), st.integers(1_000, 20_000))
def test_originals_are_found_by_place_until_newer_ones_need_their_room(
    runs: list[tuple[str, int]], room: int
) -> None:
    originals, at, kept = Originals(room), {"a": 0, "b": 0}, []
    originals.want(True)
    for source, count in runs:
        messages = [message(b"x" * n, offset=at[source] + n) for n in range(count)]
        originals.keep(source, messages)
        at[source] += count
        kept += [(source, each) for each in messages]

    def find(source: str, offset: int) -> Incoming | None:
        return originals.find(NameStream(source, TOPIC, 2, True), offset)

    found = [(source, each) for source, each in kept if find(source, each.offset) is each]
    assert found == kept[len(kept) - len(found) :]  # the newest
    assert all(find(source, each.offset) is None for source, each in kept[: len(kept) - len(found)])
    assert (len(found) > 0) is bool(runs)
    first, second = (message(part, offset=at["a"]) for part in (b"first", b"second"))
    for part, each in enumerate((first, second)):
        originals.keep("a", [each], part)
    stream = NameStream("a", TOPIC, 2, True)
    assert [originals.find(stream, at["a"], part) for part in (1, 2)] == [second, None]
    assert originals.find(stream, at["a"]) in (first, None)
    originals.clear()
    assert not any(find(source, each.offset) for source, each in kept)


def test_originals_that_nobody_may_refuse_are_not_kept() -> None:
    originals = Originals()
    originals.keep("a", [message()])
    assert originals.find(NameStream("a", TOPIC, 2, True), 9) is None
