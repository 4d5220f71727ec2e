"""Standing questions numbered in the frozen prefix: a version is asked by the numbers of its own prefix."""

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from daemon.config.schema import Config, FlashConfig, SessionConfig
from daemon.engine.build import prefixes_of
from daemon.engine.prefixes import EnginePrefixes, Explanation
from engine.divergence import Divergence, probe
from engine.engine import Engine
from engine.model.canary import dense_logits
from engine.model.chat_format import PromptFormat
from engine.model.embedded import build_tokenizer
from flash.evaluator import Evaluated, FlashEvaluator
from flash.question import PAPER_SIX, PreparedQuestion, Question
from flash.registry import Registry
from ingest.lines import LineSpec
from regions.tape import Retention, Tape
from scheduler.interfaces import Limits
from scheduler.observer import Observer
from scheduler.refresh import Comparison, Refresher
from scheduler.refresh_policy import RefreshPolicy
from scheduler.request import State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem, TapeItems
from tests.engine.oracle import tiny
from tests.kit import tolerance

TOKENIZER = build_tokenizer()
FORMAT = PromptFormat.of(TOKENIZER, "Be brief.")
MODEL = tiny("llama", layers=2, vocab_size=len(TOKENIZER))
LIMITS = Limits(max_batch_tokens=1024, chunk_min=32, chunk_max=256)
UP = Question("up", "Up?", ("YES", "NO"))
FREE = Question("free", "And now?", None, max_tokens=2)


def prepare(question: Question) -> PreparedQuestion:
    choices = FORMAT.choices(question.text, question.choices) if question.choices else None
    return PreparedQuestion(tuple(FORMAT.question(question.text)), choices, FORMAT.stop_ids)


def test_the_questions_of_every_session_are_numbered_from_the_start_on() -> None:
    names = ("one", "two")
    config = Config(sessions=tuple(SessionConfig(n, "V:S") for n in names), flash=FlashConfig("frozen"))
    prefixes = prefixes_of(config, FORMAT, {name: LineSpec(2, 3) for name in names})
    assert prefixes.newest("one") == prefixes.newest("two")
    assert len(prefixes.newest("two")) > len(FORMAT.encode(" ".join(each.text for each in PAPER_SIX)))


class Compared(Observer):
    """Keeps what was compared."""

    def __init__(self) -> None:
        self.found: list[Sequence[Divergence]] = []

    def compared(self, session: str, found: Sequence[Divergence]) -> None:
        self.found.append(found)


class World:
    """Standing questions of real sessions, evaluated at every version, each beside the dense model."""

    def __init__(
        self, *names: str, numbers: bool = True, exact: int = 0, questions: Sequence[Question] = PAPER_SIX[:3]
    ) -> None:
        self.rng, self.observer, self.now = random.Random(4), Compared(), 0
        self.engine = Engine(MODEL, blocks=600, block_size=8, frame_limit=2000)
        self.scheduler = Scheduler(self.engine, self.engine.pool, LIMITS, lambda: self.now, self.observer)
        self.registry = Registry(prepare)
        self.prefixes = EnginePrefixes(FORMAT, lambda q: q.text, numbers=numbers)
        for name in names:
            self.prefixes.add(SessionConfig(name, f"V:{name}"), None, questions, Explanation())
        self.tapes = [
            self.engine.open_tape(name, self.prefixes.newest(name), Retention(300)) for name in names
        ]
        for name in names:
            for question in questions:
                self.registry.register(name, question)
        self.seen: dict[tuple[str, int], tuple[tuple[int, ...], list[int]]] = {}
        self.done: list[Evaluated[int]] = []
        self.scheduler.subscribe(self.committed)
        FlashEvaluator(
            self.scheduler,
            self.registry,
            self.done.append,
            lambda payload: False,
            lambda session, version, payloads: None,
            lambda session, version, payloads, asked: None,
            lambda standing, reader: self.prefixes.asked(standing, reader.prefix),
        )
        self.refresher = Refresher(
            self.scheduler,
            self.engine,
            self.engine,
            [(tape, RefreshPolicy(exact > 0, every_records=exact)) for tape in self.tapes],
            Comparison(self.probes, partial(probe, self.engine), LIMITS.max_batch_tokens),
            self.observer,
            lambda: self.now,
            frame_limit=2000,
            catch_up_tokens=32,
        )

    def probes(self, session: str) -> list[tuple[Sequence[int], tuple[int, ...] | None]]:
        (tape,) = (tape for tape in self.tapes if tape.name == session)
        return [
            (self.prefixes.asked(each, tape.prefix), each.prepared.choice_tokens)
            for each in self.registry.standing(session)
        ]

    def committed(self, tape: Tape, version: int, records: TapeItems) -> None:
        self.seen[tape.name, version] = tape.prefix, tape.window

    def feed(self, tape: Tape, n: int = 1) -> None:
        for _ in range(n):
            digits = [self.rng.randrange(10_000, 99_999) for _ in range(4)]
            line = FORMAT.encode(",".join(map(str, digits)) + "\n")
            self.scheduler.append((tape, [TapeItem(line, len(self.done))]))
            self.run()

    def set(self, tape: Tape, *questions: Question) -> None:
        """Let the session have these questions from now on."""
        standing = self.registry.made(tape.name, questions)
        self.prefixes.number(tape.name, questions, partial(self.scheduler.refresh, tape))
        self.registry.replace(tape.name, standing)

    def run(self) -> None:
        for _ in range(1000):
            if not self.scheduler.step():
                return
        raise AssertionError("the scheduler does not come to rest")

    def check(self, *, by_number: bool) -> None:
        """Every answer is the dense model's behind prefix and window of its version; forgets them."""
        assert self.done
        for done in self.done:
            assert done.request.state is State.FINISHED
            prefix, window = self.seen[done.standing.session, done.version]
            prompt = list(done.request.prompt)
            whole = list(done.standing.prepared.prompt_tokens)
            text = FORMAT.decode(list(prefix))
            listed = done.standing.question.text in text
            assert listed == by_number
            assert (prompt != whole) == listed
            if listed:
                number = FORMAT.decode(prompt).strip()
                assert f"\n{number} {done.standing.question.text}\n" in text
            logits = dense_logits(MODEL, [*prefix, *window, *prompt])[-1]
            choices = done.standing.prepared.choice_tokens
            best = (logits if choices is None else logits[list(choices)]).sort(descending=True).values
            bound = tolerance.of_model(MODEL, tolerance.largest(logits))
            sampled = done.request.samples[0]
            assert tolerance.apart(torch.tensor([sampled.top1, sampled.top2]), best[:2]) <= bound
        self.done.clear()

    def close(self) -> None:
        self.scheduler.close()
        for tape in self.tapes:
            tape.release()
        self.engine.cache.reclaim(10**6)
        assert self.engine.pool.blocks.free_blocks == self.engine.pool.total_blocks


@pytest.mark.parametrize("numbers", [False, True])
def test_answers_are_the_dense_model_s_wherever_the_questions_stand(numbers: bool) -> None:
    world = World("a", "b", numbers=numbers)
    for _ in range(3):
        for tape in world.tapes:
            world.feed(tape)
    assert len(world.done) == 2 * 3 * 3
    world.check(by_number=numbers)
    world.close()


def test_a_numbered_question_costs_a_few_tokens() -> None:
    world, whole = World("a"), World("a", numbers=False)
    for each in (world, whole):
        each.feed(each.tapes[0])
    numbered, full = (max(len(done.request.prompt) for done in w.done) for w in (world, whole))
    assert numbered < full / 2
    world.close()
    whole.close()


def test_a_new_question_is_asked_in_full_until_a_prefix_lists_it() -> None:
    world = World("a")
    (tape,) = world.tapes
    world.feed(tape, 2)
    world.check(by_number=True)
    world.set(tape, *PAPER_SIX[:3], UP)
    line = TapeItem(FORMAT.encode("1,2,3\n"), 0)
    world.scheduler.append((tape, [line]))
    while not world.done:
        world.scheduler.step()
    by_name = {done.standing.question.name: done for done in world.done}
    assert len(by_name) == 4
    fresh = by_name.pop("up")
    assert tuple(fresh.request.prompt) == fresh.standing.prepared.prompt_tokens
    world.done[:] = by_name.values()
    world.check(by_number=True)
    world.run()
    world.feed(tape)
    assert len(world.done) == 4
    world.check(by_number=True)
    world.close()


def test_a_removed_question_stops_at_once_and_the_others_get_other_numbers_with_the_prefix() -> None:
    world = World("a", questions=PAPER_SIX[:5])
    (tape,) = world.tapes
    world.feed(tape)
    world.check(by_number=True)
    world.set(tape, *PAPER_SIX[2:5])
    world.scheduler.append((tape, [TapeItem(FORMAT.encode("1,2,3\n"), 0)]))
    while len(world.done) < 3:
        world.scheduler.step()
    assert {done.standing.question for done in world.done} == set(PAPER_SIX[2:5])
    world.check(by_number=True)  # by the old numbers of the old prefix
    world.run()
    world.feed(tape)
    assert PAPER_SIX[0].text not in FORMAT.decode(list(tape.prefix))
    assert len(world.done) == 3
    world.check(by_number=True)
    world.close()


def test_a_changed_question_is_never_asked_by_the_number_of_its_old_text() -> None:
    world = World("a", questions=[UP, FREE])
    (tape,) = world.tapes
    changed = Question("up", "Is it going up now?", ("YES", "NO"))
    world.feed(tape)
    world.check(by_number=True)
    for questions in ([changed, FREE], [FREE, changed], [FREE], [UP, FREE, changed][:2]):
        world.set(tape, *questions)
        world.scheduler.append((tape, [TapeItem(FORMAT.encode("7,8,9\n"), 0)]))
        for _ in range(3):
            world.scheduler.step()
        world.feed(tape, 2)
    for done in world.done:
        prefix, _ = world.seen[done.standing.session, done.version]
        whole = done.standing.prepared.prompt_tokens
        listed = f" {done.standing.question.text}\n" in FORMAT.decode(list(prefix))
        assert (tuple(done.request.prompt) == whole) != listed
    world.close()


def test_a_question_with_other_choices_keeps_its_number_and_its_prefix() -> None:
    world = World("a", questions=[UP, FREE])
    (tape,) = world.tapes
    before = tape.prefix
    world.set(tape, Question("up", UP.text, ("UP", "DOWN")), FREE)
    world.feed(tape)
    assert tape.prefix is before
    world.check(by_number=True)
    world.close()


def test_one_session_s_questions_change_no_other_session() -> None:
    world = World("a", "b")
    a, b = world.tapes
    world.feed(b)
    before = b.prefix
    world.set(a, UP)
    world.run()
    for tape in (a, b):
        world.feed(tape)
    assert b.prefix == before
    assert [done.standing.question for done in world.done if done.standing.session == "a"] == [UP]
    world.check(by_number=True)
    world.close()


@pytest.mark.parametrize("numbers", [False, True])
def test_divergence_is_measured_with_the_questions_as_they_are_asked(numbers: bool) -> None:
    """Before anything was evicted both states agree; the numbers are those of the prefix."""
    world = World("a", numbers=numbers, exact=2)
    (tape,) = world.tapes
    while not world.observer.found:
        world.feed(tape)
    (found,) = world.observer.found
    assert len(found) == 3
    assert all(each.kl_nats >= 0 for each in found)
    asked = [list(tokens) for tokens, _ in world.probes("a")]
    whole = [list(each.prepared.prompt_tokens) for each in world.registry.standing("a")]
    assert all((one != other) == numbers for one, other in zip(asked, whole, strict=True))
    world.close()


def test_a_list_that_leaves_no_room_is_refused_and_changes_nothing() -> None:
    world = World("a")
    (tape,) = world.tapes
    many = [Question(f"q{n}", f"Question {n}, " + "long " * 20 + "?") for n in range(60)]
    with pytest.raises(ValueError, match="frame limit"):
        world.set(tape, *many)
    world.feed(tape)
    assert len(world.done) == 3
    world.check(by_number=True)
    world.close()
