"""The offset tracker against a plain model, for any order of arrivals and answers."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.checkpoint.offsets import OffsetTracker, Stream
from feeds.source import CommitPoint

SESSIONS = ["a", "b"]
STREAMS: list[Stream] = [("t", 0), ("t", 1), ("u", 0)]


Place = tuple[str, Stream]
"""A session and a stream that it reads."""


@dataclass
class Model:
    """A list of everything that arrived, and what of it is acknowledged."""

    records: list[tuple[str, Stream, int]] = field(default_factory=list)
    """Session, stream, offset."""
    lows: dict[Place, int] = field(default_factory=dict)
    since: dict[Place, int] = field(default_factory=dict)
    """The first record that came when none waited."""
    next: dict[Stream, int] = field(default_factory=dict)
    stored: dict[Stream, int] = field(default_factory=dict)

    def arrive(self, session: str, stream: Stream, offset: int) -> None:
        if (session, stream) not in {each[:2] for each in self.waiting()}:
            self.since[session, stream] = offset
        self.records.append((session, stream, offset))

    def waiting(self) -> list[tuple[str, Stream, int]]:
        return [r for r in self.records if r[2] >= self.lows.get(r[:2], 0)]

    def positions(self) -> dict[Stream, int]:
        """A session waits from its low watermark on, or from its first record; else a stream's end."""
        places = {r[:2] for r in self.waiting()}
        return {
            stream: min(
                [max(self.since[at], self.lows.get(at, 0)) for at in places if at[1] == stream], default=end
            )
            for stream, end in self.next.items()
        }


arrive = st.tuples(
    st.just("arrive"),
    st.sampled_from(STREAMS),
    st.sampled_from([*SESSIONS, ""]),  # "": of no session
    st.integers(1, 3),  # offsets may have holes: aborted transactions, compaction
)
acknowledge = st.tuples(
    st.just("acknowledge"), st.sampled_from(STREAMS), st.sampled_from(SESSIONS), st.integers(0, 4)
)
commit = st.tuples(st.just("commit"), st.booleans(), st.just(0), st.just(0))


def play(operations: list[tuple], tracker: OffsetTracker, model: Model) -> None:
    for name, one, two, step in operations:
        if name == "arrive":
            offset = model.next.get(one, 0) - 1 + step
            assert not tracker.repeats(one, offset)
            model.next[one] = offset + 1
            if two:
                model.arrive(two, one, offset)
                tracker.passed_on(two, one, [offset])
            else:
                tracker.skipped(one, offset)
        elif name == "acknowledge":
            low = max(model.lows.get((two, one), 0), model.next.get(one, 0) - step)
            model.lows[two, one] = low
            tracker.acknowledge(two, one, low)
        else:
            moved = tracker.to_commit()
            expected = {s: o for s, o in model.positions().items() if model.stored.get(s) != o}
            assert moved == {stream: CommitPoint(offset) for stream, offset in expected.items()}
            moved = expected
            for stream, offset in moved.items():
                assert model.stored.get(stream, 0) <= offset, "taken back"
            for _, stream, offset in model.waiting():
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
    assert (tracker.outstanding() > 0) == bool(model.waiting())


@given(st.lists(arrive | acknowledge | commit, max_size=60))
def test_when_everything_is_acknowledged_every_stream_reaches_its_end(operations):
    tracker, model = OffsetTracker(), Model()
    play(operations, tracker, model)
    for session, stream, offset in model.records:
        tracker.acknowledge(session, stream, offset + 1)
    moved = {stream: point.offset for stream, point in tracker.to_commit().items()}
    assert {**model.stored, **moved} == model.next
    assert tracker.to_commit() == {}
    assert tracker.outstanding() == 0


def test_a_source_that_goes_back_is_noticed_record_by_record():
    tracker = OffsetTracker()
    for offset in range(5):
        tracker.passed_on("a", ("t", 0), [offset])
    tracker.skipped(("t", 0), 5)
    assert [offset for offset in range(8) if tracker.repeats(("t", 0), offset)] == [0, 1, 2, 3, 4, 5]
    assert not tracker.repeats(("t", 1), 0)


def test_a_failed_commit_is_given_again_and_forgetting_forgets():
    tracker = OffsetTracker()
    tracker.passed_on("a", ("t", 0), [7])
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
    tracker.passed_on("a", ("t", 0), read)
    live = [offset for offset in read if offset >= stored]
    assert tracker.outstanding() == (live[-1] - live[0] + 1 if live else 0)
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
    tracker.passed_on("a", ("t", 0), read)
    assert tracker.outstanding() == read[-1] - read[0] + 1
    newest = 0
    for number, offset in enumerate(read, 1):
        assert not tracker.is_stored(("t", 0), offset)
        position = read[number] if number < len(read) else offset + 1
        tracker.acknowledge("a", ("t", 0), position)
        moved = tracker.to_commit()
        if position >= stored:
            assert moved == ({} if position == newest else {("t", 0): CommitPoint(position)})
            newest = position
        else:
            assert not moved


def test_records_that_change_are_committed_without_a_new_offset():
    told = [b"one"]
    tracker = OffsetTracker(lambda sessions: dict.fromkeys(sessions, told[0]))
    tracker.passed_on("a", ("t", 0), [7])
    tracker.passed_on("b", ("t", 0), [8])
    tracker.passed_on("b", ("t", 1), [0])
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
    tracker.passed_on("a", ("t", 0), [7])
    tracker.reached(("t", 0), 9, 12)
    assert tracker.to_commit() == {("t", 0): CommitPoint(7)}, "offset 8 was fetched, not passed on"
    tracker.passed_on("a", ("t", 0), [8])
    tracker.reached(("t", 0), 9, 12)
    tracker.acknowledge("a", ("t", 0), 8)
    assert tracker.to_commit() == {("t", 0): CommitPoint(8)}
    tracker.acknowledge("a", ("t", 0), 9)
    assert tracker.to_commit() == {("t", 0): CommitPoint(12)}


def test_a_partition_that_comes_back_goes_on_where_it_was_left():
    tracker = OffsetTracker()
    tracker.begin(("t", 0), 0, 0)
    tracker.passed_on("a", ("t", 0), [7])
    tracker.acknowledge("a", ("t", 0), 8)
    tracker.leave(("t", 0))
    tracker.begin(("t", 0), 8, 30)
    assert tracker.repeats(("t", 0), 7)
    assert not tracker.repeats(("t", 0), 8)
    tracker.passed_on("a", ("t", 0), [8])
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
