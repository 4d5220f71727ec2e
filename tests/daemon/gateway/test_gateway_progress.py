"""Numbers and progress of sessions over the lives of engines, against a list of what was acknowledged."""

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.commit_metadata import pack, unpack
from daemon.gateway.checkpoint.state import FILE, ProgressStore
from daemon.progress import Position, Progress, WindowStart
from metrics.store import MetricStore
from tests.kit.flushes import noted_flushes


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
    before.read([progress.describe(["aaa"])])
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


def test_of_a_session_in_several_texts_the_newest_counts(store: MetricStore) -> None:
    progress = ProgressStore(store)
    old, new = Progress(2, 30, 100, (5,)), Progress(3, 12, 90, (7,))
    progress.read([pack(3, {"aaa": new}).text, pack(4, {"aaa": old, "bbb": old}).text, ""])
    assert progress.start(["aaa", "bbb", "ccc"]) == {
        "aaa": Progress(5, 12, 90, (7,)),
        "bbb": Progress(5, 30, 100, (5,)),
        "ccc": Progress(epoch=5),
    }


def test_a_text_that_is_not_ours_is_counted_and_harms_nothing(
    store: MetricStore, caplog: pytest.LogCaptureFixture
) -> None:
    progress = ProgressStore(store)
    text = pack(3, {"aaa": Progress(3, 12, 90)}).text
    with caplog.at_level(logging.WARNING):
        progress.read(["offset written by hand", text[:-1], text])
    assert store.value("foretick_recovery_progress_refused_total") == 2
    assert caplog.text.count("progress stored with an offset is not used") == 2
    assert progress.start(["aaa"]) == {"aaa": Progress(4, 12, 90)}


def test_bars_up_to_what_is_acknowledged_are_history_until_the_past_is_asked_for(store: MetricStore) -> None:
    progress = ProgressStore(store)
    progress.read([pack(1, {"aaa": Progress(1, 3, 18, (70, 80), corrected=(2, 5))}).text])
    progress.start(["aaa"])
    assert progress.is_history("aaa", (70, 80))
    assert progress.is_history("aaa", (60, 80))
    assert not progress.is_history("aaa", (80, 80))
    assert not progress.is_history("aaa", ()), "this engine does not say"
    assert not progress.is_history("bbb", (1,))
    assert progress.is_history("aaa", (70, 80), (2, 5))
    assert not progress.is_history("aaa", (70, 80), (3, 5)), "a bar was corrected once more"
    assert not progress.is_history("bbb", (1,), (2,))
    assert progress.start(["aaa"], again=True)["aaa"].closed == ()
    assert not progress.is_history("aaa", (60, 80))


def test_another_owner_s_progress_begins_another_epoch_and_our_own_does_not(store: MetricStore) -> None:
    ours = ProgressStore(store)
    ours.start(["aaa", "bbb"])
    ours.acknowledge("aaa", 4, [ours.number("aaa")], (9,))
    ours.promote([ours.describe(["aaa"])])
    assert ours.epoch == 1
    ours.promote([pack(6, {"bbb": Progress(6, 50, 300, (40,))}).text])
    assert ours.epoch == 7
    assert ours.number("bbb") == 301
    assert ours.number("aaa") == 2
    assert ours.is_history("bbb", (40,))


def test_sessions_that_find_no_room_are_named_once(
    store: MetricStore, caplog: pytest.LogCaptureFixture
) -> None:
    progress = ProgressStore(store)
    names = [f"{n:x}" * 8 for n in range(0x10000, 0x10000 + 300)]
    progress.start(names)
    for n, name in enumerate(names):
        progress.acknowledge(name, n * 7919, [progress.number(name)], (n * 104_729,))
    with caplog.at_level(logging.WARNING):
        text = progress.describe(names)
        assert progress.describe(names) == text
    left = 300 - len(unpack(text).sessions)
    assert left
    assert store.value("foretick_recovery_progress_excluded_total") == left
    assert caplog.text.count(f"the progress of {left} sessions finds no room") == 1


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
    (directory / FILE).write_text((directory / FILE).read_text()[:-3])
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
