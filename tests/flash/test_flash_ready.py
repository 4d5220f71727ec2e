"""The ready position: evaluated at every version; when an ask may exit on it."""

import pytest

from flash.ready import ReadyPosition, ReadyToken, exits
from tests.flash.test_flash_evaluator import EIGHT, ONE_AT_A_TIME, YES_NO, Flash
from tests.kit.scheduler.fakes import FakeTape, one_by_one

HEADER = (3, 1, 4)


def expected(tape: FakeTape, version: int) -> ReadyToken:
    (row,) = one_by_one(tape.history[version], HEADER, 1, frozenset(), None)
    return ReadyToken(version, row.token, row.gap)


def test_every_version_has_its_row_in_the_batch_of_its_standing_questions() -> None:
    flash = Flash(YES_NO)
    ready = ReadyPosition(flash.h.scheduler, HEADER)
    tapes = [flash.session("A"), flash.session("B")]
    assert ready.newest("A") is None
    for version in (1, 2, 3):
        for tape in tapes:
            flash.feed(tape)
        flash.h.run()
        assert len(flash.h.executor.batches[-1]) == 4, "two sessions, each with a question and a header"
        assert [ready.newest(tape.name) for tape in tapes] == [expected(tape, version) for tape in tapes]
    assert flash.h.memory.references == {block: 1 for tape in tapes for block in tape.blocks}


def test_a_newer_version_replaces_a_row_that_has_not_run() -> None:
    """The other session's questions take all cells, one at a time."""
    flash = Flash(*EIGHT, limits=ONE_AT_A_TIME)
    busy, calm = flash.session("busy"), flash.h.tape("calm")
    flash.begin(busy)
    ready = ReadyPosition(flash.h.scheduler, HEADER)
    flash.commit(calm, 3)
    assert (calm.version, ready.newest("calm")) == (3, None)
    batches = len(flash.h.executor.batches)
    flash.h.run()
    assert ready.newest("calm") == expected(calm, 3)
    rows = [tuple(row.tokens) for batch in flash.h.executor.batches[batches:] for row in batch]
    assert rows.count(HEADER) == 1
    assert set(flash.h.memory.references.values()) == {1}


def test_a_row_that_fails_leaves_the_older_result() -> None:
    flash = Flash()
    ready, tape = ReadyPosition(flash.h.scheduler, HEADER), flash.h.tape("A")
    flash.play(tape)
    flash.feed(tape)
    flash.h.scheduler.step()
    flash.h.executor.fail_next = 1
    flash.h.run()
    assert ready.newest("A") == expected(tape, 1)


@pytest.mark.parametrize(
    ("ready", "tau", "exited"),
    [
        (ReadyToken(4, 7, 2.5), 2.0, True),
        (ReadyToken(4, 7, 2.0), 2.0, False),  # not above tau
        (ReadyToken(4, 7, 99.0), 0.0, False),  # off
        (ReadyToken(3, 7, 2.5), 2.0, False),  # of an older version
        (ReadyToken(4, 6, 2.5), 2.0, False),  # no choice begins with it
        (None, 2.0, False),
    ],
)
def test_an_ask_exits_early_only_on_a_sure_choice_of_its_version(
    ready: ReadyToken | None, tau: float, exited: bool
) -> None:
    assert exits(ready, 4, (7, 8), tau) is exited
    assert not exits(ready, 4, (), tau), "an ask without choices"
