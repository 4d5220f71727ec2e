"""Acting within an error: against a plain reference, its bounds on any data, and streams that shift."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash import acting
from flash.acting import ActDecision, Acting, ActingState, SessionActing, bin_of, prior_of, risk_of
from flash.confidence import QuestionCalibration
from flash.regimes import EVERYTHING, coarser
from tests.kit import tolerance

ERROR = 0.02
REGIMES = ("calm/00-06", "usual/00-06", "usual/06-12", "wild/06-12/gap")
EXACT = tolerance.of_float64(1.0)
SCORES = sorted([0.0002 * n for n in range(1, 480)] + [0.2, 0.3, 0.4, 0.45, 0.49, 0.55, 0.6, 0.7, 0.8, 0.9])
FITTED = QuestionCalibration(
    name="q", text="Q?", choices=["UP", "DOWN"], temperature=1.0, scores=SCORES, labels=20_000, mean_gap=1.0
)


@dataclass
class Reference:
    """The same rules from the whole history of labels, with nothing kept between two calls."""

    error: float
    fitted: QuestionCalibration
    labels: list[tuple[ActDecision, bool]] = field(default_factory=list)
    """Decisions, and whether the answers were wrong."""
    entered: dict[str, list[bool]] = field(default_factory=dict)

    def decide(self, risk: float, regime: str) -> tuple[bool, str | None]:
        at, levels = bin_of(risk), coarser(regime)
        left = min(self.left(each) for each in levels)
        if left < 0:
            return False, "error_budget"
        limit = self.limit(levels, acting._AIM * self.error * min(1.0, left / acting._TIGHT))
        if limit is None:
            whole = self.limit(levels, acting._AIM * self.error)
            return False, "few_labels" if whole is None or left >= acting._TIGHT else "error_budget"
        act = at >= limit + int(max(self.offset(each) for each in levels))
        return act, None if act else "low_confidence"

    def label(self, decided: ActDecision, wrong: bool) -> None:
        levels = coarser(decided.regime)
        certain = self.limit(levels, acting._CERTAIN * self.error)
        is_certain = certain is not None and decided.bin >= certain
        for each in levels:
            if decided.act or (self.left(each) < acting._TIGHT and is_certain):
                self.entered.setdefault(each, []).append(wrong)
        self.labels.append((decided, wrong))

    def of(self, level: str) -> list[tuple[ActDecision, bool]]:
        return [(each, wrong) for each, wrong in self.labels if level in coarser(each.regime)]

    def left(self, level: str) -> float:
        window = self.entered.get(level, [])
        allowed = self.error * min(max(len(window), acting._LEAST), acting.WINDOW)
        return (allowed - sum(window[-acting.WINDOW :]) - 1) / max(allowed, 1)

    def offset(self, level: str) -> float:
        found = 0.0
        for each, wrong in self.of(level):
            found = max(found + acting._STEP * ((each.act and wrong) - acting._AIM * self.error), 0.0)
        return found

    def counts(self, level: str) -> list[tuple[float, float]]:
        seen, wrong = [0] * acting.BINS, [0] * acting.BINS
        for each, is_wrong in self.of(level):
            seen[each.bin] += acting.ONE
            wrong[each.bin] += acting.ONE * is_wrong
            if sum(seen) >= acting.ONE * acting.MEMORY:
                seen, wrong = [n // 2 for n in seen], [n // 2 for n in wrong]
        return list(zip(seen, wrong, strict=True))

    def evidence(self, levels: Sequence[str]) -> list[tuple[float, float]]:
        if levels:
            under, own, most = self.evidence(levels[1:]), self.counts(levels[0]), acting._BORROWED
        else:
            prior = prior_of(self.fitted)
            return list(zip(map(float, prior.seen), map(float, prior.wrong), strict=True))
        share = min(1.0, most * acting.ONE / max(sum(seen for seen, _ in under), 1.0))
        return [(a + share * b, c + share * d) for (a, c), (b, d) in zip(own, under, strict=True)]

    def limit(self, levels: Sequence[str], aim: float) -> int | None:
        counts = self.evidence(levels)
        fits = []
        for at in range(acting.BINS):
            seen, wrong = (sum(part) for part in zip(*counts[at:], strict=True))
            if wrong + acting.ONE <= aim * (seen + acting.ONE):
                fits.append(at)
        return min(fits, default=None)


def drawn(rng: random.Random, factor: float) -> tuple[float, bool]:
    """A risk, and whether its answer is wrong: ``factor`` times as often as the risk says."""
    risk = min(0.5, 10 ** rng.uniform(-5, -0.3))
    return risk, rng.random() < min(1.0, factor * risk)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), delay=st.integers(0, 40), factor=st.sampled_from([0.3, 1.0, 4.0]))
def test_decisions_are_those_of_the_plain_reference(seed: int, delay: int, factor: float) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as small:
        small.setattr(acting, "MEMORY", 60)
        small.setattr(acting, "WINDOW", 50)
        small.setattr(acting, "_LEAST", 20)
        ours, plain = Acting(0.1, FITTED), Reference(0.1, FITTED)
        waiting: list[tuple[ActDecision, bool]] = []
        for _ in range(160):
            regime = rng.choice(REGIMES)
            risk, wrong = drawn(rng, factor)
            decided = ours.decide(risk, regime)
            assert (decided.act, decided.reason) == plain.decide(risk, regime)
            waiting.append((decided, wrong))
            if len(waiting) > delay:
                past, is_wrong = waiting.pop(0)
                ours.label(past, wrong=is_wrong)
                plain.label(past, is_wrong)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), delay=st.integers(0, 30), spite=st.floats(0.0, 1.0))
def test_errors_are_bounded_whatever_the_data_do(seed: int, delay: int, spite: float) -> None:
    """Of n labels aim * n + BINS / _STEP + 1 are wrong and acted on at most, and those that waited."""
    rng, ours = random.Random(seed), Acting(ERROR, FITTED)
    waiting: list[tuple[ActDecision, bool]] = []
    errors = labels = 0
    for _ in range(1500):
        risk = 10 ** rng.uniform(-6, -0.3)
        decided = ours.decide(risk, REGIMES[0])
        wrong = rng.random() < (spite if decided.act else 0.01)
        waiting.append((decided, wrong))
        if len(waiting) > delay:
            past, is_wrong = waiting.pop(0)
            ours.label(past, wrong=is_wrong)
            errors, labels = errors + (past.act and is_wrong), labels + 1
            bound = acting._AIM * ERROR * labels + acting.BINS / acting._STEP + 1 + delay
            assert errors <= bound + EXACT


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), wrong=st.floats(0.0, 0.3))
def test_no_answer_is_acted_on_that_could_overdraw_a_budget(seed: int, wrong: float) -> None:
    """With labels at once, the window of each regime has no more errors of acting than its budget."""
    rng, ours = random.Random(seed), Acting(ERROR, FITTED)
    acted: dict[str, list[bool]] = {}
    for _ in range(800):
        regime = rng.choice(REGIMES)
        decided = ours.decide(10 ** rng.uniform(-6, -0.3), regime)
        is_wrong = rng.random() < wrong
        for level in coarser(regime) if decided.act else ():
            acted.setdefault(level, []).append(is_wrong)
            window = acted[level][-acting.WINDOW :]
            allowed = ERROR * max(min(len(acted[level]), acting.WINDOW), acting._LEAST)
            assert sum(window[:-1]) + 1 <= allowed + 1 + EXACT
        ours.label(decided, wrong=is_wrong)


def test_it_acts_again_when_a_bad_spell_is_over() -> None:
    rng, ours = random.Random(1), Acting(ERROR, FITTED)
    acted = []
    for number in range(9000):
        risk, wrong = drawn(rng, 1.0)
        if 2000 <= number < 2600:
            wrong = rng.random() < 0.5
        decided = ours.decide(risk, REGIMES[0])
        acted.append(decided.act)
        ours.label(decided, wrong=wrong)
    assert sum(acted[2200:2600]) <= 40
    assert sum(acted[8000:]) >= 500


def test_a_budget_that_is_used_up_stops_all_until_certain_answers_have_moved_it() -> None:
    ours, sure = Acting(ERROR, FITTED), bin_of(1e-6)
    for _ in range(1000):
        ours.label(ActDecision(True, None, REGIMES[0], sure), wrong=False)
    for _ in range(20):
        assert ours.decide(1e-6, REGIMES[0]).reason != "error_budget" or ours.error >= 0.7 * ERROR
        ours.label(ActDecision(True, None, REGIMES[0], 0), wrong=True)
    assert ours.error == ERROR
    stopped = ours.decide(1e-9, REGIMES[0])
    assert (stopped.act, stopped.reason) == (False, "error_budget")
    for _ in range(1000):
        ours.label(ActDecision(False, "error_budget", REGIMES[0], sure), wrong=False)
    assert ours.error <= (1 - acting._TIGHT) * ERROR
    assert ours.decide(1e-6, REGIMES[0]).reason != "error_budget"


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (0.5, 3.0, 1.0), (1.0, 6.0, 0.2)])
def test_the_error_is_kept_through_shifts(factors: tuple[float, ...]) -> None:
    """Answers are wrong ``factor`` times as often as their risk says; labels come two answers later."""
    rng, ours = random.Random(7), Acting(ERROR, FITTED)
    waiting: list[tuple[ActDecision, bool]] = []
    by_regime: dict[str, list[bool]] = {}
    acted = []
    for factor in factors:
        for _ in range(4000):
            regime = rng.choice(REGIMES)
            risk, wrong = drawn(rng, factor * (2.0 if regime.startswith("wild") else 1.0))
            decided = ours.decide(risk, regime)
            waiting.append((decided, wrong))
            if decided.act:
                acted.append(wrong)
                by_regime.setdefault(regime, []).append(wrong)
            if len(waiting) > 2:
                past, is_wrong = waiting.pop(0)
                ours.label(past, wrong=is_wrong)
    assert sum(acted) <= ERROR * len(acted)
    assert all(sum(each) <= ERROR * len(each) for each in by_regime.values())
    assert max(sum(acted[at : at + 1000]) for at in range(len(acted) - 1000)) <= ERROR * 1000
    assert len(acted) >= 0.5 * 12_000


def test_before_labels_the_calibration_decides_with_twice_its_errors() -> None:
    ours = Acting(ERROR, FITTED)
    prior = prior_of(FITTED)
    limit = next(at for at in range(acting.BINS) if ours.decide(2 ** (-(at + 0.5) / 3), REGIMES[0]).act)
    seen, wrong = sum(prior.seen[limit:]), sum(prior.wrong[limit:])
    assert sum(prior.wrong) == pytest.approx(2 * 5 / len(SCORES) * sum(prior.seen), rel=0.01)
    assert 0 < wrong / seen <= acting._AIM * ERROR
    assert ours.decide(0.5, REGIMES[0]).reason == "low_confidence"
    hopeless = QuestionCalibration(
        name="q", text="Q?", choices=["A", "B"], temperature=1.0, scores=[0.6], labels=200, mean_gap=1.0
    )
    assert Acting(ERROR, hopeless).decide(1e-6, REGIMES[0]).reason == "few_labels"


@given(choices=st.lists(st.floats(-8, 8), min_size=2, max_size=4), data=st.data())
def test_a_risk_is_what_the_given_choice_lacks(choices: list[float], data: st.DataObject) -> None:
    fitted = QuestionCalibration(
        name="q", text="Q?", choices=[str(n) for n in range(len(choices))], temperature=1.5, scores=SCORES,
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
        risk, wrong = drawn(rng, 1.0)
        high = 100 + rng.randint(0, 9)
        for each, decisions in ((whole, told[0]), (first if number < at else second, told[1])):
            each.bar(number * 10**9, high, 95, 97, gap=False)
            question = each.question("q", ERROR, FITTED)
            decisions.append(question.decide(risk, each.regime))
            question.label(decisions[-1], wrong=wrong)
    assert told[0] == told[1]
    assert (second if at < 200 else first).cut() == whole.cut()


def test_a_question_goes_on_after_a_pause_as_without_one() -> None:
    """Also where the session was saved meanwhile. Of too many paused ones the first is forgotten."""
    rng, whole, paused = random.Random(2), Acting(ERROR, FITTED), SessionActing()
    for number in range(120):
        if number == 60:
            paused.keep(())
            assert paused.known("q") is None
            saved, paused = paused.cut(), SessionActing()
            paused.restore(saved)
            paused.keep(())
        risk, wrong = drawn(rng, 1.0)
        question = paused.question("q", ERROR, FITTED)
        decided = whole.decide(risk, REGIMES[0])
        assert question.decide(risk, REGIMES[0]) == decided
        whole.label(decided, wrong=wrong)
        question.label(decided, wrong=wrong)
    assert paused.question("q", ERROR, FITTED).cut() == whole.cut()
    for number in range(acting.PAUSED):
        paused.question(f"q{number}", ERROR, FITTED)
    paused.keep(())
    assert list(paused.cut().questions) == [f"q{number}" for number in range(acting.PAUSED)]


def test_another_error_begins_again() -> None:
    session = SessionActing()
    known = session.question("q", ERROR, FITTED)
    known.label(known.decide(1e-4, REGIMES[0]), wrong=True)
    assert known.error == session.error == 1.0
    assert session.question("q", ERROR, FITTED) is known
    assert session.question("q", 0.05, FITTED).cut() == ActingState(0.05, {})
    other = Acting(0.05, FITTED)
    other.restore(known.cut())
    assert other.cut() == ActingState(0.05, {})


def test_the_state_is_small() -> None:
    """A label costs no room once its regime has all bins; errors beyond the window are dropped."""
    rng, ours = random.Random(0), Acting(ERROR, FITTED)
    for _ in range(3000):
        risk, wrong = drawn(rng, 1.0)
        ours.label(ActDecision(True, None, rng.choice(REGIMES), bin_of(risk)), wrong=wrong)
    state = ours.cut().regimes
    assert set(state) == {*REGIMES, "calm", "usual", "wild", EVERYTHING}
    assert all(len(each.seen) <= acting.BINS for each in state.values())
    assert all(each.errors[0] > each.acted - acting.WINDOW for each in state.values() if each.errors)
