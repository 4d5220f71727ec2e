"""Input offsets and the answers that depend on them: the evaluator's results through the publisher.

The reference is a list of results: where each one's inputs begin, and when it was acknowledged. At any time
the position to commit is at most where the oldest inputs begin whose result is not acknowledged by then, or
is still to come; and at least right behind their session's inputs before those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from daemon import protocol
from daemon.ages import Times
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.checkpoint.delivery import DeliveryOutcome, Done
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.standby import Standby
from feeds.market_data import Answer, AnyMessage, DataUpdated
from flash.evaluator import Evaluated, FlashEvaluator
from flash.question import Question
from flash.registry import Registry
from metrics.store import MetricStore
from regions.tape import Tape
from scheduler.interfaces import Limits
from scheduler.request import State
from scheduler.tapes import TapeItem, TapeItems
from tests.flash.test_flash_evaluator import LONG, MS, YES_NO, prepare
from tests.kit import TOPIC, inproc_config
from tests.kit.engine_events import answered, inputs_below
from tests.kit.gateway import make_publisher
from tests.kit.scheduler.fakes import FakeClock, FakeTape
from tests.kit.scheduler.harness import Harness

STREAM = (TOPIC, 0)
ONE = replace(YES_NO, text="Is it up now?")
TEXT = replace(LONG, max_tokens=6)
POOL = (
    ONE,
    TEXT,
    replace(TEXT, name="number", publish_when="changed"),
    replace(ONE, name="other"),
    replace(ONE, name="rare", ask_every_bars=2),
    replace(ONE, name="rare too", ask_every_bars=2),
    replace(TEXT, name="rare text", ask_every_bars=2),
    replace(ONE, name="soon", answer_within_ns=5 * MS),
    replace(TEXT, name="soon text", answer_within_ns=5 * MS),
)


@dataclass(eq=False)
class Result:
    """``numbers``: of the records that it answers for. ``acknowledged``: when."""

    numbers: Sequence[int]
    acknowledged: float = inf


class Rig:
    """Scheduler and evaluator over fakes, the real publisher and tracker, and sinks that wait to acknowledge.

    Both sessions read one stream; a record's number is its offset.
    """

    def __init__(self, *, fast_path: int) -> None:
        """``fast_path``: questions that run in a pass, as far as cells go."""
        self.clock = FakeClock()
        limits = Limits(
            max_batch_tokens=200,
            chunk_min=8,
            chunk_max=64,
            cell_budget_fraction=min(1.0, fast_path * 16 / 1024),
        )
        self.h = Harness(256, limits, clock=self.clock)
        self.registry = Registry(prepare)
        config = inproc_config(["V:AAA", "V:BBB"], standing="none")
        store = MetricStore.local({"session": ["aaa", "bbb"], "source": [], "sink": []})
        self.tracker = OffsetTracker()
        self.sessions = Sessions(config, store)
        standby = Standby(store)
        standby.engine_starts(["aaa", "bbb"])
        self.publisher = make_publisher(config, self.tracker, self.sessions, store, standby=standby)
        self.publisher.outbox.delivery.put = self.put  # type: ignore[method-assign] # sinks that wait
        self.h.scheduler.subscribe(self.committed)
        self.evaluator = FlashEvaluator(
            self.h.scheduler,
            self.registry,
            self.evaluated,
            has_gap=lambda payload: False,
            on_not_due=self.not_due,
            on_texts=self.texts_asked,
            received_ns=lambda payload: self.clock.now,
        )
        self.tapes = [self.h.tape("aaa", 12), self.h.tape("bbb", 12)]
        self.results: list[Result] = []
        self.open: list[Callable[[], None]] = []
        self.result: Result | None = None
        self.fed = self.time = 0
        self.owners = list[str]()
        """By record: its session."""
        self.position = 1
        self.seen: list[tuple[int, int, int]] = []
        """(time, last record, position to commit)."""

    def put(self, name: str, message: AnyMessage, key: str, headers: dict[str, bytes], done: Done) -> None:
        if isinstance(message, Answer | DataUpdated) and self.result is not None:
            result, self.result = self.result, None
            self.open.append(partial(self.acknowledge, result, done))
        else:
            done(DeliveryOutcome.DELIVERED)

    def acknowledge(self, result: Result, done: Done) -> None:
        result.acknowledged = self.time
        done(DeliveryOutcome.DELIVERED)

    def expect(self, payloads: Sequence[int]) -> Result:
        self.results.append(Result(payloads))
        return self.results[-1]

    def committed(self, tape: Tape, version: int, records: TapeItems) -> None:
        numbers = [record.payload for record in records]
        if not self.registry.standing(tape.name):
            self.result = self.expect(numbers)
        times, inputs = Times(0, 0, 0), self.inputs(numbers)
        event = protocol.Committed(tape.name, version, len(records), 1, 1, times, inputs)
        self.sessions.committed(event)
        self.publisher.committed(event)

    def evaluated(self, done: Evaluated[int]) -> None:
        name, question = done.standing.session, done.standing.question
        self.result = result = self.expect(done.payloads)
        inputs = self.inputs(done.payloads)
        if done.request.state is State.FINISHED:
            text = str(done.request.output)
            members = {"question": question.name, "question_hash": done.standing.question_hash, "text": text}
            self.publisher.answered(
                answered(name, done.version, 0, inputs=inputs, asked=done.asked, **members)
            )
        elif done.request.error is not None:
            code = done.request.error.code
            assert code in ("superseded", "late")
            self.publisher.failed(
                protocol.AnswerFailed(name, question.name, done.version, code, "", inputs, done.asked)
            )
        if self.result is result:  # it goes to no sink
            result.acknowledged, self.result = self.time, None

    def not_due(self, name: str, version: int, payloads: Sequence[int]) -> None:
        self.expect(payloads).acknowledged = self.time
        self.publisher.not_due(protocol.NotDue(name, version, self.inputs(payloads)))

    def texts_asked(self, name: str, version: int, payloads: Sequence[int], asked: int) -> None:
        self.publisher.texts_asked(protocol.TextsAsked(name, version, self.inputs(payloads), asked))

    @staticmethod
    def inputs(numbers: Sequence[int]) -> protocol.VersionInputs:
        return inputs_below(max(numbers) + 1, first=min(numbers))

    def ask(self, tape: FakeTape, questions: Sequence[Question]) -> None:
        self.registry.replace(tape.name, self.registry.made(tape.name, questions))
        self.publisher.questions_set(protocol.QuestionsSet(1, tape.name, tape.version, tuple(questions)))

    def feed(self, tape: FakeTape, records: int) -> None:
        numbers = range(self.fed + 1, self.fed + records + 1)
        self.fed += records
        self.owners += [tape.name] * records
        for number in numbers:
            self.tracker.passed_on(tape.name, STREAM, [number])
        self.h.scheduler.append((tape, [TapeItem((n % 80, n % 7), n) for n in numbers]))

    def look(self) -> None:
        point = self.tracker.to_commit().get(STREAM)
        self.position = self.position if point is None else point.offset
        self.seen.append((self.time, self.fed, self.position))
        self.time += 1

    def do(self, what: str, which: int, n: int) -> None:
        match what:
            case "feed":
                self.feed(self.tapes[which], n)
            case "ask":
                self.ask(self.tapes[which], [each for i, each in enumerate(POOL) if n >> i & 1])
            case "later":
                self.clock.now += 2 * MS
            case "acknowledge" if self.open:
                self.open.pop(n % len(self.open))()
            case "acknowledge all":
                while self.open:
                    self.open.pop()()
            case "step":
                for _ in range(n):
                    self.h.scheduler.step()

    def finish(self) -> None:
        self.h.run()
        while self.open:
            self.open.pop()()
            self.look()

    def before(self, number: int) -> int:
        """The session's record before this one: below what it waits for, the other one's are done."""
        owner = self.owners[number - 1]
        return next((n for n in range(number - 1, 0, -1) if self.owners[n - 1] == owner), number - 1)

    def check(self) -> None:
        assert {n for each in self.results for n in each.numbers} == set(range(1, self.fed + 1))
        for time, fed, position in self.seen:
            waits = [min(each.numbers) for each in self.results if each.acknowledged > time]
            assert position <= min([*waits, fed + 1]), (time, fed)
            least = [self.before(number) + 1 for number in waits if number <= fed]
            assert position >= min([*least, fed + 1]), (time, fed)
        assert self.tracker.outstanding() == 0


some = st.lists(st.integers(0, len(POOL) - 1), max_size=3, unique=True).map(
    lambda ns: sum(1 << n for n in ns)
)
"""A few of `POOL`, a bit each."""
actions = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(0, 1), st.integers(1, 2)),
        st.tuples(st.just("step"), st.just(0), st.integers(1, 4)),
        st.tuples(st.just("feed"), st.just(0), st.just(1)),
        st.tuples(st.just("acknowledge"), st.just(0), st.integers(0, 20)),
        st.tuples(st.sampled_from(["acknowledge all", "later"]), st.just(0), st.just(0)),
        st.tuples(st.just("ask"), st.integers(0, 1), some),
    ),
    min_size=25,
    max_size=60,
)


@settings(max_examples=300)
@given(actions, some, st.sampled_from([1, 1, 2, 99]))
def test_offsets_are_committed_exactly_when_the_answers_at_and_before_them_are_acknowledged(
    load: list[tuple[str, int, int]], first: int, fast_path: int
) -> None:
    """No earlier, and no later than that: nothing stalls."""
    rig = Rig(fast_path=fast_path)
    for which in (0, 1):
        rig.do("ask", which, first)
    for action in load:
        rig.do(*action)
        rig.look()
    rig.finish()
    rig.look()
    rig.check()


def test_a_long_answer_holds_the_offsets_of_its_version_and_no_later_answer() -> None:
    """Its question is then asked of the newest version, and the versions between are released together."""
    rig = Rig(fast_path=99)
    tape, _ = rig.tapes
    rig.ask(tape, [LONG, ONE])
    for _ in range(4):
        rig.feed(tape, 1)
        for _ in range(2):
            rig.h.scheduler.step()
    while rig.open:
        rig.open.pop()()
    rig.look()
    assert (tape.version, rig.position) == (4, 1), (
        "one-token answers of four versions are out; the text holds them"
    )
    rig.finish()
    rig.look()
    assert rig.position == 5
    rig.check()
