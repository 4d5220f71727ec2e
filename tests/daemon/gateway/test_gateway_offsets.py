"""The offset tracker against a plain model, for any order of arrivals and answers."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.checkpoint.offsets import OffsetTracker, Stream
from feeds.market_data import InputRange
from feeds.source import CommitPoint

SESSIONS = ["a", "b"]
STREAMS: list[Stream] = [("t", 0), ("t", 1), ("u", 0)]


@dataclass
class Model:
    """A list of everything that arrived, and which of it is acknowledged."""

    records: list[tuple[int, str, Stream, int]] = field(default_factory=list)
    """Number, session, stream, offset."""
    low_watermark: dict[str, int] = field(default_factory=dict)
    next: dict[Stream, int] = field(default_factory=dict)
    stored: dict[Stream, int] = field(default_factory=dict)
    numbers: int = 0

    def waiting(self) -> list[tuple[int, str, Stream, int]]:
        return [r for r in self.records if r[0] >= self.low_watermark.get(r[1], 0)]

    def positions(self) -> dict[Stream, int]:
        """The least offset of a stream that no acknowledged answer covers, else the one after the last."""
        return {
            stream: min([r[3] for r in self.waiting() if r[2] == stream], default=offset)
            for stream, offset in self.next.items()
        }


arrive = st.tuples(
    st.just("arrive"),
    st.sampled_from(STREAMS),
    st.sampled_from([*SESSIONS, ""]),  # "": of no session
    st.integers(1, 3),  # offsets may have holes: aborted transactions, compaction
)
acknowledge = st.tuples(st.just("acknowledge"), st.sampled_from(SESSIONS), st.integers(0, 4), st.just(0))
commit = st.tuples(st.just("commit"), st.booleans(), st.just(0), st.just(0))


def play(operations: list[tuple], tracker: OffsetTracker, model: Model) -> None:
    for name, one, two, step in operations:
        if name == "arrive":
            offset = model.next.get(one, 0) - 1 + step
            assert not tracker.repeats(one, offset)
            model.next[one] = offset + 1
            if two:
                model.numbers += 1
                model.records.append((model.numbers, two, one, offset))
                tracker.passed_on(two, model.numbers, one, offset)
            else:
                tracker.skipped(one, offset)
        elif name == "acknowledge":
            low_watermark = max(model.low_watermark.get(one, 0), model.numbers + 1 - two)
            model.low_watermark[one] = low_watermark
            tracker.acknowledge(one, low_watermark)
        else:
            moved = tracker.to_commit()
            expected = {s: o for s, o in model.positions().items() if model.stored.get(s) != o}
            assert moved == {stream: CommitPoint(offset) for stream, offset in expected.items()}
            moved = expected
            for _, _, stream, offset in model.waiting():
                assert moved.get(stream, 0) <= offset, "above a record without an answer"
            if one:
                model.stored.update(moved)
            else:
                tracker.not_committed(moved)
                for stream in moved:
                    model.stored.pop(stream, None)


@given(st.lists(arrive | acknowledge | commit, max_size=60))
def test_what_may_be_committed_is_what_a_plain_model_says(operations):
    tracker, model = OffsetTracker(), Model()
    play(operations, tracker, model)
    assert tracker.outstanding() == len(model.waiting())


@given(st.lists(arrive | acknowledge | commit, max_size=60))
def test_when_everything_is_acknowledged_every_stream_reaches_its_end(operations):
    tracker, model = OffsetTracker(), Model()
    play(operations, tracker, model)
    for session in SESSIONS:
        tracker.acknowledge(session, model.numbers + 1)
    moved = {stream: point.offset for stream, point in tracker.to_commit().items()}
    assert {**model.stored, **moved} == model.next
    assert tracker.to_commit() == {}
    assert tracker.outstanding() == 0


@given(st.lists(arrive, min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 20))
def test_ranges_are_the_first_and_last_offset_of_each_stream(operations, first, length):
    tracker, model = OffsetTracker(), Model()
    play(operations, tracker, model)
    for session in SESSIONS:
        expected = {}
        for number, owner, stream, offset in model.records:
            if owner == session and first <= number <= first + length:
                low = expected[stream].first_offset if stream in expected else offset
                expected[stream] = InputRange(*stream, low, offset)
        found = tracker.ranges(session, first, first + length)
        assert {(r.topic, r.partition): r for r in found} == expected
        assert len(found) == len(expected)


def test_a_source_that_goes_back_is_noticed_record_by_record():
    tracker = OffsetTracker()
    for offset in range(5):
        tracker.passed_on("a", offset + 1, ("t", 0), offset)
    tracker.skipped(("t", 0), 5)
    assert [offset for offset in range(8) if tracker.repeats(("t", 0), offset)] == [0, 1, 2, 3, 4, 5]
    assert not tracker.repeats(("t", 1), 0)


def test_a_failed_commit_is_given_again_and_forgetting_forgets():
    tracker = OffsetTracker()
    tracker.passed_on("a", 1, ("t", 0), 7)
    tracker.skipped(("t", 1), 3)
    assert tracker.to_commit() == {("t", 0): CommitPoint(7), ("t", 1): CommitPoint(4)}
    tracker.not_committed([("t", 1)])
    assert tracker.to_commit() == {("t", 1): CommitPoint(4)}
    tracker.clear()
    assert (tracker.to_commit(), tracker.outstanding()) == ({}, 0)
    assert not tracker.repeats(("t", 0), 7)


@given(
    st.integers(0, 12), st.integers(0, 12), st.lists(st.integers(0, 20), min_size=1, unique=True).map(sorted)
)
def test_what_was_committed_before_is_history_and_is_never_taken_back(start, before, offsets):
    """Records are read again from ``start`` on; nothing below ``stored`` is outstanding."""
    stored = start + before
    tracker = OffsetTracker(lambda sessions: dict.fromkeys(sessions, b"x"))
    tracker.begin(("t", 0), start, stored, ["a"])
    assert tracker.to_commit() == {("t", 0): CommitPoint(stored, {"a": b"x"})}
    read = [start + offset for offset in offsets]
    numbers = list(range(1, len(read) + 1))
    tracker.all_passed_on("a", numbers, ("t", 0), read)
    live = [n for n, offset in zip(numbers, read, strict=True) if offset >= stored]
    assert tracker.outstanding() == len(live)
    assert [n for n in numbers if tracker.is_history("a", n)] == numbers[: len(numbers) - len(live)]
    assert [offset for offset in read if tracker.is_stored(("t", 0), offset)] == read[: len(read) - len(live)]
    least = read[-len(live)] if live else max(stored, read[-1] + 1)
    moved = {} if least == stored else {("t", 0): CommitPoint(least, {"a": b"x"})}
    assert tracker.to_commit() == moved
    assert not tracker.repeats(("t", 0), read[-1] + 1)
    assert tracker.repeats(("t", 0), read[-1])


@given(
    st.integers(0, 12), st.integers(0, 12), st.lists(st.integers(0, 20), min_size=1, unique=True).map(sorted)
)
def test_a_past_that_was_asked_for_is_answered_again_and_takes_no_committed_offset_back(
    start, before, offsets
):
    tracker, stored = OffsetTracker(), start + before
    tracker.begin(("t", 0), start, stored, ["a"], again=True)
    read = [start + offset for offset in offsets]
    tracker.all_passed_on("a", list(range(1, len(read) + 1)), ("t", 0), read)
    assert tracker.outstanding() == len(read)
    newest = 0
    for number, offset in enumerate(read, 1):
        assert not tracker.is_history("a", number)
        tracker.acknowledge("a", number + 1)
        position = read[number] if number < len(read) else offset + 1
        moved = tracker.to_commit()
        if position >= stored:
            assert moved == ({} if position == newest else {("t", 0): CommitPoint(position)})
            newest = position
        else:
            assert not moved


def test_records_that_change_are_committed_without_a_new_offset():
    told = [b"one"]
    tracker = OffsetTracker(lambda sessions: dict.fromkeys(sessions, told[0]))
    tracker.passed_on("a", 1, ("t", 0), 7)
    tracker.passed_on("b", 2, ("t", 0), 8)
    tracker.passed_on("b", 3, ("t", 1), 0)
    assert tracker.to_commit() == {
        ("t", 0): CommitPoint(7, {"a": b"one", "b": b"one"}),
        ("t", 1): CommitPoint(0, {"b": b"one"}),
    }
    assert tracker.to_commit() == {}
    told[0] = b"two"
    tracker.forget("b")
    assert tracker.to_commit() == {("t", 0): CommitPoint(7, {"a": b"two"}), ("t", 1): CommitPoint(1, {})}


def test_a_position_behind_the_marks_of_transactions_is_committed_once_all_before_it_is_passed_on():
    tracker = OffsetTracker()
    tracker.passed_on("a", 1, ("t", 0), 7)
    tracker.reached(("t", 0), 9, 12)
    assert tracker.to_commit() == {("t", 0): CommitPoint(7)}, "offset 8 was fetched, not passed on"
    tracker.passed_on("a", 2, ("t", 0), 8)
    tracker.reached(("t", 0), 9, 12)
    tracker.acknowledge("a", 2)
    assert tracker.to_commit() == {("t", 0): CommitPoint(8)}
    tracker.acknowledge("a", 3)
    assert tracker.to_commit() == {("t", 0): CommitPoint(12)}


def test_a_partition_that_comes_back_goes_on_where_it_was_left():
    tracker = OffsetTracker()
    tracker.begin(("t", 0), 0, 0)
    tracker.passed_on("a", 1, ("t", 0), 7)
    tracker.acknowledge("a", 2)
    tracker.leave(("t", 0))
    tracker.begin(("t", 0), 8, 30)
    assert tracker.repeats(("t", 0), 7)
    assert not tracker.repeats(("t", 0), 8)
    tracker.passed_on("a", 2, ("t", 0), 8)
    assert tracker.outstanding() == 0, "its owner answered it meanwhile"
    assert tracker.to_commit() == {("t", 0): CommitPoint(30)}


def test_a_record_is_outstanding_until_its_letter_is_acknowledged() -> None:
    tracker = OffsetTracker()
    tracker.begin(STREAMS[0], 0, 0)
    settle = [tracker.hold(STREAMS[0], offset) for offset in (4, 4, 7)]
    tracker.skipped(STREAMS[0], 9)
    tracker.skipped(STREAMS[1], 9)
    assert tracker.to_commit() == {STREAMS[0]: CommitPoint(4), STREAMS[1]: CommitPoint(10)}
    settle[0]()
    settle[2]()
    assert tracker.to_commit() == {}
    settle[1]()
    assert tracker.to_commit() == {STREAMS[0]: CommitPoint(10)}


def test_a_letter_of_an_earlier_reading_holds_and_settles_nothing() -> None:
    for again in (lambda tracker: tracker.rewind(STREAMS[0]), OffsetTracker.clear):
        tracker = OffsetTracker()
        tracker.begin(STREAMS[0], 0, 0)
        earlier = tracker.hold(STREAMS[0], 4)
        again(tracker)
        tracker.begin(STREAMS[0], 4, 4)
        now = tracker.hold(STREAMS[0], 4)
        tracker.skipped(STREAMS[0], 9)
        earlier()
        assert tracker.to_commit() == {STREAMS[0]: CommitPoint(4)}
        now()
        assert tracker.to_commit() == {STREAMS[0]: CommitPoint(10)}


def test_a_partition_that_comes_back_still_waits_for_its_letters() -> None:
    tracker = OffsetTracker()
    tracker.begin(STREAMS[0], 0, 0)
    settle = tracker.hold(STREAMS[0], 4)
    tracker.skipped(STREAMS[0], 9)
    tracker.leave(STREAMS[0])
    assert tracker.to_commit() == {}
    tracker.begin(STREAMS[0], 10, 0)
    assert tracker.to_commit() == {STREAMS[0]: CommitPoint(4)}
    settle()
    assert tracker.to_commit() == {STREAMS[0]: CommitPoint(10)}
