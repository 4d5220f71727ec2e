"""Numbers and progress of sessions over the lives of engines, against a list of what was acknowledged."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.checkpoint.state import FILE, ProgressStore
from daemon.progress import Position, Progress, WindowStart
from feeds.source import CommitPoint, Partition
from metrics.store import MetricStore
from tests.kit.flushes import noted_flushes
from tests.kit.progress import stored


@pytest.fixture
def store() -> MetricStore:
    return MetricStore.local({"session": [], "source": [], "sink": []})


def test_a_new_session_begins_with_number_one_of_epoch_one(store: MetricStore) -> None:
    progress = ProgressStore(store)
    assert progress.start(["aaa"]) == {"aaa": Progress(epoch=1)}
    assert [progress.number("aaa") for _ in range(3)] == [1, 2, 3]


versions = st.lists(st.integers(0, 4), max_size=12)
"""Answers of each version."""


@given(versions, st.data())
def test_numbers_go_on_behind_the_newest_below_which_all_are_acknowledged(
    sizes: list[int], data: st.DataObject
) -> None:
    """Answers of versions mix; versions are acknowledged in order, as far as the engine lives."""
    store = MetricStore.local({"session": [], "source": [], "sink": []})
    progress = ProgressStore(store)
    progress.start(["aaa"])
    slots = data.draw(st.permutations([v for v, size in enumerate(sizes, 1) for _ in range(size)]))
    numbers: dict[int, list[int]] = {v: [] for v in range(1, len(sizes) + 1)}
    for version in slots:
        numbers[version].append(progress.number("aaa"))
    alive = data.draw(st.integers(0, len(sizes)))
    acknowledged = {0}
    for version in range(1, alive + 1):
        progress.acknowledge("aaa", version, numbers[version], (version * 10,))
        acknowledged |= set(numbers[version])
    complete = next(n for n in range(len(slots) + 1) if n + 1 not in acknowledged)
    assert progress.of("aaa").sequence == complete
    before = ProgressStore(store)
    before.read(at(progress.describe(["aaa"])))
    closed = (alive * 10,) if alive else ()
    assert before.start(["aaa"]) == {"aaa": Progress(2, alive, complete, closed)}
    assert before.number("aaa") == complete + 1
    progress.go_on()
    assert progress.number("aaa") == complete + 1


def test_a_window_whose_beginning_is_not_known_begins_behind_the_last_one_that_is(store: MetricStore) -> None:
    progress = ProgressStore(store)
    progress.start(["aaa"])
    window = WindowStart(7, (Position("", "ticks", 0, 40),))
    progress.acknowledge("aaa", 1, [progress.number("aaa")], (10,), window)
    progress.acknowledge("aaa", 2, [progress.number("aaa")], (20,))
    assert progress.of("aaa") == Progress(1, 2, 2, (20,), window)
    progress.removed("aaa", 2)
    progress.acknowledge("aaa", 3, [progress.number("aaa")], (30,))
    assert progress.of("aaa").window == WindowStart()


def at(*states: Mapping[str, bytes]) -> dict[Partition, CommitPoint]:
    """Points of as many partitions."""
    return {("t", number): CommitPoint(0, state) for number, state in enumerate(states)}


def test_of_several_records_of_a_session_the_furthest_counts(store: MetricStore) -> None:
    progress = ProgressStore(store)
    old, new = Progress(2, 30, 100, (5,)), Progress(3, 12, 90, (7,))
    progress.read(
        at(
            stored(3, {"aaa": new}),
            stored(4, {"bbb": old}) | stored(4, {"aaa": old}, writer="woke up late"),
            {},
        )
    )
    assert progress.start(["aaa", "bbb", "ccc"]) == {
        "aaa": Progress(5, 12, 90, (7,)),
        "bbb": Progress(5, 30, 100, (5,)),
        "ccc": Progress(epoch=5),
    }


def test_a_record_that_is_not_ours_is_counted_and_harms_nothing(
    store: MetricStore, caplog: pytest.LogCaptureFixture
) -> None:
    progress = ProgressStore(store)
    found = stored(3, {"aaa": Progress(3, 12, 90)})
    (record,) = found.values()
    with caplog.at_level(logging.WARNING):
        progress.read(at({"hand/aaa": b"made by hand", "cut/aaa": record[:-1]}, found))
    assert store.value("foretick_recovery_progress_refused_total") == 2
    assert caplog.text.count("is not used") == 2
    assert progress.start(["aaa"]) == {"aaa": Progress(4, 12, 90)}


def test_bars_up_to_what_is_acknowledged_are_history_until_the_past_is_asked_for(store: MetricStore) -> None:
    progress = ProgressStore(store)
    progress.read(at(stored(1, {"aaa": Progress(1, 3, 18, (70, 80), written=((1, 2), (2, 5)))})))
    progress.start(["aaa"])
    assert progress.is_history("aaa", (70, 80))
    assert progress.is_history("aaa", (60, 80))
    assert not progress.is_history("aaa", (80, 80))
    assert not progress.is_history("aaa", ()), "this engine does not say"
    assert not progress.is_history("bbb", (1,))
    assert progress.is_history("aaa", (70, 80), ((1, 2), (2, 5)))
    assert not progress.is_history("aaa", (70, 80), ((1, 3), (2, 5))), "a bar was corrected once more"
    assert not progress.is_history("aaa", (70, 80), ((3, 1),)), "an event of another stream"
    assert not progress.is_history("bbb", (1,), ((1, 2),))
    assert progress.start(["aaa"], again=True)["aaa"].closed == ()
    assert not progress.is_history("aaa", (60, 80))


def test_an_engine_that_answered_nothing_has_an_epoch_of_its_own(store: MetricStore) -> None:
    """It may have published what is not acknowledged."""
    first, second = ProgressStore(store), ProgressStore(store)
    first.start(["aaa"])
    second.read(at(first.describe([])))
    assert second.start(["aaa"]) == {"aaa": Progress(epoch=2)}
    assert second.readers(CommitPoint(0, first.describe([]))) == set()
    assert second.owners([CommitPoint(0, first.describe([]))]) == {}


def test_our_own_records_name_no_other_owner(store: MetricStore) -> None:
    """They stay for a moment where a partition went to another daemon."""
    ours = ProgressStore(store, address="tcp://here")
    theirs = ProgressStore(store, address="tcp://there")
    assert ours.owners([CommitPoint(0, ours.describe(["aaa"]))]) == {}
    both = {**ours.describe(["aaa"]), **theirs.describe(["aaa"])}
    assert ours.owners([CommitPoint(0, both)]) == {"aaa": "tcp://there"}
    assert theirs.owners([CommitPoint(0, both)]) == {"aaa": "tcp://here"}


def test_another_owner_s_progress_begins_another_epoch_and_our_own_does_not(store: MetricStore) -> None:
    ours = ProgressStore(store)
    ours.start(["aaa", "bbb"])
    ours.acknowledge("aaa", 4, [ours.number("aaa")], (9,))
    ours.promote(at(ours.describe(["aaa"])))
    ours.begin_epoch()
    assert ours.epoch == 1
    ours.promote(at(stored(6, {"bbb": Progress(6, 50, 300, (40,))})))
    assert ours.epoch == 1, "until it is stored in all partitions"
    ours.begin_epoch()
    assert ours.epoch == 7
    ours.promote(at(stored(3, {"bbb": Progress(6, 51, 306, (41,))})))
    ours.begin_epoch()
    assert ours.epoch == 8, "theirs is older, and we may have published what they did since"
    ours.read(at(stored(30, {"ccc": Progress(30, 1, 6, (1,))})))
    ours.begin_epoch()
    assert ours.epoch == 8, "what others answer elsewhere is theirs"
    assert ours.number("bbb") == 307
    assert ours.number("aaa") == 2
    assert ours.is_history("bbb", (41,))


def test_of_two_that_start_at_once_the_later_owner_has_the_newer_epoch(store: MetricStore) -> None:
    """The first one may have published what it has not stored; it stores its epoch before that."""
    first, second = ProgressStore(store), ProgressStore(store)
    for each in (first, second):
        each.start(["aaa"])
    point = CommitPoint(3)
    for each, epochs in ((first, (1, 1)), (second, (1, 2)), (first, (3, 2)), (first, (3, 2))):
        assert each.promote({("t", 0): point}) == set()
        point = each.claim(point)
        each.begin_epoch()
        assert (first.epoch, second.epoch) == epochs


def test_thousands_of_sessions_are_stored_each_under_a_name_of_this_daemon(store: MetricStore) -> None:
    names = [f"session-{number}" for number in range(5000)]
    progress, other = ProgressStore(store), ProgressStore(store)
    progress.start(names)
    progress.acknowledge(names[7], 4, [progress.number(names[7])], (9,))
    found = progress.describe(names)
    assert progress.readers(CommitPoint(0, found)) == set(names)
    assert not found.keys() & other.describe(names).keys()
    other.read(at(found))
    assert other.start(names) == dict.fromkeys(names, Progress(2)) | {names[7]: Progress(2, 4, 1, (9,))}


async def test_the_file_goes_on_where_a_source_keeps_no_offsets(store: MetricStore, tmp_path: Path) -> None:
    directory = tmp_path / "state"
    progress = ProgressStore(store, directory)
    progress.start(["aaa"])
    progress.acknowledge("aaa", 4, [progress.number("aaa")], (9,))
    assert await progress.save()
    written = (directory / FILE).stat().st_mtime_ns
    assert await progress.save()
    assert (directory / FILE).stat().st_mtime_ns == written, "nothing changed"
    assert ProgressStore(store, directory).start(["aaa"]) == {"aaa": Progress(2, 4, 1, (9,))}
    (directory / FILE).write_bytes((directory / FILE).read_bytes()[:-3])
    assert ProgressStore(store, directory).start(["aaa"]) == {"aaa": Progress(1)}
    assert store.value("foretick_recovery_progress_refused_total") == 1


async def test_the_file_and_its_name_are_on_disk_before_it_counts_as_written(
    store: MetricStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync of the file, rename, fsync of the directory; what a killed daemon left beside it is removed."""
    (tmp_path / f".{FILE}.4711.tmp").touch()
    progress = ProgressStore(store, tmp_path)
    assert os.listdir(tmp_path) == []
    steps = noted_flushes(monkeypatch)
    progress.start(["aaa"])
    assert await progress.save()
    assert steps == ["file", "rename", "directory"]


async def test_a_file_that_cannot_be_written_or_read_is_counted(store: MetricStore, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the directory should be")
    progress = ProgressStore(store, tmp_path / "state")
    assert store.value("foretick_recovery_progress_refused_total") == 1
    progress.start(["aaa"])
    assert not await progress.save()
    assert not await progress.save()
    assert store.value("foretick_recovery_progress_failed_total") == 2
