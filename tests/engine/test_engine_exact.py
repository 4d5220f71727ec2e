"""A window prefilled again equals the dense model's and is adopted at a version; divergence of `carry`."""

import math
from collections.abc import Sequence

import pytest
import torch

from engine.divergence import Divergence, divergences, probe, window_of
from engine.model.canary import dense_logits
from engine.step import Chunk
from regions.tape import Retention
from tests.engine.oracle import History, oracle_logits
from tests.kit import tolerance
from tests.kit.engine import TapeWithHistory, append, ask, prefill, tokens

CHUNK = 13
SLIDING = ["llama", "gemma2", "gpt_oss"]


class RefreshedTape(TapeWithHistory):
    """Its window can be prefilled again."""

    def __init__(self, architecture: str = "llama", frame_limit: int = 170) -> None:
        super().__init__(architecture, blocks=120, frame_limit=frame_limit, records=22)

    def answer(self, question: Sequence[int]) -> torch.Tensor:
        """Logits of a question to the current version."""
        fork = self.tape.fork()
        logits = ask(self.engine, fork, question)
        fork.release()
        return logits

    def dense(self, window: Sequence[int], then: Sequence[int]) -> torch.Tensor:
        """The unmodified model's logits of ``then`` behind frozen prefix and ``window``."""
        return dense_logits(self.model, [*self.frozen, *window, *then])[-len(then) :]

    def refresh(self) -> None:
        fresh = self.tape.fresh_window()
        prefill(self.engine, fresh, self.tape.window, CHUNK)
        self.tape.adopt(fresh)


@pytest.mark.parametrize("architecture", SLIDING)
def test_after_a_refresh_behind_the_last_eviction_logits_are_those_of_a_fresh_prefill(
    architecture: str,
) -> None:
    """The new record's and a question's; a carried tape's are far from them."""
    world = RefreshedTape(architecture)
    tape, question = world.tape, tokens(world.rng, 6)
    tape.make_room([20])  # the last eviction: what comes below fits
    world.append(5)
    window = tape.window
    carried = world.answer(question)
    expected = world.dense(window, question)
    assert tolerance.apart(carried, expected) > 25 * tolerance.of_model(
        world.model, tolerance.largest(expected)
    )
    world.refresh()
    version, before = tape.version, tape.window
    record = world.append(7)
    assert tape.version == version + 1
    assert tape.window[: len(before)] == before == window  # nothing was evicted
    new = tape.window[len(before) :]
    tolerance.assert_logits(world.model, record, world.dense(window, new))
    tolerance.assert_logits(world.model, world.answer(question), world.dense(tape.window, question))


@pytest.mark.parametrize("architecture", SLIDING)
def test_questions_of_the_version_before_the_adoption_read_the_carried_state(architecture: str) -> None:
    """Forked before the adoption and asked after it, and forked after it while the version is the same."""
    world = RefreshedTape(architecture)
    tape = world.tape
    tape.make_room([20])  # what comes below fits
    world.append(5)
    coord, evicted = world.coord, tape.evicted_tokens
    early = tape.fork()
    question = tokens(world.rng, 6)
    before = world.answer(question)
    world.refresh()
    late = tape.fork()
    assert early.version == late.version == tape.version
    for owner, fork in enumerate((early, late), 1):
        where = world.history.add(question, coord, evicted, owner)
        actual = ask(world.engine, fork, question)
        tolerance.assert_logits(world.model, actual, oracle_logits(world.model, world.history)[where])
        tolerance.assert_logits(world.model, actual, before)
    # once an append made a version, that reads the fresh window, and the old reader still the old one
    world.append(4)
    second = tokens(world.rng, 3)
    where = world.history.add(second, coord + 6, evicted, owner=1)
    expected = oracle_logits(world.model, world.history)[where]
    tolerance.assert_logits(world.model, ask(world.engine, early, second), expected)
    tolerance.assert_logits(world.model, world.answer(question), world.dense(tape.window, question))
    early.release()
    late.release()


def test_what_was_appended_and_evicted_during_the_prefill_is_caught_up_with_and_left_out() -> None:
    """Records evicted since are absorbed by those behind them, as in any window: the oracle agrees."""
    world = RefreshedTape()
    tape = world.tape
    fresh = tape.fresh_window()
    window, begun, evicted = tape.window, tape.evicted_tokens, tape.evicted_tokens
    prefill(world.engine, fresh, window, CHUNK)
    for _ in range(4):
        world.append(9)
    missing = tape.window[fresh.begins_at + fresh.length - tape.evicted_tokens :]
    assert len(missing) == 36
    passed = tape.evicted_tokens - begun
    assert 0 < passed < len(window)
    prefill(world.engine, fresh, missing, CHUNK)
    history = History.begin(world.frozen)
    history.add([*window, *missing], begun, evicted)
    tape.adopt(fresh)
    assert tape.window == [*window, *missing][passed:]
    record = tokens(world.rng, 5)
    actual = append(world.engine, tape, record)
    history.add(record, begun + len(window) + len(missing), tape.evicted_tokens, logits=actual)
    history.verify(world.model)


@pytest.mark.parametrize("late", [False, True], ids=["adopted, then room", "room, then adopted"])
def test_records_together_behind_an_adopted_window_see_what_they_would_one_by_one(late: bool) -> None:
    """What is evicted for the later ones is in no version yet: it is kept until they are committed."""
    world = RefreshedTape()
    tape = world.tape
    begun, window = tape.evicted_tokens, tape.window
    records = [tokens(world.rng, n) for n in (9, 12, 5)]
    flat, lengths = [token for record in records for token in record], [9, 12, 5]
    fresh = tape.fresh_window()
    prefill(world.engine, fresh, window, CHUNK)
    if not late:
        tape.adopt(fresh)
    history = History.begin(world.frozen)
    history.add(window, begun, begun)
    evicted, live = begun, [len(record.tokens) for record in tape.state.records]
    tape.make_room(lengths)
    if late:
        tape.adopt(fresh)
    assert tape.acquire(len(flat))
    actual = world.engine.logits([Chunk(tape, flat)])
    places, coord = [], begun + len(window)
    for record in records:
        while sum(live) + len(record) > 64:
            evicted += live.pop(0)
        live.append(len(record))
        places.append(history.add(record, coord, evicted))
        coord += len(record)
    assert tape.evicted_tokens == evicted
    free = world.engine.pool.free_blocks
    tape.commit(lengths)
    assert world.engine.pool.free_blocks > free
    where = slice(places[0].start, places[-1].stop)
    tolerance.assert_logits(world.model, actual, oracle_logits(world.model, history)[where])


def test_hand_made_logits_have_the_divergence_of_the_textbook() -> None:
    """KL(fresh || carried) in nats, each way another value; agreement over what may be answered."""
    fresh = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.2, 0.8]]).log()
    carried = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.2, 0.8]]).log() + 3.0  # logits have no level
    first, second, third = divergences(fresh, carried, [None] * 3)
    rounding = tolerance.rounding(3.0, width=2)
    assert first.kl_nats == tolerance.near(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rounding)
    assert second.kl_nats == tolerance.near(0.5 * math.log(2 / 3) + 0.5 * math.log(2), rounding)
    assert third == Divergence(True, tolerance.near(0.0, rounding))
    three = torch.tensor([[5.0, 1.0, 0.0], [5.0, 1.0, 0.0]])
    other = torch.tensor([[1.0, 5.0, 0.0], [5.0, 0.0, 1.0]])
    assert [d.agrees for d in divergences(three, other, [None, None])] == [False, True]
    assert [d.agrees for d in divergences(three, other, [(0, 2), (1, 2)])] == [True, False]


def test_logits_far_apart_have_a_finite_divergence() -> None:
    """A token that one state rules out costs its log-probability, not infinity."""
    (apart,) = divergences(torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]]), [None])
    assert apart.kl_nats == pytest.approx(200.0)
    assert not apart.agrees


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_probe_compares_the_carried_with_the_fresh_state(architecture: str) -> None:
    """The same figures as from the oracles of the two states; nothing is changed and no block is kept.

    Records were evicted while the window was prefilled.
    """
    world = RefreshedTape(architecture)
    tape, engine = world.tape, world.engine
    fresh = tape.fresh_window()
    begun, old = tape.evicted_tokens, tape.window
    prefill(engine, fresh, tape.window, CHUNK)
    for _ in range(2):
        world.append(8)
    passed = tape.evicted_tokens - begun
    prefill(engine, fresh, tape.window[fresh.length - passed :], CHUNK)
    probes = [
        (tuple(tokens(world.rng, n)), choices) for n, choices in ((6, None), (1, (5, 9)), (4, (7, 8, 70)))
    ]
    before = (tape.extents, fresh.extents, engine.pool.free_blocks)
    found = probe(engine, tape, fresh, probes)
    assert (tape.extents, fresh.extents, engine.pool.free_blocks) == before
    logits: list[list[torch.Tensor]] = [[], []]
    other = History.begin(world.frozen)
    other.add(list(fresh.tokens), begun, begun)
    assert fresh.tokens[: len(old)] == old
    for owner, (question, _) in enumerate(probes, 1):
        for rows, history in zip(logits, (other, world.history), strict=True):
            where = history.add(list(question), world.coord, tape.evicted_tokens, owner)
            rows.append(oracle_logits(world.model, history)[where][-1])
    expected = divergences(torch.stack(logits[0]), torch.stack(logits[1]), [choices for _, choices in probes])
    assert [d.agrees for d in found] == [d.agrees for d in expected]
    size = max(map(tolerance.largest, logits[0] + logits[1]))
    for actual, wanted in zip(found, expected, strict=True):
        bound = tolerance.of_divergence(world.model, size, wanted.kl_nats)
        assert actual.kl_nats == tolerance.near(wanted.kl_nats, bound)
        assert wanted.kl_nats > 10 * bound
    fresh.release()


def test_a_probe_of_a_tape_where_nothing_was_evicted_finds_no_divergence() -> None:
    world = RefreshedTape(frame_limit=400)
    tape = world.engine.open_tape("new", world.frozen, Retention(64))
    world.tape.release()
    world.tape = tape
    for _ in range(4):
        world.append()
    fresh = tape.fresh_window()
    prefill(world.engine, fresh, tape.window, CHUNK)
    size = tolerance.largest(world.answer([9]))
    for found in probe(world.engine, tape, fresh, [((5, 6, 7), None), ((9,), None)]):
        assert found.agrees
        assert found.kl_nats < tolerance.of_divergence(world.model, size)
    fresh.release()


def test_a_probe_is_left_out_when_the_states_differ_or_the_pool_is_full() -> None:
    """While an append is under way, the current version has records that the window no longer has."""
    world = RefreshedTape()
    tape, engine = world.tape, world.engine
    fresh = tape.fresh_window()
    prefill(engine, fresh, tape.window, CHUNK)
    question = [((4, 5, 6), None)]
    assert len(probe(engine, tape, fresh, question)) == 1
    hog = engine.open_prompt()
    assert hog.acquire(engine.pool.blocks.free_blocks * 4)
    free = engine.pool.blocks.free_blocks
    assert probe(engine, tape, fresh, question) == []
    assert engine.pool.blocks.free_blocks == free
    hog.release()
    tape.make_room([30])
    assert window_of(tape, fresh) is not None
    assert probe(engine, tape, fresh, question) == []
    world.append(20)
    assert window_of(tape, fresh) is None
    assert probe(engine, tape, fresh, question) == []
    fresh.release()
