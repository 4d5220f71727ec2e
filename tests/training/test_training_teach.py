"""`foretick teach`: training runs what the engine runs; labels, refusals, equal packs for equal seeds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from engine.engine import Engine
from engine.model.adapted import adapted
from engine.model.loading import load_model
from engine.model.question_pack import PackHead, QuestionPack, digest_of, read_pack
from engine.model.revision import revision_of
from engine.model.terse import TAPE_MODEL
from engine.step import Chunk
from regions.tape import Retention
from tapes.generate import TRAINING
from tapes.question_file import QuestionError, check_labels
from tapes.rules import RULES, UNDEFINED
from tests.kit.tolerance import apart, largest, rounding
from tests.training.test_training_ahead import bars_file
from training.batches import Vocabulary
from training.export import export, tape_model
from training.model import Shape, TapeModel, initialise_numbers
from training.question_model import QuestionModel, read_tapes
from training.sources import Generated, Recorded
from training.taught_question import bars_shown, read_taught, with_labels
from training.teach import Balance, Plan, Teacher, closest, drawn_cuts
from training.teach_card import refusal
from training.teach_cli import teach

RULE = 'name = "up8"\ntext = "Is the close above the close eight bars before?"\nrule = "close > close[8]"\n'


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, vocabulary: Vocabulary) -> Path:
    """A random model directory of two layers."""
    directory = tmp_path_factory.mktemp("tiny")
    model = TapeModel(Shape(hidden=32, layers=2, heads=2, inner=48), seed=3)
    initialise_numbers(model, vocabulary.numbers, 3)
    export(model, directory, torch.float32)
    return directory


def question_of(folder: Path, text: str) -> Path:
    (folder / "q.toml").write_text(text)
    return folder / "q.toml"


def shaken(base: TapeModel, tokens: int = 1) -> QuestionModel:
    """A question whose every change is random."""
    model = QuestionModel(base, (20, 21, 22), 5, tokens=tokens, rank=2, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in model.b.values():
            each += 0.3 * torch.randn(each.shape, generator=generator)
    return model


@pytest.mark.parametrize(("tokens", "window"), [(1, 16), (1, 6), (3, 6)])
def test_the_forward_in_training_is_the_engine_s(
    tiny: Path, vocabulary: Vocabulary, tokens: int, window: int
) -> None:
    """Behind each bar of a tape that a session reads bar by bar, also when bars were evicted."""
    bars = 14
    base = tape_model(tiny)
    model = shaken(base, tokens)
    drawn = next(Generated(3, TRAINING).batches(vocabulary, bars, window))
    cuts = np.tile(np.arange(bars), (len(drawn.name), 1))
    with torch.no_grad():
        found = model(read_tapes(base, vocabulary, drawn, window), cuts)[0][0]
    tensors = model.tensors()
    loaded = load_model(tiny, layers="compiled")
    head = PackHead(
        name="q", text="?", choices=("YES", "NO"), none="NONE", answers=(20, 21, 22), base=revision_of(tiny),
        lines="compact", window_bars=window, question={}, calibrations=(), card={}, digest=digest_of(tensors),
    )  # fmt: skip
    engine = Engine(loaded, blocks=64, block_size=8)
    first = engine.install(adapted(loaded, tiny, QuestionPack(head, tensors)))
    tape = engine.open_tape("t", [vocabulary.bos, *drawn.header[0].tolist()], Retention(6 * window, window))
    x = drawn.levels
    for bar in range(bars):
        fields = [int(each[0, bar]) for each in (x.open, x.high, x.low, x.close, x.volume)]
        engine.append(tape, [[*vocabulary.numbers[fields].tolist(), vocabulary.newline]])
        fork = tape.fork()
        assert fork.acquire(tokens)
        asked = Chunk(fork, range(first, first + tokens))
        expected = engine.logits([asked], [tokens - 1])[0, [20, 21, 22]]
        fork.release()
        # both are rounded
        assert apart(found[bar], expected) <= 2 * rounding(largest(expected), width=96, depth=2)


def test_training_changes_the_question_and_never_the_model(
    tiny: Path, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    base = tape_model(tiny)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    rule = read_taught(question_of(tmp_path, RULE), 64).rule
    model = QuestionModel(base, (20, 21, 22), 5, tokens=1, rank=4, seed=0)
    plan = Plan(steps=30, cuts=16, fresh=2, kept=4, warm=2)
    teacher = Teacher(plan, model, base, rule, [(Generated(9, TRAINING), 1.0)], vocabulary, 16)
    losses = [each.loss for each in teacher.steps()]
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    assert all(float(each.detach().abs().max()) > 0 for each in model.b.values())


def test_bars_are_drawn_without_repeats_and_by_their_odds() -> None:
    rng, odds = np.random.default_rng(0), np.tile(np.array([0.0, 1.0, 1.0, 8.0, 0.0, 1.0]), (500, 1))
    cuts = drawn_cuts(rng, odds, 2)
    assert (np.diff(cuts, axis=1) > 0).all()
    share = np.bincount(cuts.ravel(), minlength=6) / len(cuts)
    assert share[0] == share[4] == 0
    assert share[3] > 0.9
    assert drawn_cuts(rng, odds, 9).tolist() == [[0, 1, 2, 3, 4, 5]] * 500


@pytest.mark.parametrize("rare", [0.5, 0.2, 0.06])
def test_every_answer_has_the_same_say_however_rare_it_is(rare: float) -> None:
    """Of 64 bars 16 are asked: an answer of which there are fewer than its share weighs more."""
    rng, balance = np.random.default_rng(0), Balance.of(2)
    said = np.zeros(3)
    for step in range(400):
        answers = rng.choice(3, (8, 64), p=(rare, 0.9 - rare, 0.1))
        asked = np.take_along_axis(answers, drawn_cuts(rng, balance.odds(answers.ravel())[answers], 16), 1)
        weights = balance.weights(asked.ravel())
        if step >= 100:
            said += np.bincount(asked.ravel(), minlength=3) * weights
    assert said / said.sum() == pytest.approx(balance.wanted, abs=0.02)


def test_teaching_begins_with_the_question_that_says_most(vocabulary: Vocabulary, tmp_path: Path) -> None:
    levels = next(Generated(4, TRAINING).batches(vocabulary, 128, 64)).levels
    for text, expected in (
        ("close > close[9]", "trend"),
        ("volume > 2.5 * mean(volume, 20)[1]", "volume_spike"),
    ):
        file = question_of(tmp_path, f'name = "q"\ntext = "?"\nrule = "{text}"\n')
        assert RULES[closest(read_taught(file, 64).rule, levels)].name == expected


def run(*arguments: object) -> Result:
    return CliRunner().invoke(teach, [str(each) for each in arguments])


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("close > close[-1]", "looks ahead"),
        ("future.close > close", "looks ahead|is a value for each bar to come"),
        ("close / (close - close) > 1", "is defined at none of"),
        ("close < 0", "YES is right at none of"),
        ("close > 0", "NO is right at none of"),
        ("close > highest(high, 90)[1]", "its rule reads 91 bars, and the tape model is shown 64"),
        ("close > volume", "mixes a price and a volume"),
        ("time > '09:30'", "reads the time of day"),
        ("close >", "cannot be read"),
    ],
)
def test_a_rule_that_cannot_be_taught_is_refused_before_training(tmp_path: Path, rule: str, why: str) -> None:
    file = question_of(tmp_path, f'name = "q"\ntext = "Is it?"\nrule = "{rule}"\n')
    result = run(file)
    assert result.exit_code == 1
    assert any(each in said(result) for each in why.split("|")), result.output
    assert [each.name for each in tmp_path.iterdir()] == ["q.toml"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('name = "q"\ntext = "?"\n', "it needs one of rule, labeller and labels, and has none"),
        ('name = "q"\ntext = "?"\nrule = "close > open"\nlabels = "x.csv"\n', "it needs one of"),
        ('name = "q"\ntext = "?"\nlabels = "x.csv"\n', "give --tape and --format"),
        ('name = "q"\ntext = "?"\nlabeller = "x.py:f"\n', "x.py:f cannot be loaded"),
        ('name = "q"\ntext = "?"\nlabeller = "x.py"\n', "labeller is FILE.py:FUNCTION"),
        ('name = "q"\ntext = "?"\nchoices = ["YES", ""]\nlabeller = "x.py:f"\n', "and none empty"),
        (
            'name = "q"\ntext = "?"\nrule = "close > open"\nchoices = ["TALL", "TINY"]\n',
            "begin with the same token",
        ),
        ('name = "q"\ntext = "?"\nhorizon = 3\nrule = "last(future.close) > close"\n', "it looks ahead"),
    ],
)
def test_a_question_without_answers_is_refused(tmp_path: Path, text: str, why: str) -> None:
    result = run(question_of(tmp_path, text))
    assert result.exit_code == 1
    assert why in said(result)


# Python labellers.


def labelled(folder: Path, body: str) -> Path:
    source = f"import numpy as np\n\n\ndef label(bars):\n    close = bars['close']\n    {body}\n"
    (folder / "own.py").write_text(source)
    return question_of(folder, 'name = "q"\ntext = "?"\nlabeller = "own.py:label"\n')


def test_a_python_labeller_gets_prices_and_gives_labels(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """The same labels as the rule of the same words."""
    body = "return np.where(np.arange(close.shape[1]) < 8, -1, (close <= np.roll(close, 8, 1)).astype(int))"
    mine = read_taught(labelled(tmp_path, body), 64).rule
    levels = next(Generated(4, TRAINING).batches(vocabulary, 128, 64)).levels
    theirs = read_taught(question_of(tmp_path, RULE), 64).rule
    assert (mine.label(levels).value == theirs.label(levels).value).all()
    check_labels(mine, [levels])
    assert set(bars_shown(levels)) == {"open", "high", "low", "close", "volume"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return (close < np.roll(close, -1, 1)).astype(int)", "looks ahead"),
        ("return (close > close.mean(1, keepdims=True)).astype(int)", "looks ahead"),
        ("return (close > close.mean()).astype(int)", "reads other tapes"),
        ("return (close > close[:, :1]).astype(int)", "reads more than 64 bars"),
        ("return close", "must return whole numbers"),
        ("return np.zeros(3, int)", "must return whole numbers"),
        ("return np.full(close.shape, 2)", "returned 2 to 2"),
        ("raise KeyError('x')", "own.py:label failed: KeyError"),
    ],
)
def test_a_python_labeller_that_breaks_the_rules_is_refused(
    vocabulary: Vocabulary, tmp_path: Path, body: str, why: str
) -> None:
    rule = read_taught(labelled(tmp_path, body), 64).rule
    levels = next(Generated(4, TRAINING).batches(vocabulary, 128, 64)).levels
    with pytest.raises(QuestionError, match=why):
        rule.label(levels)


# Files of labels.


def labels_file(folder: Path, *rows: str, head: str = "time,symbol,answer") -> Path:
    (folder / "own.csv").write_text("\n".join([head, *rows]) + "\n")
    return question_of(folder, 'name = "q"\ntext = "?"\nlabels = "own.csv"\n')


def stamp(bar: int) -> str:
    return f"2022-01-01T{bar // 60:02d}:{bar % 60:02d}:00Z"


def test_labels_stand_at_the_bars_that_they_are_of(tmp_path: Path, vocabulary: Vocabulary) -> None:
    source = Recorded(bars_file(tmp_path / "bars.csv"), "btc_perp_bars")
    (symbol, *_) = sorted(source.symbols())
    given = {40: "YES", 41: "NO", 77: "NO", 100: "YES"}
    file = labels_file(tmp_path, *(f"{stamp(bar)},{symbol},{answer}" for bar, answer in given.items()))
    whole = source.stretch()
    rule = with_labels(read_taught(file, 64), whole.everything, source.symbols()).rule
    seen: dict[int, int] = {}
    first = int(whole.everything["ts_last_event"][0])
    for drawn in whole.batches(vocabulary, 64, 64):
        value = rule.label(drawn.levels).value
        assert drawn.levels.at is not None
        for tape, bar in zip(*np.nonzero(value != UNDEFINED), strict=True):
            seen[(int(drawn.levels.at[tape, bar]) - first) // (60 * 10**9)] = int(value[tape, bar])
    assert seen == {bar: ("YES", "NO").index(answer) for bar, answer in given.items()}


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (["{1},{s},YES", "{0},{s},NO"], "own.csv, line 3: .* is not after the line before it"),
        (["{1},{s},YES", "{1},{s},NO"], "own.csv, line 3: .* is not after the line before it"),
        (["2021-01-01T00:00:00Z,{s},YES"], "line 2: the tape has no bar that opened at 2021-01-01"),
        (["{1},OTHER,YES"], "line 2: the tape has no bar of OTHER, but of BTCUSD, PERP:BTCUSD"),
        (["{1},{s},MAYBE"], "line 2: 'MAYBE' is no choice; there are: YES, NO"),
        (["{1},{s}"], "line 2: it has 2 columns instead of 3"),
        (["noon,{s},YES"], "line 2: expected a time with a zone"),
        ([], "has no label"),
    ],
)
def test_labels_that_are_of_no_bar_or_out_of_order_are_refused(
    tmp_path: Path, rows: list[str], why: str
) -> None:
    source = Recorded(bars_file(tmp_path / "bars.csv"), "btc_perp_bars")
    (symbol, *_) = sorted(source.symbols())
    file = labels_file(tmp_path, *(each.format(stamp(0), stamp(1), s=symbol) for each in rows))
    with pytest.raises(QuestionError, match=why):
        with_labels(read_taught(file, 64), source.stretch().everything, source.symbols())


def test_a_labels_file_with_another_head_is_refused(tmp_path: Path) -> None:
    source = Recorded(bars_file(tmp_path / "bars.csv"), "btc_perp_bars")
    file = labels_file(tmp_path, head="when,symbol,answer")
    with pytest.raises(QuestionError, match="must be time,symbol,answer"):
        with_labels(read_taught(file, 64), source.stretch().everything, source.symbols())


# The command.

BREAKOUT = 'name = "breakout19"\ntext = "Is it a breakout?"\nrule = "close > highest(high, 19)[1]"\n'
QUICK = ("--steps", 3, "--labels", 400)


def test_a_question_near_one_of_the_model_s_is_taught_in_seconds_and_again_the_same(tmp_path: Path) -> None:
    """A pack, and a card with all that was measured; equal seeds make equal packs."""
    file = question_of(tmp_path, BREAKOUT)
    packs = []
    for name in ("one", "two"):
        result = run(file, *QUICK, "--out", tmp_path / f"{name}.pack", "--card", tmp_path / f"{name}.md")
        assert result.exit_code == 0, result.output
        packs.append((tmp_path / f"{name}.pack").read_bytes())
    assert packs[0] == packs[1]
    pack, card = read_pack(tmp_path / "one.pack"), (tmp_path / "one.md").read_text()
    assert (pack.head.name, pack.head.base) == ("breakout19", revision_of(TAPE_MODEL))
    assert next(each["choices"] for each in pack.head.calibrations) == ["YES", "NO"]
    assert "**Accepted**" in card
    assert "| 2 or more | " in card
    assert "| generated, fresh | " in card
    assert "| generated, one window later | " in card
    assert f"| revision | {pack.head.revision} |" in card
    result = run(file, *QUICK, "--seed", 1, "--out", tmp_path / "other.pack")
    assert result.exit_code == 0
    assert (tmp_path / "other.pack").read_bytes() != packs[0]


def test_a_pack_that_could_not_be_written_is_not_taught(tmp_path: Path) -> None:
    for option in ("--out", "--card"):
        result = run(question_of(tmp_path, BREAKOUT), *QUICK, option, tmp_path / "nowhere" / "q")
        assert result.exit_code == 1
        assert "q cannot be written" in said(result)
    assert [each.name for each in tmp_path.iterdir()] == ["q.toml"]


def test_what_is_not_learnt_is_refused_with_its_card_and_no_pack(tiny: Path, tmp_path: Path) -> None:
    result = run(question_of(tmp_path, BREAKOUT), *QUICK, "--model", tiny)
    assert result.exit_code == 1
    assert "q.toml is not taught: generated, fresh: its balanced accuracy is" in said(result)
    assert "below the floor of 75%" in said(result)
    assert "**Refused:**" in (tmp_path / "q.md").read_text()
    assert not (tmp_path / "q.pack").exists()


def days_file(path: Path, n: int) -> None:
    """A random walk by the minute."""
    rng, begin = np.random.default_rng(0), datetime(2022, 1, 1, tzinfo=UTC)
    close = 40_000 + np.cumsum(rng.integers(-30, 31, n))
    rows = ["timestamp,open,high,low,close,volume"]
    for i in range(n):
        o, c, at = close[max(i - 1, 0)], close[i], begin + timedelta(minutes=i)
        rows.append(
            f"{at:%Y-%m-%d %H:%M:%S},{o},{max(o, c) + 5},{min(o, c) - 5},{c},{rng.integers(1, 9) * 1000}"
        )
    path.write_text("\n".join(rows) + "\n")


def test_a_tape_of_the_desk_is_split_by_time_and_measured_on_apart(tmp_path: Path) -> None:
    days_file(tmp_path / "bars.csv", 2400)
    own = ("--tape", tmp_path / "bars.csv", "--format", "btc_perp_bars")
    result = run(question_of(tmp_path, BREAKOUT), *QUICK, *own)
    assert "| own tape, fresh | " in result.output
    assert "| tapes | generated, bars.csv |" in result.output
    short = tmp_path / "short.csv"
    bars_file(short, 240)
    result = run(tmp_path / "q.toml", *QUICK, "--tape", short, "--format", "btc_perp_bars")
    assert result.exit_code == 1
    assert "the tape has 240 bars" in said(result)
    assert run(tmp_path / "q.toml", "--tape", short).exit_code == 2


def test_a_model_that_reads_words_cannot_be_taught(tmp_path: Path) -> None:
    result = run(question_of(tmp_path, BREAKOUT), "--model", tmp_path)
    assert result.exit_code == 1
    assert "is no tape model" in said(result)


def test_too_few_labels_decide_nothing() -> None:
    assert refusal({}, 0.75).startswith("there are too few labels")
