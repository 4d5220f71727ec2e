"""Labels that a question's rule gives as bars close: when, which, over a restart, and what is refused."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from daemon import protocol
from daemon.api.messages import Label
from daemon.cli.check import check_all
from daemon.config.checks import cross_check
from daemon.config.schema import ClauseConfig, Config, QuestionConfig, SignalConfig
from daemon.engine import rule_labels
from daemon.engine.labelled_bars import ClosedBar, label_of
from daemon.engine.rule_labels import RuleLabels
from daemon.progress import Progress
from feeds.connector import SettingError
from flash.confidence import AdaptiveCoverage, Calibration, QuestionCalibration, write_calibration
from ingest.volumes import volume_of
from tapes.question_file import read_question
from tests.daemon.engine.test_daemon_engine_recovery import RINGS, SECOND, Engine, Trade, config, session
from tests.training.test_training_ahead import JUMP, UP, WINDOW, bars_file
from training.ahead import History
from training.sources import Recorded

TEXT, CHOICES, HORIZON = "Will the close be higher three bars from now?", ("YES", "NO"), 3
RULE = f'name = "up"\ntext = "{TEXT}"\nhorizon = {HORIZON}\nrule = "last(future.close) > close"\n'
PAST = f'name = "up"\ntext = "{TEXT}"\nrule = "close > close[1]"\n'
FITTED = QuestionCalibration(
    name="up",
    text=TEXT,
    choices=list(CHOICES),
    temperature=1.0,
    scores=[(n + 1) / 250 for n in range(200)],
    labels=2000,
    mean_gap=1.0,
)
CLOSES = [10_000 + int(move) for move in np.cumsum(np.random.default_rng(3).integers(-9, 10, 24))]
LOG: list[Trade] = [(0, number * SECOND, close) for number, close in enumerate(CLOSES)]


@pytest.fixture(autouse=True)
def removed_rings() -> Iterator[None]:
    yield
    while RINGS:
        ring = RINGS.pop()
        ring.close()
        ring.unlink()


def labelled(
    folder: Path,
    rule: str = RULE,
    max_error: float | None = None,
    fitted: QuestionCalibration = FITTED,
    **of_session: object,
) -> Config:
    """An untrained model with a calibration, whose one question has a rule."""
    (folder / "up.toml").write_text(rule)
    made = config(None, folder / "snapshots", session("s", **of_session))
    own = QuestionConfig("up", TEXT, CHOICES, rule=str(folder / "up.toml"), max_error=max_error)
    made = replace(made, questions=(own,))
    file = folder / "calibration.json"
    if not file.exists():
        revision = Engine(replace(made, questions=())).loaded.revision
        write_calibration(file, Calibration(model=revision, lines="decimal", data={}, questions=[fitted]))
    return replace(made, model=replace(made.model, calibration=str(file)))


def labels_of(engine: Engine) -> RuleLabels:
    return engine.host.first.parts.labels


def play(engine: Engine, begin: int, end: int, *, idle: bool = True) -> None:
    for number in range(begin, end):
        engine.give(number, LOG[number])
        while idle and labels_of(engine).idle() is not None:
            pass


def given(engines: Sequence[Engine]) -> list[protocol.Answered]:
    return [event for engine in engines for event in engine.of(protocol.Answered)]


def told(engine: Engine) -> tuple[float, float]:
    """Labels that said right, and those that said wrong."""
    right = engine.value("labelled_right_total", session="s")
    sets = (engine.value("labelled_sets_total", session="s", covered=each) for each in ("yes", "no"))
    return right, sum(sets) - right


def rightness(answers: Sequence[protocol.Answered], closes: Sequence[int]) -> list[bool]:
    """Of the answers whose horizon has passed, in order, from the closes alone; answer n is of bar n."""
    known = answers[: len(closes) - HORIZON]
    return [
        (closes[bar + HORIZON] > closes[bar]) == (event.answer.choice == "YES")
        for bar, event in enumerate(known)
    ]


def simulated(answers: Sequence[protocol.Answered], closes: Sequence[int]) -> list[tuple[str, ...]]:
    """The choice set of each answer, where labels count once the bar behind their horizon has closed."""
    state, sets, counted = AdaptiveCoverage.of(0.9), [], 0
    for bar, event in enumerate(answers):
        while counted + HORIZON < bar:
            right = "YES" if closes[counted + HORIZON] > closes[counted] else "NO"
            state = state.after(right in FITTED.choice_set(answers[counted].logits, state.asked))
            counted += 1
        sets.append(FITTED.choice_set(event.logits, state.asked))
    return sets


def test_labels_come_by_themselves_and_no_answer_knows_of_later_ones(tmp_path: Path) -> None:
    engine = Engine(labelled(tmp_path))
    play(engine, 0, len(LOG))
    answers = given([engine])
    closed = CLOSES[: len(answers)]  # the last bar is open
    right = rightness(answers, closed)
    assert len(answers) == len(LOG) - 1
    assert told(engine) == (sum(right), len(right) - sum(right))
    assert [each.answer.choice_set for each in answers] == simulated(answers, closed)
    assert engine.value("adapted_coverage", session="s") != 0.9


def test_a_restart_goes_on_with_the_labels_that_were_waited_for(tmp_path: Path) -> None:
    """The same counts, choice sets and coverage as of an engine that was not restarted."""
    made = labelled(tmp_path)
    whole = Engine(replace(made, recovery=replace(made.recovery, directory=str(tmp_path / "whole"))))
    play(whole, 0, len(LOG))
    before = Engine(made)
    play(before, 0, 12)
    before.snapshot()
    counted = told(before)
    after = Engine(made, before.progress())
    assert after.value("snapshots_refused_total", reason="foreign") == 0
    shown = [each.value("adapted_coverage", session="s") for each in (before, after)]
    assert shown[0] == shown[1] > 0
    begin = after.positions["s"]["X:a"].offset
    play(after, begin, len(LOG))
    answers = given([before, after])
    assert [each.answer.data_version for each in answers] == [e.answer.data_version for e in given([whole])]
    assert [each.answer.choice_set for each in answers] == [e.answer.choice_set for e in given([whole])]
    assert tuple(map(sum, zip(counted, told(after), strict=True))) == told(whole)
    cuts = [each.host.first.parts.confidence.cut("s") for each in (after, whole)]
    assert cuts[0] == cuts[1]


def test_acting_goes_on_over_a_restart(tmp_path: Path) -> None:
    """With the decisions, counts and state of an engine that was not restarted."""
    sure = replace(FITTED, temperature=0.01)
    made = labelled(tmp_path, max_error=0.1, fitted=sure)
    whole = Engine(replace(made, recovery=replace(made.recovery, directory=str(tmp_path / "whole"))))
    play(whole, 0, len(LOG))
    before = Engine(made)
    play(before, 0, 18)
    before.snapshot()
    counted = acted(before)
    after = Engine(made, before.progress())
    shown = [each.value("acted_error_ratio", session="s") for each in (before, after)]
    assert shown[0] == shown[1] > 0
    play(after, after.positions["s"]["X:a"].offset, len(LOG))
    marked = [(each.answer.act, each.answer.abstain_reason) for each in given([before, after])]
    assert marked == [(each.answer.act, each.answer.abstain_reason) for each in given([whole])]
    assert {True, False} == {act for act, _ in marked}
    assert tuple(map(sum, zip(counted, acted(after), strict=True))) == acted(whole)
    assert acted(whole) == (sum(act is True for act, _ in marked), sum(act is False for act, _ in marked))
    cuts = [each.host.first.parts.confidence.cut("s") for each in (after, whole)]
    assert cuts[0] == cuts[1]
    assert after.value("acted_error_ratio", session="s") == whole.value("acted_error_ratio", session="s") > 0


def acted(engine: Engine) -> tuple[float, float]:
    """Answers to act on, and others."""
    why = ("low_confidence", "few_labels", "error_budget")
    others = (engine.value("act_abstained_total", session="s", reason=each) for each in why)
    return engine.value("acted_total", session="s"), sum(others)


def test_an_error_that_cannot_be_kept_is_refused_at_the_start_and_by_check(tmp_path: Path) -> None:
    made = labelled(tmp_path, max_error=0.02)
    off = replace(made, model=replace(made.model, calibration="off"))
    with pytest.raises(SettingError, match="needs a calibration") as refused:
        Engine(off)
    assert refused.value.key == "questions[0].max_error"
    (wrong,) = [each for each in check_all(off) if each.key.startswith("questions[")]
    assert (wrong.ok, wrong.key) == (False, "questions[0].max_error")
    assert "remove calibration = 'off'" in wrong.message


def test_nothing_is_acted_on_before_a_calibration_is_learnt(tmp_path: Path) -> None:
    other = replace(FITTED, name="other", text="Something else?")
    engine = Engine(labelled(tmp_path, max_error=0.45, fitted=other))
    play(engine, 0, len(LOG))
    answers = [each.answer for each in given([engine])]
    assert len(answers) == len(LOG) - 1
    assert {(a.act, a.abstain_reason, a.probability) for a in answers} == {(False, "few_labels", None)}


def test_a_clause_that_no_answer_can_meet_is_named_by_check_and_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = labelled(tmp_path)
    other = QuestionConfig("other", "Something else?", CHOICES)
    when = tuple(ClauseConfig(each, min_probability=0.6) for each in ("up", "other"))
    made = replace(made, questions=(*made.questions, other), signals=(SignalConfig("sure", when),))
    why = "answers to other of s have no probability, so this never holds: run foretick calibrate "
    Engine(made)
    (line,) = [each for each in caplog.messages if "min_probability" in each]
    assert line.startswith(f"signals[0].when[1].min_probability: {why}")
    (found,) = [each for each in check_all(made) if each.key.startswith("signals")]
    assert (found.ok, found.key) == (True, "signals[0].when[1].min_probability")
    assert found.message.startswith(f"warning: {why}")


@pytest.mark.parametrize(
    ("changes", "of_model", "message"),
    [
        ({"choices": ()}, {}, "needs choices"),
        ({"provisional": True}, {}, "remove provisional"),
        ({}, {"calibration": "off"}, "model.calibration is off"),
    ],
)
def test_an_error_that_nothing_can_tell_of_is_refused_in_a_sentence(
    tmp_path: Path, changes: dict[str, object], of_model: dict[str, str], message: str
) -> None:
    made = config(None, tmp_path, session("s"))
    made = replace(made, model=replace(made.model, **of_model))
    own = replace(QuestionConfig("up", TEXT, CHOICES, max_error=0.02), **changes)
    (problem,) = [e for e in cross_check(replace(made, questions=(own,))) if "max_error" in e.key]
    assert problem.key == "questions[0].max_error"
    assert message in problem.message
    assert "\n" not in problem.message


def test_no_label_reaches_across_a_split(tmp_path: Path) -> None:
    """Which stands between bars 9 and 10: prices before it are others."""
    engine = Engine(labelled(tmp_path))
    play(engine, 0, 10)
    engine.give(10, (0, 9 * SECOND + 1, -4))
    for number in range(10, len(LOG)):
        engine.give(number + 1, LOG[number])
        while labels_of(engine).idle() is not None:
            pass
    after = sum(told(engine))
    assert after < len(LOG) - 1 - HORIZON
    assert after >= len(LOG) - 1 - 2 * HORIZON - 2


def test_a_rule_of_the_past_labels_when_the_next_bar_has_closed(tmp_path: Path) -> None:
    engine = Engine(labelled(tmp_path, PAST))
    play(engine, 0, len(LOG))
    answers = given([engine])
    right = [
        (CLOSES[bar] > CLOSES[bar - 1]) == (answers[bar].answer.choice == "YES")
        for bar in range(1, len(answers) - 1)
    ]
    assert told(engine) == (sum(right), len(right) - sum(right))


def test_an_engine_that_is_never_idle_falls_behind_by_so_much_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_labels, "_BEHIND", 4)
    engine = Engine(labelled(tmp_path))
    play(engine, 0, len(LOG), idle=False)
    assert sum(told(engine)) == len(LOG) - 1 - HORIZON - 4


def test_a_label_of_a_client_comes_first(tmp_path: Path) -> None:
    engine = Engine(labelled(tmp_path))
    play(engine, 0, 3)
    engine.do(Label(1, "s", "up", 1, "YES"))
    play(engine, 3, 8)
    assert sum(told(engine)) == 4  # of versions 1 to 4, each once


@pytest.mark.parametrize("text", [UP, JUMP])
def test_the_daemon_labels_as_evaluate_does(tmp_path: Path, text: str) -> None:
    """The same bars, the same window."""
    (tmp_path / "own.toml").write_text(text)
    rule = read_question(tmp_path / "own.toml")
    history = History.of(Recorded(bars_file(tmp_path / "bars.csv"), "btc_perp_bars"), WINDOW, 10_000)
    closed = [
        ClosedBar(*(int(bar[n]) for n in ("ts_open", "ts_last_event", "o", "h", "l", "c")), *volume_of(bar))
        for bar in history.bars
    ]
    for end, label in zip(history.ends.tolist(), history.labels(rule).tolist(), strict=True):
        around = closed[end - WINDOW + 1 : end + 1 + rule.horizon]
        if len(around) == WINDOW + rule.horizon:
            assert label_of(rule, around, history.spec) == label


@pytest.mark.parametrize(
    ("rule", "of_session", "changes", "message"),
    [
        (RULE.replace("higher", "lower"), {}, {}, "is of another question"),
        (RULE + 'choices = ["NO", "YES"]\n', {}, {}, "is of another question"),
        (RULE.replace("horizon = 3", "horizon = 0"), {}, {}, "looks ahead: it needs a horizon"),
        (RULE, {"more_symbols": ("X:b",)}, {}, "s has several symbols"),
        (
            RULE.replace("> close", "> close[20]"),
            {"retention_records": 12},
            {},
            "reads 21 bars, and s keeps 12",
        ),
        (RULE, {}, {"provisional": True}, "remove provisional"),
        (RULE, {}, {"rule": "nowhere.toml"}, "cannot read the question nowhere.toml"),
    ],
)
def test_a_rule_of_no_use_is_refused_in_a_sentence(
    tmp_path: Path, rule: str, of_session: dict[str, object], changes: dict[str, object], message: str
) -> None:
    (tmp_path / "up.toml").write_text(rule)
    made = config(None, tmp_path, session("s", **of_session))
    own = replace(QuestionConfig("up", TEXT, CHOICES, rule=str(tmp_path / "up.toml")), **changes)
    problems = [each for each in cross_check(replace(made, questions=(own,))) if "rule" in each.key]
    assert [each.key for each in problems] == ["questions[0].rule"]
    assert message in problems[0].message
    assert "\n" not in problems[0].message


def test_nothing_is_kept_without_a_rule(tmp_path: Path) -> None:
    engine = Engine(config(None, tmp_path, session("s")), {"s": Progress()})
    play(engine, 0, 4)
    assert labels_of(engine).cut("s") is None
