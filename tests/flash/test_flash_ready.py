"""The ready position: evaluated at every version."""

from flash.early_exit import ReadyToken
from flash.ready import ReadyPosition
from tests.flash.test_flash_evaluator import EIGHT, ONE_AT_A_TIME, YES_NO, Flash
from tests.kit.scheduler.fakes import FakeTape, one_by_one

HEADER = (3, 1, 4)


class Newest(dict[str, ReadyToken]):
    """The newest result of each session."""

    def take(self, session: str, ready: ReadyToken) -> None:
        self[session] = ready


def expected(tape: FakeTape, version: int) -> ReadyToken:
    (row,) = one_by_one(tape.history[version], HEADER, 1, frozenset(), None)
    return ReadyToken(version, row.token, row.gap)


def test_every_version_has_its_row_in_the_batch_of_its_standing_questions() -> None:
    flash = Flash(YES_NO)
    ready = Newest()
    ReadyPosition(flash.h.scheduler, HEADER, ready.take)
    tapes = [flash.session("A"), flash.session("B")]
    assert ready.get("A") is None
    for version in (1, 2, 3):
        for tape in tapes:
            flash.feed(tape)
        flash.h.run()
        assert len(flash.h.executor.batches[-1]) == 4, "two sessions, each with a question and a header"
        assert [ready.get(tape.name) for tape in tapes] == [expected(tape, version) for tape in tapes]
    assert flash.h.memory.references == {block: 1 for tape in tapes for block in tape.blocks}


def test_a_newer_version_replaces_a_row_that_has_not_run() -> None:
    """The other session's questions take all cells, one at a time."""
    flash = Flash(*EIGHT, limits=ONE_AT_A_TIME)
    busy, calm = flash.session("busy"), flash.h.tape("calm")
    flash.begin(busy)
    ready = Newest()
    ReadyPosition(flash.h.scheduler, HEADER, ready.take)
    flash.commit(calm, 3)
    assert (calm.version, ready.get("calm")) == (3, None)
    batches = len(flash.h.executor.batches)
    flash.h.run()
    assert ready.get("calm") == expected(calm, 3)
    rows = [tuple(row.tokens) for batch in flash.h.executor.batches[batches:] for row in batch]
    assert rows.count(HEADER) == 1
    assert set(flash.h.memory.references.values()) == {1}


def test_a_row_that_fails_leaves_the_older_result() -> None:
    flash = Flash()
    ready, tape = Newest(), flash.h.tape("A")
    ReadyPosition(flash.h.scheduler, HEADER, ready.take)
    flash.play(tape)
    flash.feed(tape)
    flash.h.scheduler.step()
    flash.h.executor.fail_next = 1
    flash.h.run()
    assert ready.get("A") == expected(tape, 1)
