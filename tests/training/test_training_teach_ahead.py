"""Teaching what comes next: what is shown knows nothing of it, splits by time, and the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.question_pack import read_pack
from tapes.question_file import QuestionError, read_question
from tapes.rules import UNDEFINED, Floats, Ints
from tests.training.test_training_teach import question_of, run, said
from training.ahead import History
from training.batches import Vocabulary
from training.export import export, tape_model
from training.model import Shape, TapeModel, initialise_numbers
from training.question_model import QuestionModel
from training.sources import Asked, Recorded, Stretch
from training.taught_question import read_labelled, read_taught
from training.teach import Taught
from training.teach_ahead import Ahead
from training.walk_forward import folds, forecast

HORIZON, WINDOW, SHARE = 5, 64, 0.6
FORMAT = "btc_perp_bars"
UP = f"""
name = "up"
text = "Will the price close higher after the next five bars?"
horizon = {HORIZON}
rule = "last(future.close) > close"
"""
_MINUTE = timedelta(minutes=1)


def file_of(path: Path, close: Ints) -> Path:
    """A bar a minute."""
    rng, begin = np.random.default_rng(1), datetime(2022, 1, 1, tzinfo=UTC)
    rows = ["timestamp,open,high,low,close,volume"]
    for i, c in enumerate(close.tolist()):
        o = int(close[max(i - 1, 0)])
        prices = f"{o},{max(o, c) + 5},{min(o, c) - 5},{c}"
        rows.append(f"{begin + i * _MINUTE:%Y-%m-%d %H:%M:%S},{prices},{rng.integers(1, 9) * 1000}")
    path.write_text("\n".join(rows) + "\n")
    return path


def walk(n: int, seed: int = 0) -> Ints:
    """What comes next cannot be known."""
    found: Ints = 40_000 + np.cumsum(np.random.default_rng(seed).integers(-30, 31, n))
    return found


def reverting(n: int) -> Ints:
    """A price that comes back to its mean: seven tenths of the way at each bar."""
    noise, at = 30 * np.random.default_rng(0).normal(size=n), np.zeros(n)
    for i in range(1, n):
        at[i] = 0.3 * at[i - 1] + noise[i]
    found: Ints = (40_000 + at).astype(np.int64)
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers that reads 64 bars."""
    directory = tmp_path_factory.mktemp("tiny")
    model = TapeModel(Shape(hidden=32, layers=2, heads=2, inner=48), seed=3)
    initialise_numbers(model, Vocabulary().numbers, 3)
    export(model, directory, torch.float32)
    return directory


@pytest.fixture
def whole(tmp_path: Path) -> Stretch:
    return Recorded(file_of(tmp_path / "bars.csv", walk(900)), FORMAT).stretch()


def ahead_of(folder: Path, whole: Stretch, text: str = UP) -> Ahead:
    return Ahead.of(read_question(question_of(folder, text)), whole, WINDOW, SHARE, 4_000)


def changed(whole: Stretch, behind: int) -> Stretch:
    """The same bars up to ``behind``, and ten times their prices after it."""
    bars = whole.everything.copy()
    for name in "ohlc":
        bars[name][behind + 1 :] *= 10
    return replace(whole, everything=bars)


def logits_of(found: Ahead, directory: Path) -> dict[int, list[float]]:
    """By the number of the bar at which a random question was asked."""
    model = QuestionModel(tape_model(directory), (20, 21, 22), 5, tokens=1, rank=2, seed=0)
    reader = Taught(model, Asked((found.rule,), exact=False), Vocabulary())
    answered, first = found.answered(reader, lambda share: None), found.decisions.first
    return dict(zip(answered.bar[first:].tolist(), answered.logits[first:].tolist(), strict=True))


# Nothing looks ahead.


@pytest.mark.parametrize("behind", [700, 731])
def test_an_answer_does_not_change_with_the_bars_that_come_behind_it(
    tmp_path: Path, tiny: Path, whole: Stretch, behind: int
) -> None:
    """The canary, through the model: prices that leave the levels behind a bar, and the same before it."""
    one, other = (ahead_of(tmp_path, each) for each in (whole, changed(whole, behind)))
    mine, theirs = (logits_of(each, tiny) for each in (one, other))
    before = [bar for bar in mine if bar <= behind]
    assert len(before) > 50
    for bar in before:
        assert mine[bar] == pytest.approx(theirs[bar], abs=1e-5)
    d, e = one.decisions, other.decisions
    kept = d.bar <= behind
    assert np.array_equal(d.features[kept], e.features[: kept.sum()])


@pytest.mark.parametrize("cut", [63, 64, 90])
def test_a_tape_to_learn_from_shows_nothing_of_what_comes(whole: Stretch, cut: int) -> None:
    vocabulary, shown = Vocabulary(), replace(whole, shown=WINDOW)
    (x, header, _), (y, other, _) = (
        next(each.windows(vocabulary, np.array([100]), 2 * WINDOW, WINDOW))
        for each in (shown, changed(shown, 100 + cut))
    )
    assert np.array_equal(header, other)
    for name in ("open", "high", "low", "close", "volume", "at"):
        assert np.array_equal(getattr(x, name)[:, : cut + 1], getattr(y, name)[:, : cut + 1])
    assert np.array_equal(x.percent, y.percent)
    assert y.at is not None
    assert (y.at[:, cut + 1 :] == 0).all()


def test_an_anchor_of_all_bars_is_caught(whole: Stretch) -> None:
    """What the canary is for: it tells from the levels how far the price will go."""
    vocabulary = Vocabulary()
    (x, *_), (y, *_) = (
        next(each.windows(vocabulary, np.array([100]), 2 * WINDOW, WINDOW))
        for each in (whole, changed(whole, 163))
    )
    assert not np.array_equal(x.close[:, :64], y.close[:, :64])


def test_labels_and_answers_are_apart_in_time(tmp_path: Path, whole: Stretch) -> None:
    """A label that is learnt is known before the first bar that is shown of an answer that is scored."""
    found, end = ahead_of(tmp_path, whole), round(SHARE * len(whole.everything))
    d = found.decisions
    assert d.bar[: d.first].max() + HORIZON < end
    assert d.bar[d.first :].min() == end + HORIZON + WINDOW - 1
    assert (np.diff(d.bar) > 0).all()
    close = walk(900)
    assert d.label.tolist() == [0 if close[bar + HORIZON] > close[bar] else 1 for bar in d.bar]
    again = ahead_of(tmp_path, changed(whole, end - 1))
    for tapes, others in zip(
        found.learnt.batches(Vocabulary(), 2 * WINDOW, WINDOW),
        again.learnt.batches(Vocabulary(), 2 * WINDOW, WINDOW),
        strict=True,
    ):
        taught, other = found.rule.label(tapes.levels).value, again.rule.label(others.levels).value
        assert np.array_equal(taught, other)
        assert tapes.levels.at is not None
        late = tapes.levels.at >= found.learnt.everything["ts_last_event"][-HORIZON]
        assert (taught[late] == UNDEFINED).all()


def test_no_calibration_knows_an_answer_that_was_trained_on(tmp_path: Path) -> None:
    source = Recorded(file_of(tmp_path / "long.csv", walk(3_000)), FORMAT)
    d = ahead_of(tmp_path, source.stretch()).decisions
    rng = np.random.default_rng(0)
    d = replace(d, logits=rng.normal(size=d.logits.shape))
    other: Floats = d.logits.copy()
    other[: d.first] += 7 * rng.normal(size=other[: d.first].shape)
    (fold, *_) = folds(d.bar, d.horizon, 5, d.horizon, d.first)
    assert fold.test.min() >= (d.first + len(d.bar)) // 2
    assert (fold.train < d.first).any()
    assert forecast(d, fold).fitted == forecast(replace(d, logits=other), fold).fitted


# The verdict.


def teach(folder: Path, close: Ints, *more: object) -> tuple[str, int, str]:
    tape = file_of(folder / "bars.csv", close)
    result = run(question_of(folder, UP), "--tape", tape, "--format", FORMAT, *more)
    return said(result), result.exit_code, (folder / "q.md").read_text()


def test_a_future_that_can_be_known_has_skill_and_makes_a_pack(tmp_path: Path) -> None:
    _, status, card = teach(tmp_path, reverting(2_800), "--steps", 40)
    assert status == 0, card
    pack = read_pack(tmp_path / "q.pack")
    scores = pack.head.card["scores"]["own tape"]
    assert scores["skill"]["brier"]["low"] > 0
    assert len(scores["by_fold"]) == 5
    assert pack.head.question["horizon"] == HORIZON
    assert all(each["fitted_until"] for each in pack.head.calibrations)
    assert "**Accepted**" in card
    assert "- up: skill" in card
    assert "| tapes | bars.csv |" in card


def test_a_random_walk_has_no_skill_and_makes_no_pack(tmp_path: Path, tiny: Path) -> None:
    output, status, card = teach(tmp_path, walk(2_800), "--steps", 12, "--model", tiny)
    assert status == 1
    assert "q.toml is not taught: no skill: over the base rate" in output
    assert "**Refused:** no skill" in card
    assert "- up: no skill" in card
    assert "| ECE |" in card
    assert not (tmp_path / "q.pack").exists()


def test_a_tape_without_enough_to_score_is_refused_before_training(tmp_path: Path, tiny: Path) -> None:
    file_of(tmp_path / "bars.csv", walk(2_000))
    result = run(
        question_of(tmp_path, UP), "--tape", tmp_path / "bars.csv", "--format", FORMAT, "--model", tiny
    )
    assert result.exit_code == 1
    assert "labels before a test fold are too few to calibrate on" in said(result)
    assert not (tmp_path / "q.md").exists()


@pytest.mark.parametrize(("horizon", "why"), [(300, "too short to ask behind"), (500, "no bar of the first")])
def test_a_horizon_too_long_for_the_tape_is_refused(
    tmp_path: Path, whole: Stretch, horizon: int, why: str
) -> None:
    with pytest.raises(QuestionError, match=why):
        ahead_of(tmp_path, whole, UP.replace(f"= {HORIZON}", f"= {horizon}"))


def test_without_a_tape_there_is_no_future_to_learn(tmp_path: Path) -> None:
    result = run(question_of(tmp_path, UP))
    assert result.exit_code == 1
    assert "it looks ahead, and generated tapes have no future to learn: give --tape and --format" in said(
        result
    )


# Labels that look ahead, by a function and by hand.


def labelled(folder: Path, body: str) -> Path:
    source = f"import numpy as np\n\n\ndef label(bars):\n    close = bars['close']\n    {body}\n"
    (folder / "own.py").write_text(source)
    given = f'name = "q"\ntext = "?"\nlabeller = "own.py:label"\nhorizon = {HORIZON}\n'
    return question_of(folder, given)


def labels_by(read: Callable[[Path], object], whole: Stretch, file: Path) -> Ints:
    """Of each bar that has a whole window."""
    rule = read(file)
    ends = np.arange(WINDOW - 1, len(whole.everything))
    return History(whole.everything, whole.spec, WINDOW, ends, 1).labels(rule)  # type: ignore[arg-type]


def test_a_labeller_may_look_as_far_ahead_as_its_horizon(tmp_path: Path, whole: Stretch) -> None:
    body = f"return (np.roll(close, -{HORIZON}, 1) <= close).astype(int)"
    mine = labels_by(lambda file: read_taught(file, WINDOW, taped=True).rule, whole, labelled(tmp_path, body))
    theirs = labels_by(read_question, whole, question_of(tmp_path, UP))
    assert np.array_equal(mine, theirs)
    assert (mine[-HORIZON:] == UNDEFINED).all()


def test_a_labeller_that_looks_farther_is_refused(tmp_path: Path, whole: Stretch) -> None:
    body = f"return (np.roll(close, -{HORIZON + 1}, 1) <= close).astype(int)"
    rule = read_taught(labelled(tmp_path, body), WINDOW, taped=True).rule
    (drawn, *_) = whole.batches(Vocabulary(), 2 * WINDOW, WINDOW)
    with pytest.raises(QuestionError, match="looks more than 5"):
        rule.label(drawn.levels)


def test_labels_by_hand_with_a_horizon_are_known_when_it_has_passed(tmp_path: Path, whole: Stretch) -> None:
    source = Recorded(tmp_path / "bars.csv", FORMAT)
    (symbol, *_) = sorted(source.symbols())
    begin = datetime(2022, 1, 1, tzinfo=UTC)
    rows = [f"{begin + bar * _MINUTE:%Y-%m-%dT%H:%M:%SZ},{symbol},YES" for bar in range(0, 900, 2)]
    (tmp_path / "own.csv").write_text("\n".join(["time,symbol,answer", *rows]) + "\n")
    file = question_of(tmp_path, f'name = "q"\ntext = "?"\nlabels = "own.csv"\nhorizon = {HORIZON}\n')
    rule = read_labelled(file, WINDOW, source)
    d = Ahead.of(rule, whole, WINDOW, SHARE, 4_000).decisions
    assert set(d.bar % 2) == {0}
    assert d.bar.max() + HORIZON < len(whole.everything)
    assert d.bar[: d.first].max() + HORIZON < round(SHARE * len(whole.everything))
