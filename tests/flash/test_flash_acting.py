"""Acting within an error: against a plain reference, its bound on any data, and streams that shift."""

import random
from dataclasses import dataclass, field
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash import acting
from flash.acting import FULL, ActDecision, Acting, ActingState, SessionActing, risk_of
from flash.confidence import QuestionCalibration
from tests.kit import tolerance

ERROR = 0.02
REGIMES = ("calm/00-06", "usual/00-06", "usual/06-12", "wild/06-12/gap")
EXACT = tolerance.of_float64(100.0)
CERTAIN = 1e-6


@dataclass
class Reference:
    """The same rules from the whole history of labels, with nothing kept between two calls."""

    error: float
    labels: list[tuple[ActDecision, int, int]] = field(default_factory=list)
    """Decisions, versions and right choices."""

    def case(self, given: int) -> tuple[bool, bool] | None:
        """Whether the newest version's label equals this choice, and whether its answer was wrong."""
        if not self.labels:
            return None
        at = max(range(len(self.labels)), key=lambda i: (self.labels[i][1], i))
        decided, _, right = self.labels[at]
        return given == right, decided.given != right

    def decide(self, risk: float, regime: str, given: int) -> tuple[bool, str | None]:
        case, expected, wrong = self.case(given), 0.0, 0.0
        for number, (each, _, right) in enumerate(self.labels):
            before = Reference(self.error, self.labels[: self.known[number]])
            if before.case(each.given) == case:
                expected += each.risk - expected / acting._MEMORY
                wrong += (right != each.given) - wrong / acting._MEMORY
        odds = risk / (1 - risk) * (acting._PRIOR + wrong) / (acting._PRIOR + expected)
        known = odds / (1 + odds)
        debt = max(self.debt(regime), self.debt(None))
        if debt > FULL - 1:
            return False, "error_budget"
        if known <= acting._TOP * self.error * exp(-debt / acting._SOFT):
            return True, None
        few = known <= acting._TOP * self.error and not self.moved(regime)
        return False, "few_labels" if few else "low_confidence"

    known: list[int] = field(default_factory=list)
    """By label, how many labels its answer knew."""

    def moved(self, regime: str | None) -> list[tuple[bool, bool]]:
        """Of the answers that moved a regime's debt, None: that of all, whether acted on, and wrong."""
        return [
            (each.act, right != each.given)
            for each, _, right in self.labels
            if (each.act or each.certain) and regime in (None, each.regime)
        ]

    def debt(self, regime: str | None) -> float:
        found = acting._BEGIN
        for acted, wrong in self.moved(regime):
            before, found = found, max(found + wrong - acting._RATE * self.error, 0.0)
            if not acted:
                found = min(found, max(before, FULL))
        return found


def drawn(rng: random.Random, factor: float) -> tuple[float, int, int]:
    """A risk, the choice given and the right one: wrong ``factor`` times as often as the risk says."""
    risk, given = min(0.5, 10 ** rng.uniform(-5, -0.3)), rng.randrange(2)
    return risk, given, given ^ (rng.random() < min(1.0, factor * risk))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), delay=st.integers(0, 20), factor=st.sampled_from([0.3, 1.0, 4.0, 20.0]))
def test_decisions_are_those_of_the_plain_reference(seed: int, delay: int, factor: float) -> None:
    """Labels come late, and in any order."""
    rng, ours, plain = random.Random(seed), Acting(0.1), Reference(0.1)
    waiting: list[tuple[ActDecision, int, int, int]] = []
    for version in range(100):
        regime, (risk, answer, right) = rng.choice(REGIMES), drawn(rng, factor)
        decided = ours.decide(risk, regime, answer)
        assert (decided.act, decided.reason) == plain.decide(risk, regime, answer)
        waiting.append((decided, version, right, len(plain.labels)))
        if len(waiting) > delay:
            past, at, was, known = waiting.pop(rng.randrange(len(waiting)))
            ours.label(past, at, was)
            plain.labels.append((past, at, was))
            plain.known.append(known)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), delay=st.integers(0, 30), spite=st.floats(0.0, 1.0))
def test_errors_are_bounded_whatever_the_data_do(seed: int, delay: int, spite: float) -> None:
    """Of any labels in a row that moved the debt; those that waited at once come on top."""
    rng, ours = random.Random(seed), Acting(ERROR)
    waiting: list[tuple[ActDecision, int, int]] = []
    excess = 0.0  # the largest, over where the row begins, of errors less what is allowed for its length
    for version in range(3000):
        decided = ours.decide(10 ** rng.uniform(-6, -0.3), REGIMES[0], 0)
        waiting.append((decided, version, int(rng.random() < (spite if decided.act else 0.01))))
        if len(waiting) > delay:
            past, at, right = waiting.pop(0)
            ours.label(past, at, right)
            if past.act or past.certain:
                excess = max(excess + (past.act and right == 1) - acting._RATE * ERROR, 0.0)
            assert excess <= FULL + delay + EXACT
    allowed = acting._RATE * ERROR * acting.WINDOW + FULL
    assert allowed == pytest.approx(ERROR * acting.WINDOW), "20 of a thousand"


def test_it_acts_again_when_a_bad_spell_is_over() -> None:
    rng, ours = random.Random(1), Acting(ERROR)
    acted, reasons = [], set[str | None]()
    for version in range(9000):
        risk, answer, right = drawn(rng, 1.0)
        if 2000 <= version < 2600:
            right = rng.randrange(2)
        decided = ours.decide(risk, REGIMES[0], answer)
        acted.append(decided.act)
        reasons.add(decided.reason)
        ours.label(decided, version, right)
    assert sum(acted[2200:2600]) <= 40
    assert sum(acted[8000:]) >= 500
    assert "error_budget" in reasons


def test_where_answers_change_with_their_labels_more_are_acted_on() -> None:
    """Answers that differ from the newest label are mostly wrong, at the same risk as all others, of 5 %."""
    rng, ours = random.Random(3), Acting(ERROR)
    acted: dict[bool, list[bool]] = {True: [], False: []}
    right = 0
    for version in range(6000):
        differs = rng.random() < 0.1
        answer = right ^ differs
        right ^= differs and rng.random() < 0.4
        decided = ours.decide(0.05, REGIMES[0], answer)
        if version >= 2000:
            acted[differs].append(decided.act)
        ours.label(decided, version, right)
    assert sum(acted[True]) <= 0.2 * len(acted[True])
    assert sum(acted[False]) >= 0.98 * len(acted[False])


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (0.5, 3.0, 1.0), (1.0, 6.0, 0.2)])
def test_the_error_is_kept_through_shifts(factors: tuple[float, ...]) -> None:
    """Answers are wrong ``factor`` times as often as their risk says; labels come two answers later."""
    rng, ours = random.Random(7), Acting(ERROR)
    waiting: list[tuple[ActDecision, int, int]] = []
    by_regime: dict[str, list[bool]] = {}
    acted = []
    for version in range(4000 * len(factors)):
        regime = rng.choice(REGIMES)
        risk, answer, right = drawn(
            rng, factors[version // 4000] * (2.0 if regime.startswith("wild") else 1.0)
        )
        decided = ours.decide(risk, regime, answer)
        waiting.append((decided, version, right))
        if decided.act:
            acted.append(answer != right)
            by_regime.setdefault(regime, []).append(answer != right)
        if len(waiting) > 2:
            ours.label(*waiting.pop(0))
    assert sum(acted) <= ERROR * len(acted)
    assert all(sum(each) <= ERROR * len(each) for each in by_regime.values())
    assert max(sum(acted[at : at + 1000]) for at in range(len(acted) - 1000)) <= ERROR * 1000
    assert len(acted) >= 0.5 * 12_000


def test_before_labels_only_small_risks_are_acted_on() -> None:
    """Twice the error at most, by the calibration; a larger one waits for labels, or is too large anyway."""
    ours = Acting(ERROR)
    assert ours.decide(0.04, REGIMES[0], 0).act
    assert ours.decide(0.05, REGIMES[0], 0).reason == "few_labels"
    assert ours.decide(0.4, REGIMES[0], 0).reason == "low_confidence"
    ours.label(ours.decide(CERTAIN, REGIMES[0], 0), 0, 0)
    assert ours.decide(0.05, REGIMES[0], 0).reason == "low_confidence"
    assert ours.decide(0.05, REGIMES[1], 0).reason == "few_labels"


@given(choices=st.lists(st.floats(-8, 8), min_size=2, max_size=4), data=st.data())
def test_a_risk_is_what_the_given_choice_lacks(choices: list[float], data: st.DataObject) -> None:
    fitted = QuestionCalibration(
        name="q", text="Q?", choices=[str(n) for n in range(len(choices))], temperature=1.5, scores=[0.1],
        labels=20_000, mean_gap=1.0,
    )  # fmt: skip
    number = data.draw(st.integers(0, len(choices) - 1))
    assert risk_of(fitted, choices, number) == pytest.approx(1 - fitted.scaled(choices)[number], abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), at=st.integers(0, 200))
def test_a_session_goes_on_from_a_cut(seed: int, at: int) -> None:
    rng = random.Random(seed)
    whole, first, second = SessionActing(), SessionActing(), SessionActing()
    told: list[list[ActDecision]] = [[], []]
    for number in range(200):
        if number == at:
            second.restore(first.cut())
        risk, answer, right = drawn(rng, 1.0)
        high = 100 + rng.randint(0, 9)
        for each, decisions in ((whole, told[0]), (first if number < at else second, told[1])):
            each.bar(number * 10**9, high, 95, 97, gap=False)
            question = each.question("q", ERROR)
            decisions.append(question.decide(risk, each.regime, answer))
            question.label(decisions[-1], number, right)
    assert told[0] == told[1]
    assert (second if at < 200 else first).cut() == whole.cut()


def test_a_question_goes_on_after_a_pause_as_without_one() -> None:
    """Also where the session was saved meanwhile. Of too many paused ones the first is forgotten."""
    rng, whole, paused = random.Random(2), Acting(ERROR), SessionActing()
    for number in range(120):
        if number == 60:
            paused.keep({})
            assert paused.known("q") is None
            saved, paused = paused.cut(), SessionActing()
            paused.restore(saved)
            paused.keep({})
        risk, answer, right = drawn(rng, 1.0)
        question = paused.question("q", ERROR)
        decided = whole.decide(risk, REGIMES[0], answer)
        assert question.decide(risk, REGIMES[0], answer) == decided
        whole.label(decided, number, right)
        question.label(decided, number, right)
    assert paused.question("q", ERROR).cut() == whole.cut()
    for number in range(acting.PAUSED):
        paused.question(f"q{number}", ERROR)
    paused.keep({})
    assert list(paused.cut().questions) == [f"q{number}" for number in range(acting.PAUSED)]


def test_another_error_begins_again() -> None:
    session = SessionActing()
    known = session.question("q", ERROR)
    known.label(known.decide(1e-4, REGIMES[0], 0), 1, 1)
    assert known.error == session.error == 1.0
    assert session.question("q", ERROR) is known
    assert session.question("q", 0.05).cut() == ActingState(0.05)
    other = Acting(0.05)
    other.restore(known.cut())
    assert other.cut() == ActingState(0.05)


def test_the_state_is_small() -> None:
    """A label takes no room once its regime is known; errors beyond the window are dropped."""
    rng, ours = random.Random(0), Acting(ERROR)
    for number in range(3000):
        decided = ActDecision(True, None, rng.choice(REGIMES), 0, 0.01, 0, False)
        ours.label(decided, number, int(rng.random() < 0.1))
    state = ours.cut()
    assert set(state.debts) == {*REGIMES, acting._ALL}
    assert all(each > state.acted - acting.WINDOW for each in state.errors)
