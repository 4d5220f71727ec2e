"""Questions that are asked in time order: what a model is shown, their labels, and the commands."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from engine.model.embedded import embedded_directory
from flash.confidence import Calibration
from tapes.question_file import read_question
from tapes.real_bars import label_ahead
from tapes.rules import UNDEFINED
from training.ahead import History, plain_features
from training.ahead_card import NO_SKILL, AheadReport
from training.cli import calibrate, evaluate
from training.sources import Recorded
from training.taught_question import read_labelled

UP = """
name = "up"
text = "Will the price close higher after the next five bars?"
horizon = 5
rule = "last(future.close) > close"
"""
JUMP = """
name = "jump"
text = "Will the price reach 10 basis points more within three bars?"
horizon = 3
rule = "highest(future.high) > 1.001 * close"
max_gap_minutes = 60
"""
WINDOW = 32


def bars_file(path: Path, n: int = 240) -> Path:
    """A random walk by the minute, with a night after bar 150."""
    rng = np.random.default_rng(0)
    close = 40_000 + np.cumsum(rng.integers(-30, 31, n))
    rows = ["timestamp,open,high,low,close,volume"]
    for i in range(n):
        o, c, at = close[i - 1] if i else close[0], close[i], i + (600 if i > 150 else 0)
        stamp = f"2022-01-01 {at // 60:02d}:{at % 60:02d}:00"
        rows.append(f"{stamp},{o},{max(o, c) + 5},{min(o, c) - 5},{c},{rng.integers(1, 9) * 1000}")
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    return bars_file(tmp_path / "bars.csv")


def history(tape: Path, labels: int = 10_000, until_ns: int = 0) -> History:
    return History.of(Recorded(tape, "btc_perp_bars"), WINDOW, labels, until_ns)


def test_labels_are_those_of_the_prices_behind_each_bar(tmp_path: Path, tape: Path) -> None:
    """In plain Python, from the closes and highs of the file."""
    for name, text in (("up", UP), ("jump", JUMP)):
        (tmp_path / f"{name}.toml").write_text(text)
    up, jump = (read_question(tmp_path / f"{name}.toml") for name in ("up", "jump"))
    found = history(tape)
    prices = [tuple(map(int, row.split(",")[1:5])) for row in tape.read_text().splitlines()[1:]]
    for end, label, other in zip(found.ends, found.labels(up), found.labels(jump), strict=True):
        close = prices[end][3]
        if end + 5 >= len(prices):
            assert label == UNDEFINED
        else:
            assert label == (0 if prices[end + 5][3] > close else 1)
        if end + 3 >= len(prices) or end < 151 <= end + 3:
            assert other == UNDEFINED
        else:
            top = max(high for _, high, _, _ in prices[end + 1 : end + 4])
            assert abs(top - 1.001 * close) < 1 or other == (0 if top > 1.001 * close else 1)


def test_what_is_shown_does_not_depend_on_what_comes(tmp_path: Path, tape: Path) -> None:
    """The canary: other bars behind one change neither its lines, nor its anchor, nor the features."""
    found = history(tape)
    for end in (31, 100, 200):
        later = found.bars.copy()
        later[["o", "h", "l", "c"]][end + 1 :] = later[["o", "h", "l", "c"]][end + 1 :][::-1]
        for name in "ohlc":
            later[name][end + 1 :] *= 3
        other = History(later, found.spec, found.window, found.ends, found.stride)
        (x, header), (y, again) = found.shown(end), other.shown(end)
        assert header == again
        for name in ("open", "high", "low", "close", "volume", "percent"):
            assert np.array_equal(getattr(x, name), getattr(y, name))
        assert np.array_equal(plain_features(x), plain_features(y))
        assert np.all(np.isfinite(plain_features(x)))
        rule_file = tmp_path / "up.toml"
        rule_file.write_text(UP)
        around = later[end - WINDOW + 1 : end + 6]
        assert label_ahead(read_question(rule_file), around, found.spec, WINDOW) == 0


def test_a_stride_asks_about_as_often_as_wanted(tape: Path) -> None:
    assert history(tape, 209).stride == 1
    few = history(tape, 50)
    assert few.stride == 5
    assert len(few.ends) == 42


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few labels are enough: a model is asked one by one."""
    for module in ("calibrate", "walk_forward"):
        monkeypatch.setattr(f"training.{module}.LEAST_LABELS", 8)
        monkeypatch.setattr(f"training.{module}.LEAST_OF_A_CHOICE", 1)
    monkeypatch.setattr("training.ahead_card.LEAST_BLOCKS", 2)


def arguments(tmp_path: Path, tape: Path, *more: object, question: str = UP) -> list[str]:
    (tmp_path / "own.toml").write_text(question)
    model = embedded_directory(tmp_path)
    given = ["--model", model, "--question", tmp_path / "own.toml", "--window", WINDOW, "--lines", "decimal"]
    given += ["--placement", "terse", "--tape", tape, "--format", "btc_perp_bars", *more]
    return [str(word) for word in given]


def words(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.usefixtures("few")
def test_evaluate_shows_a_card_that_says_no_skill(tmp_path: Path, tape: Path) -> None:
    """A model of random weights on a random walk."""
    out = tmp_path / "card.json"
    given = arguments(tmp_path, tape, "--labels", 80, "--folds", 2, "--embargo", 4, "--json", out)
    result = CliRunner().invoke(evaluate, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "up: no skill" in result.output
    assert "by fold" in result.output
    report = msgspec.json.decode(out.read_bytes(), type=AheadReport)
    ((scores,),) = report.settings.values()
    assert (scores.verdict, scores.horizon, scores.embargo, len(scores.by_fold)) == (NO_SKILL, 5, 4, 2)
    assert scores.by_fold[0].end < scores.by_fold[1].begin
    assert sum(fold.labels for fold in scores.by_fold) == scores.labels


@pytest.mark.usefixtures("few")
def test_calibrate_fits_on_the_past_and_says_until_when(tmp_path: Path, tape: Path) -> None:
    """Bars behind the time change nothing of the file."""
    written = []
    until = "2022-01-01T02:20:00Z"
    for rows in (None, 145):
        cut = tmp_path / f"cut{rows}.csv"
        cut.write_text("\n".join(tape.read_text().splitlines()[:rows]) + "\n")
        out = tmp_path / f"{rows}.json"
        given = arguments(tmp_path, cut, "--labels", 40, "--out", out, "--until", until)
        result = CliRunner().invoke(calibrate, given, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert f"of labels known at {until}: an answer before it" in " ".join(result.output.split())
        written.append(msgspec.json.decode(out.read_bytes(), type=Calibration).questions)
    (fitted,) = written[0]
    assert fitted.fitted_until == until
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("question", "more", "message"),
    [
        (UP, ["--tape", "generated"], "what comes next of a generated tape means nothing"),
        (UP.replace("horizon = 5\n", ""), [], "looks ahead: it needs a horizon"),
        (UP.replace("> close", "> 2 * close"), [], "up: YES is right at none of"),
        (UP, ["--labels", "40"], "are too few to calibrate on"),
        (UP.replace("horizon = 5", "horizon = 900"), [], "is right at none of 0 bars"),
        (UP.replace("last(future.close) >", "last(future.close)[2] >"), [], "reads the past"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    tmp_path: Path, tape: Path, question: str, more: list[str], message: str
) -> None:
    given = arguments(tmp_path, tape, *more, question=question)
    result = CliRunner().invoke(evaluate, given)
    assert result.exit_code == 1, result.output
    assert message in words(result)


BY_HAND = 'name = "mine"\ntext = "Would I buy here?"\nlabels = "mine.csv"\n'


def labels_file(folder: Path, tape: Path, every: int = 2) -> dict[int, int]:
    """A desk's judgement of each ``every``-th bar, with and without a whole window, by the bar's number."""
    (symbol, *_) = sorted(Recorded(tape, "btc_perp_bars").symbols())
    rows = tape.read_text().splitlines()[1:]
    given = {bar: bar // every % 3 > 0 for bar in range(0, len(rows), every)}
    stamps = {bar: rows[bar].split(",")[0].replace(" ", "T") + "Z" for bar in given}
    lines = [f"{stamps[bar]},{symbol},{('YES', 'NO')[no]}" for bar, no in given.items()]
    (folder / "mine.csv").write_text("\n".join(["time,symbol,answer", *lines]) + "\n")
    return {bar: int(no) for bar, no in given.items()}


def test_labels_by_hand_are_asked_where_they_are(tmp_path: Path, tape: Path) -> None:
    given = {bar: label for bar, label in labels_file(tmp_path, tape).items() if bar >= WINDOW - 1}
    (tmp_path / "mine.toml").write_text(BY_HAND)
    rule = read_labelled(tmp_path / "mine.toml", WINDOW, Recorded(tape, "btc_perp_bars"))
    found = history(tape, 50).labelled([rule], 1_000)
    assert dict(zip(found.ends.tolist(), found.labels(rule).tolist(), strict=True)) == given
    some = history(tape).labelled([rule], 30)
    assert some.ends.tolist() == list(given)[:: some.stride]
    assert len(some.ends) <= 30 < 2 * len(some.ends)


@pytest.mark.usefixtures("few")
def test_any_model_is_calibrated_and_scored_on_labels_by_hand(tmp_path: Path, tape: Path) -> None:
    labels_file(tmp_path, tape)
    out = tmp_path / "c.json"
    given = arguments(tmp_path, tape, "--labels", 60, question=BY_HAND)
    result = CliRunner().invoke(calibrate, [*given, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    fitted = msgspec.json.decode(out.read_bytes(), type=Calibration).find("mine", ("YES", "NO"))
    assert fitted is not None
    assert fitted.fitted_until
    result = CliRunner().invoke(evaluate, [*given, "--folds", "2"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "mine: no skill" in result.output


def test_labels_by_hand_need_their_tape(tmp_path: Path, tape: Path) -> None:
    labels_file(tmp_path, tape)
    given = arguments(tmp_path, tape, "--tape", "generated", question=BY_HAND)
    result = CliRunner().invoke(evaluate, given)
    assert result.exit_code == 1
    assert "its labels are of a recorded file: give --tape and --format" in words(result)


def test_questions_with_a_horizon_and_without_go_apart(tmp_path: Path, tape: Path) -> None:
    (tmp_path / "past.toml").write_text('name = "past"\ntext = "Up?"\nrule = "close > open"\n')
    given = [*arguments(tmp_path, tape), "--question", str(tmp_path / "past.toml")]
    result = CliRunner().invoke(evaluate, given)
    assert result.exit_code == 1
    assert "go in two runs" in words(result)


@pytest.mark.parametrize(
    ("until", "message"), [("soon", "--until"), ("2001-01-01T00:00:00Z", "right at none")]
)
def test_a_time_of_no_use_is_refused(tmp_path: Path, tape: Path, until: str, message: str) -> None:
    given = arguments(tmp_path, tape, "--out", tmp_path / "c.json", "--until", until)
    result = CliRunner().invoke(calibrate, given)
    assert result.exit_code in (1, 2), result.output
    assert message in words(result)
