"""A tape's frozen prefix is replaced while it lives: `Scheduler.refresh` on the real engine."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step import Chunk
from regions.ephemeral import Fork
from regions.offload.host_tier import HostTier
from regions.offload.residency import Idleness, Residency
from regions.offload.snapshot_format import Identity, Snapshot, SnapshotError
from regions.tape import Tape
from scheduler.interfaces import PriorityClass
from scheduler.rebuild import Rebuilder
from scheduler.refresh_policy import RETRY_NS
from scheduler.request import Failure, Request, RequestSpec, State
from scheduler.tapes import TapeItem, TapeItems
from tests.kit import tolerance
from tests.scheduler.refreshing import FROZEN, LIMITS, MODEL, RETENTION, World, carry, exact

LONGER = tuple(range(40, 60))
SHORTER = (9, 8, 7)
FLASH, SESSION, POOL, STREAM = PriorityClass


def window_of(*lengths: int, first: int = 100) -> list[TapeItem[None]]:
    """TapeItems of such lengths with tokens of their own."""
    return [TapeItem([first + (7 * n + k) % 90 for k in range(length)]) for n, length in enumerate(lengths)]


def tokens(records: TapeItems) -> list[int]:
    return [token for record in records for token in record.tokens]


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    bound = tolerance.of_model(MODEL, tolerance.largest(expected))
    return bool(tolerance.apart(actual, expected) <= bound)


@pytest.mark.parametrize("frozen", [LONGER, SHORTER, (*FROZEN, 20, 21), tuple(FROZEN[:5])])
@pytest.mark.parametrize("given_window", [False, True])
@pytest.mark.parametrize("fed", [0, 3, 15])
def test_answers_after_a_refresh_are_the_dense_model_s(
    frozen: tuple[int, ...], given_window: bool, fed: int
) -> None:
    """Also when prefixes begin alike, and whatever was evicted before."""
    world = World(carry())
    world.feed_one_by_one(fed)
    window = window_of(5, 7, 6) if given_window else None
    before = world.tape.window
    world.steps.refresh(world.tape, frozen, window)
    world.run()
    assert world.total("refreshes") == 1
    version = world.tape.version
    world.tape.make_room([6])
    kept = world.tape.window
    world.feed_one_by_one(1)
    assert (world.tape.version, world.tape.prefix) == (version + 1, frozen)
    assert kept == (tokens(window) if window else before[-len(kept) :] if kept else [])
    assert world.tape.window[: len(kept)] == kept
    if fed < 15 or window:
        assert world.off() <= 1
    world.close()


def test_the_old_prefix_is_freed_with_the_last_reader_of_its_version() -> None:
    world = World(carry())
    world.feed_one_by_one(2)
    fork = world.tape.fork()
    world.steps.refresh(world.tape, LONGER)
    world.run()
    world.feed_one_by_one(1)
    world.engine.cache.clear()
    free = world.engine.pool.blocks.free_blocks
    fork.release()
    # three blocks of the prefix and three of the window
    assert world.engine.pool.blocks.free_blocks == free + 6
    world.engine.pool.check_integrity()
    world.close()


def test_sessions_with_equal_tokens_share_the_other_prefix() -> None:
    """The second refresh computes only its window; each session's prefix is its own affair."""
    world = World(carry("a"), carry("b"), carry("c"))
    a, b, c = world.tapes
    for tape in world.tapes:
        world.feed_one_by_one(2, tape)
    passes = len(world.executor.passes)
    world.steps.refresh(a, LONGER)
    world.steps.refresh(b, LONGER)
    world.run()
    assert sum(n for batch in world.executor.passes[passes:] for _, n in batch) == len(LONGER) + 2 * 12
    for tape in world.tapes:
        world.feed_one_by_one(1, tape)
    assert a.extents[0].slot == b.extents[0].slot
    assert (a.prefix, b.prefix, c.prefix) == (LONGER, LONGER, tuple(FROZEN))
    for tape in world.tapes:
        assert world.off(tape) <= 1
    world.close()


@pytest.mark.parametrize("length", [6, 12])
def test_live_records_appended_meanwhile_are_behind_the_other_prefix_too(length: int) -> None:
    world = World(carry())
    world.feed_one_by_one(2)
    world.steps.refresh(world.tape, LONGER)
    for _ in range(3):
        world.steps.step()
        world.feed(length=length)
    world.run()
    assert world.total("refreshes") == 1
    assert world.tape.version == 5
    world.feed_one_by_one(1)
    assert world.tape.prefix == LONGER
    assert world.off() <= 1
    world.close()


def dropped(tape: Tape, records: TapeItems, failure: Failure) -> None:
    raise AssertionError(failure.message)


def test_a_session_asks_on_while_its_window_is_replaced_and_others_append_on() -> None:
    world = World(carry("a"), carry("b"))
    a, b = world.tapes
    world.feed_one_by_one(3, a)
    world.steps.refresh(a, LONGER, window_of(12, 12, 12))
    world.feed(1, a)
    while a.prefix != LONGER:
        asked, versions = world.ask(FLASH), b.version
        world.feed(1, b)
        world.steps.step()
        assert asked.state is State.FINISHED
        assert asked.version == 3
        world.steps.step()
        assert b.version == versions + 1
    world.run()
    assert a.version == 4
    world.close()


def test_a_question_forked_behind_each_prefix_shares_a_pass() -> None:
    """One pass over forks of both versions answers as two passes do."""
    world = World(carry())
    world.feed_one_by_one(4)
    old, before = world.tape.fork(), world.answer()
    world.steps.refresh(world.tape, LONGER, window_of(6, 6))
    world.feed_one_by_one(1)
    new, after = world.tape.fork(), world.answer()
    assert old.acquire(3)
    assert new.acquire(3)
    logits = world.engine.logits([Chunk(old, (5, 6, 7)), Chunk(new, (5, 6, 7))])
    assert same(logits[2], before)
    assert same(logits[5], after)
    old.release()
    new.release()
    world.close()


def commits_of(world: World) -> list[tuple[int, int]]:
    """(version, payload) of each record that is committed from now on."""
    seen: list[tuple[int, int]] = []
    world.steps.subscribe(
        lambda _, version, records: seen.extend((version, r.payload) for r in records), dropped
    )
    return seen


def test_records_behind_a_given_window_wait_and_those_before_it_do_not() -> None:
    """The old encoding never meets the new one; each record is committed once, in order."""
    world = World(carry())
    seen, tape, append = commits_of(world), world.tape, world.steps.append
    append((tape, [TapeItem([20, 21, 22], 0), TapeItem([23, 24, 25], 1)]))
    world.run()
    append((tape, [TapeItem([26, 27], 2)]))
    window = window_of(2, 2, 2)
    world.steps.refresh(tape, LONGER, window)
    append((tape, [TapeItem([150, 151], 3)]))
    append((tape, [TapeItem([152, 153], 4)]))
    world.steps.step()
    assert tape.window == [20, 21, 22, 23, 24, 25, 26, 27]
    world.run()
    assert tape.window == [*tokens(window), 150, 151, 152, 153]
    assert seen == [(1, 0), (1, 1), (2, 2), (3, 3), (3, 4)]
    assert world.off() <= 1
    assert not world.steps.queues.barriers
    world.close()


def test_records_between_two_given_windows_are_appended_to_the_first() -> None:
    world = World(carry())
    seen = commits_of(world)
    world.feed_one_by_one(3)
    first, second = window_of(4, 4), window_of(2, 2, 2, first=30)
    world.steps.refresh(world.tape, SHORTER, first)
    world.steps.append((world.tape, [TapeItem([150, 151], 3)]))
    world.steps.refresh(world.tape, LONGER, second)
    world.steps.append((world.tape, [TapeItem([160, 161], 4)]))
    windows: list[list[int]] = []
    while world.steps.step():
        windows.append(world.tape.window)
    assert [*tokens(first), 150, 151] in windows
    assert world.tape.window == [*tokens(second), 160, 161]
    assert seen[3:] == [(4, 3), (5, 4)]
    assert world.off() <= 1
    world.close()


def test_another_prefix_is_not_compared_with_the_one_before() -> None:
    """The states differ by their prompt; divergence is about what was evicted."""
    world = World(exact(every=5))
    world.feed_one_by_one(12)
    world.steps.refresh(world.tape, LONGER)
    world.run()
    assert world.total("refreshes") == 1
    assert world.total("divergence_samples") == 0
    world.close()


def test_a_refresh_of_an_exact_session_takes_the_place_of_the_one_under_way() -> None:
    world = World(exact(every=5))
    world.evict(5)
    world.steps.step()
    world.steps.refresh(world.tape, LONGER)
    world.run()
    assert world.total("refreshes") == 1
    world.feed_one_by_one(1)
    assert world.tape.prefix == LONGER
    world.feed_one_by_one(6)
    assert world.total("refreshes") == 2
    world.close()


@pytest.mark.parametrize("refreshed", [None, "prefix", "window"])
@pytest.mark.parametrize("asked_after", [0, 2, 5])
def test_a_lost_session_is_resident_again_once(
    tmp_path: Path, refreshed: str | None, asked_after: int
) -> None:
    """By its rebuild or by the refresh, whichever is first; questions and appends made meanwhile are done."""
    world = World(carry())
    residency = Residency(world.engine.pool, Idleness(1, lambda: tmp_path), world.clock)
    identity = Identity.of(world.engine.pool, model="m", tokenizer="t", frozen=FROZEN)
    residency.attach(world.tape, identity)
    Rebuilder(world.steps, world.clock)
    world.feed_one_by_one(4)
    world.clock.now += 10
    assert residency.spill_idle()
    (tmp_path / "a.kv").unlink()
    if refreshed:
        world.steps.refresh(world.tape, LONGER, window_of(6, 6) if refreshed == "window" else None)
    world.step(asked_after)
    request = world.ask()
    world.feed()
    world.run()
    assert request.state is State.FINISHED
    assert not world.tape.lost
    assert world.tape.version == 5
    assert world.tape.prefix == (LONGER if refreshed else tuple(FROZEN))
    world.feed_one_by_one(1)
    assert world.off() <= 1
    residency.detach(world.tape)
    world.close()


def test_a_snapshot_is_of_the_prefix_it_was_written_behind(tmp_path: Path) -> None:
    world = World(carry())
    residency = Residency(world.engine.pool, Idleness(1, lambda: tmp_path), world.clock)
    old = Identity.of(world.engine.pool, model="m", tokenizer="t", frozen=FROZEN)
    new = Identity.of(world.engine.pool, model="m", tokenizer="t", frozen=LONGER)
    residency.attach(world.tape, old)
    world.feed_one_by_one(4)
    world.steps.refresh(world.tape, LONGER)
    world.run()
    world.clock.now += 10
    assert not residency.spill_idle()  # readers still see the old version
    world.feed_one_by_one(1)
    world.clock.now += 10
    assert residency.spill_idle()
    Snapshot.open(tmp_path / "a.kv").expect(new)
    with pytest.raises(SnapshotError, match="frozen"):
        Snapshot.open(tmp_path / "a.kv").expect(old)
    assert world.off() <= 1  # read back
    residency.detach(world.tape)
    world.close()


def test_a_prefix_or_window_that_is_too_long_is_refused_and_changes_nothing() -> None:
    limit = len(FROZEN) + RETENTION + 10
    world = World(carry(), frame_limit=limit)
    world.feed_one_by_one(2)
    with pytest.raises(ValueError, match="frame limit"):
        world.steps.refresh(world.tape, range(limit - RETENTION))
    with pytest.raises(ValueError, match="exceed the retention"):
        world.steps.refresh(world.tape, LONGER[:4], window_of(RETENTION + 1))
    world.run()
    assert world.total("refreshes") == 0
    world.steps.refresh(world.tape, range(5, 5 + limit - RETENTION - 1))
    world.run()
    world.feed_one_by_one(12)
    assert max(each.max_position for each in world.tape.state.stretches) < limit
    world.close()


@pytest.mark.parametrize("given_window", [False, True])
def test_a_refresh_that_fails_is_tried_again_a_second_later(given_window: bool) -> None:
    world = World(carry("a"), carry("b"))
    world.feed_one_by_one(3)
    world.executor.fail_next = 1
    world.steps.refresh(world.tape, LONGER, window_of(6) if given_window else None)
    world.steps.step()
    world.run()
    assert (world.total("refreshes"), world.total("refresh_failures")) == (0, 1)
    world.feed()
    world.run()
    assert world.tape.live_records == (3 if given_window else 4)
    assert world.refresher.idle() == RETRY_NS * 1e-9
    world.clock.now += RETRY_NS
    world.feed_one_by_one(1, world.tapes[1])  # a busy worker is never idle
    assert world.total("refreshes") == 1
    assert world.refresher.idle() is None
    world.feed_one_by_one(1)
    assert world.off() <= 1
    world.close()


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("how", ["stop", "forget", "close"])
@pytest.mark.parametrize("given_window", [False, True])
def test_whenever_it_is_ended_no_block_is_lost(how: str, steps: int, given_window: bool) -> None:
    """At a stop, records that wait still get their window."""
    world = World(carry())
    world.feed_one_by_one(3)
    world.steps.refresh(world.tape, LONGER, window_of(6, 6, 6) if given_window else None)
    world.feed()
    world.step(steps)
    refreshed = world.total("refreshes")
    if how == "close":
        world.steps.close()
    elif how == "stop":
        world.steps.run_between(world.refresher.stop)
    else:
        world.refresher.forget(world.tape)
    world.run()
    if how == "stop" and given_window:
        assert world.total("refreshes") == 1
        assert world.tape.version == 4
    elif how == "forget" and steps:
        assert world.total("refreshes") == refreshed
    world.close()


def test_records_that_arrive_after_the_stop_get_their_window() -> None:
    """A draining daemon still reads what is in the ring."""
    world = World(carry())
    world.feed_one_by_one(3)
    world.steps.run_between(world.refresher.stop)
    world.run()
    window = window_of(4, 4)
    world.steps.refresh(world.tape, LONGER, window)
    world.steps.append((world.tape, [TapeItem([150, 151])]))
    world.run()
    assert world.tape.prefix == LONGER
    assert world.tape.window == [*tokens(window), 150, 151]
    assert world.off() <= 1
    world.steps.refresh(world.tape, SHORTER)  # no record waits for it
    world.run()
    assert world.total("refreshes") == 1
    world.close()


@pytest.mark.parametrize("steps", range(5))
def test_records_do_not_wait_for_another_session_s_background_refresh(steps: int) -> None:
    """It gets no token while other work fills every batch; it restarts afterwards."""
    world = World(exact("a", every=1), carry("b"))
    a, b = world.tapes
    world.feed_one_by_one(3, b)
    world.evict(1, a)

    def step_under_load() -> None:
        for _ in range(3):
            prompt = [world.rng.randrange(3, 100) for _ in range(LIMITS.max_batch_tokens)]
            open_prompt = world.engine.open_prompt
            world.steps.submit(Request(RequestSpec(POOL, "p", prompt, 1, id, open_prompt=open_prompt)))
        world.steps.step()

    world.step(steps)
    step_under_load()
    world.steps.refresh(b, LONGER, window_of(4, 4))
    world.steps.append((b, [TapeItem([150, 151])]))
    for _ in range(40):
        step_under_load()
    assert b.prefix == LONGER
    world.run()
    assert world.total("refreshes", "a") == 1
    assert world.off(b) <= 1
    world.close()


def test_a_tape_without_a_refresher_is_left_alone() -> None:
    world = World(carry())
    world.refresher.forget(world.tape)
    world.steps.refresh(world.tape, LONGER, window_of(5))
    world.feed_one_by_one(1)
    assert world.tape.prefix == tuple(FROZEN)
    assert world.tape.version == 1
    world.close()


# Random histories.


def encoded(bar: int, encoding: int) -> list[int]:
    return [3 + (11 * bar + 5 * k + 23 * encoding) % 190 for k in range(3 + bar % 4)]


def prefix_of(encoding: int, questions: int) -> tuple[int, ...]:
    return (4, 5, 30 + encoding, *range(60, 60 + 2 * questions))


@dataclass(frozen=True)
class Feed:
    bars: int


@dataclass(frozen=True)
class Refresh:
    questions: int
    again: bool
    """Encode the window again."""


actions = st.one_of(
    st.builds(Feed, st.integers(1, 4)),
    st.builds(Refresh, st.integers(0, 4), st.booleans()),
    st.sampled_from(["step", "step", "step", "fork", "ask", "offload", "rest"]),
)


class Encoder:
    """What the data plane does: one encoding at a time, and a window in it when it changes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bars: list[int] = []
        self.encoding = self.questions = 0
        self.committed: list[int] = []
        world.steps.subscribe(self.on_commit, dropped)

    def feed(self, bars: int) -> None:
        new = range(len(self.bars), len(self.bars) + bars)
        self.bars += new
        self.world.steps.append((self.world.tape, [TapeItem(encoded(n, self.encoding), n) for n in new]))

    def refresh(self, action: Refresh) -> None:
        window: list[TapeItem[None]] | None = None
        self.questions = action.questions
        if action.again:
            self.encoding += 1
            window = [TapeItem(encoded(n, self.encoding)) for n in self.bars[-8:]]
        frozen = prefix_of(self.encoding, self.questions)
        self.world.steps.refresh(self.world.tape, frozen, window)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """A version has one encoding, that of its prefix, and the newest bars."""
        self.committed += [record.payload for record in records]
        encoding = tape.prefix[2] - 30 if len(tape.prefix) > 2 and tape.prefix[0] == 4 else 0
        newest = self.committed[-tape.live_records :]
        assert tape.window == [token for n in newest for token in encoded(n, encoding)]
        fork = tape.fork()
        assert fork.prefix == tape.prefix
        fork.release()


@settings(max_examples=60)
@given(st.lists(actions, max_size=40), st.booleans())
def test_any_history_of_refreshes_keeps_every_record_and_every_version(
    load: list[object], exactly: bool
) -> None:
    world = World(exact(every=3) if exactly else carry(), blocks=200)
    encoder, host = Encoder(world), HostTier(world.engine.pool, 60)
    forks: list[tuple[Fork, torch.Tensor]] = []
    for action in load:
        if isinstance(action, Feed):
            encoder.feed(action.bars)
        elif isinstance(action, Refresh):
            encoder.refresh(action)
        elif action == "step":
            world.steps.step()
        elif action == "rest":
            world.run()
        elif action == "ask":
            world.ask()
        elif action == "offload" and world.tape.movable:
            assert world.tape.swap_out(host)
            host.poll()
        elif action == "fork" and len(forks) < 4:
            forks.append((world.tape.fork(), world.answer()))
        world.engine.pool.check_integrity()
    encoder.feed(1)
    world.run()
    assert encoder.committed == encoder.bars
    assert not world.steps.queues.barriers
    if any(isinstance(action, Refresh) for action in load):
        assert world.tape.prefix == prefix_of(encoder.encoding, encoder.questions), "the newest wins"
    for fork, answer in forks:
        assert same(world.answer(fork=fork), answer)
    # a last refresh with nothing evicted behind it is the dense model's
    world.tape.make_room([6])
    encoder.feed(1)
    world.run()
    world.tape.make_room([6, 6])
    world.steps.refresh(world.tape, prefix_of(encoder.encoding, 5))
    world.run()
    encoder.feed(1)
    world.run()
    assert world.tape.prefix == prefix_of(encoder.encoding, 5)
    assert world.off() <= 1
    world.close()


def test_prefix_and_window_are_prefilled_within_the_budgets() -> None:
    """The smallest chunk a pass where nothing waits; like other prompts where records do."""
    for window, most in ((None, LIMITS.chunk_min), (window_of(20, 20), LIMITS.chunk_max)):
        world = World(carry())
        world.feed_one_by_one(8)
        passes = len(world.executor.passes)
        world.steps.refresh(world.tape, LONGER, window)
        world.run()
        assert world.total("refreshes") == 1
        assert max(n for batch in world.executor.passes[passes:] for _, n in batch) <= most
        world.close()


@pytest.mark.parametrize("leaving", [1, 4, 9, 10])
@pytest.mark.parametrize("appended", [0, 2, 6])
def test_what_leaves_the_window_with_a_refresh_is_readable_until_then(leaving: int, appended: int) -> None:
    """Not before, also not of a fork taken while the version is the same; the answers are the dense model's.

    The window is full, so what is appended meanwhile evicts as ever, and no more than it must.
    """
    world = World(carry())
    world.feed_one_by_one(13)
    tape, first = world.tape, world.tape.evicted_records + leaving
    early, before, asked = tape.fork(), world.answer(), tape.window
    adopted: list[tuple[int, ...]] = []
    world.steps.refresh(tape, LONGER, first=first, adopted=lambda: adopted.append(tape.prefix))
    world.feed(appended)
    world.run()
    assert adopted == [LONGER]
    assert tape.evicted_records == max(first, 3 + appended)
    late = tape.fork()
    if not appended:
        assert late.prefix == tuple(FROZEN)
        assert tape.window == asked[6 * leaving :]
        assert same(world.answer(fork=late), before)
    else:
        late.release()
    world.feed(1)
    world.run()
    assert tape.evicted_records == max(first, 3 + appended, 14 + appended - RETENTION // 6)
    assert tape.live_records == 14 + appended - tape.evicted_records
    if leaving > appended:  # nothing was evicted since the window begins where it begins
        assert world.off() <= 1
    assert same(world.answer(fork=early), before)
    world.close()


def test_another_prefix_does_not_keep_what_was_to_leave_the_window() -> None:
    """The newest call wins, and the records of the one before leave with it."""
    world = World(carry())
    world.feed_one_by_one(8)
    adopted: list[str] = []
    world.steps.refresh(world.tape, LONGER, first=5, adopted=lambda: adopted.append("longer"))
    world.steps.step()
    world.steps.refresh(world.tape, SHORTER)
    world.run()
    assert adopted == ["longer"]
    assert world.total("refreshes") == 1
    world.feed_one_by_one(1)
    assert (world.tape.prefix, world.tape.evicted_records, world.tape.live_records) == (SHORTER, 5, 4)
    assert world.off() <= 1
    world.close()


def test_records_that_left_with_a_refresh_left_no_trace_to_refresh_for() -> None:
    world = World(exact(every=5))
    world.feed_one_by_one(9)
    world.steps.refresh(world.tape, LONGER, first=6)
    world.run()
    world.feed_one_by_one(4)
    assert world.tape.evicted_records == 6
    assert world.total("refreshes") == 1
    world.close()


@pytest.mark.parametrize("first", [0, 2])
def test_a_stored_session_adopts_at_once_what_is_left_of_its_window(first: int) -> None:
    """The version that was stored is dropped, so its older records cannot be read any more."""
    world = World(carry())
    world.feed_one_by_one(6)
    host = HostTier(world.engine.pool, 40)
    assert world.tape.swap_out(host)
    world.steps.refresh(world.tape, LONGER, first=first)
    world.run()
    host.poll()
    assert host.pool.free_blocks == host.pool.total_blocks
    assert (world.tape.resident, world.tape.live_records, world.tape.version) == (True, 6 - first, 6)
    assert world.off() <= 1
    fork = world.tape.fork()
    assert fork.prefix == LONGER
    fork.release()
    world.close()
