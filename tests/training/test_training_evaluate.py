"""Scores against brute force, and what is asked on generated and recorded tapes."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from engine.model.embedded import embedded_directory
from engine.model.revision import revision_of
from engine.model.terse import TAPE_MODEL
from flash.confidence import Calibration
from ingest.compact import CompactSpec
from tapes.generate import generate
from tapes.question_file import read_question
from tapes.real_bars import anchor_of, bars_of, levels_of
from tapes.rules import RULES, UNDEFINED
from tests.kit.tolerance import apart, largest, near, of_float64, rounding
from tests.training.answered import answers
from training.baseline import fitted_guess, shapes, simple_guess
from training.batches import Layout, Vocabulary, pack
from training.cli import calibrate, evaluate
from training.evaluate import Report, balanced_accuracy, by_distance, distance_of, score, wilson
from training.export import export, tape_model
from training.model import Shape, TapeModel
from training.served import Served
from training.sources import Drawn, Generated, Packed, Recorded, Setting, collect, joined
from training.tokenizer import QUESTIONS

EXACT = of_float64(1.0)
SMALL = Shape(hidden=24, layers=2, heads=2, inner=16)
FIELDS = ("open", "high", "low", "close", "volume", "percent")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    export(TapeModel(SMALL), path, torch.float32)
    return path


class TestScores:
    def test_wilson_intervals_of_known_shares(self) -> None:
        """Newcombe (1998), table I: 81 of 263, and none of 20."""
        found = wilson(81, 263)
        assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)
        assert (wilson(0, 20).low, round(wilson(0, 20).high, 4)) == (0.0, 0.1611)

    def test_balanced_accuracy_is_the_mean_over_labels_and_tapes_are_resampled_whole(self) -> None:
        """One tape repeated a hundred times tells no more than that tape."""
        rng = np.random.default_rng(0)
        right, label, tape = rng.random(3000) < 0.8, rng.integers(0, 2, 3000), np.arange(3000)
        found = balanced_accuracy(right, label, tape)
        assert found.share == near(float(np.mean([right[label == k].mean() for k in (0, 1)])), EXACT)
        assert found.low < found.share < found.high
        clustered = balanced_accuracy(right, label, tape // 100)
        repeated = balanced_accuracy(np.repeat(right[:30], 100), np.repeat(label[:30], 100), tape // 100)
        assert clustered.share == found.share
        assert repeated.high - repeated.low > 3 * (found.high - found.low)

    def test_accuracy_by_distance_counts_every_answer_once(self) -> None:
        each = replace(answers(4), margin=np.array([0.05, -0.05, 0.3, -5.0]))
        found = by_distance(distance_of(each), np.array([True, False, True, True]))
        assert [(band.begin, band.end, band.answers, band.accuracy) for band in found] == [
            (0.0, 0.1, 2, 0.5),
            (0.25, 0.5, 1, 1.0),
            (2.0, None, 1, 1.0),
        ]

    def test_a_middle_choice_is_farthest_from_its_boundaries_in_the_middle(self) -> None:
        three = answers(4, choices=("UPPER", "MIDDLE", "LOWER"))
        each = replace(
            three,
            name="range_location",
            margin=np.array([0.5, -0.75, 0.0, -2.0]),
            label=np.array([0, 1, 1, 2]),
        )
        assert distance_of(each).tolist() == [0.5, 0.25, 1.0, 2.0]

    def test_onset_persistence_baselines_and_none_equal_a_loop(self) -> None:
        each = answers(800)
        found = score(each)
        counted: dict[str, list[bool]] = defaultdict(list)
        for i in range(800):
            says_none = bool(each.logits[i].argmax() == 2)
            if each.label[i] == UNDEFINED:
                counted["undefined"].append(says_none)
                continue
            right = bool(each.logits[i, :2].argmax() == each.label[i])
            counted["all"].append(right)
            counted["onset" if each.before[i] != each.label[i] else "persistence"].append(right)
            counted["claimed"].append(says_none)
            counted["simple"].append(bool(each.guess[i] == each.label[i]))
            counted["majority"].append(bool(each.label[i] == 0))
        assert found.undefined == len(counted["undefined"])
        assert found.accuracy.share == near(float(np.mean(counted["all"])), EXACT)
        assert found.onset is not None
        assert found.persistence is not None
        assert found.onset.share == near(float(np.mean(counted["onset"])), EXACT)
        assert found.persistence.share == near(float(np.mean(counted["persistence"])), EXACT)
        assert (found.undefined_found, found.undefined_claimed) == (1.0, 0.0)
        assert found.simple == near(float(np.mean(counted["simple"])), EXACT)
        share = float(np.mean(counted["majority"]))
        assert found.majority == near(max(share, 1 - share), EXACT)


class TestAsking:
    @pytest.mark.parametrize("placement", ["terse", "numbered"])
    @pytest.mark.parametrize("windows", [1, 2])
    def test_labels_are_those_of_the_rules(self, placement: str, windows: int) -> None:
        """Of the tapes that the source draws, at the last bars; every question gets its number."""
        reader, source = Packed(TapeModel(SMALL)), Generated(seed=3)
        setting = Setting("numbered" if placement == "numbered" else "terse", windows, 32)
        found = {each.name: each for each in collect(reader, source, setting, 20)}
        assert list(found) == list(QUESTIONS)
        drawn = {}
        for number, part in enumerate(source.batches(Vocabulary(), 32 * windows, 32)):
            drawn.update({int(name): (part.levels, row) for row, name in enumerate(part.name)})
            if number > 20:
                break
        for rule in RULES:
            own = found[rule.name]
            assert (own.label != UNDEFINED).sum() >= 20
            for name in np.unique(own.tape)[:4]:
                levels, row = drawn[int(name)]
                value = rule.label(levels).value[row, -16:]
                asked = own.label[own.tape == name]
                assert np.array_equal(asked, value[: len(asked)])
                guesses = simple_guess(rule.name, levels)[row, -16:]
                assert np.array_equal(own.guess[own.tape == name], guesses[: len(asked)])

    def test_joined_collections_keep_their_tapes_apart(self) -> None:
        one, other = answers(10, tapes=5), answers(10, seed=1, tapes=5)
        (both,) = joined([[one], [other]])
        assert len(both.label) == 20
        assert len(np.unique(both.tape)) == 10


class TestRecorded:
    @staticmethod
    def bars_file(path: Path, n: int = 120) -> Path:
        rng = np.random.default_rng(0)
        close = 40_000 + np.cumsum(rng.integers(-30, 31, n))
        rows = ["timestamp,open,high,low,close,volume"]
        for i in range(n):
            o, c = (close[i - 1] if i else close[0]), close[i]
            stamp = f"2022-01-01 {i // 60:02d}:{i % 60:02d}:00"
            rows.append(f"{stamp},{o},{max(o, c) + 5},{min(o, c) - 5},{c},{rng.integers(1, 9) * 1000}")
        path.write_text("\n".join(rows) + "\n")
        return path

    def test_windows_of_a_file_are_the_bars_around_an_anchor_of_their_own(self, tmp_path: Path) -> None:
        source, vocabulary = Recorded(self.bars_file(tmp_path / "a.csv"), "btc_perp_bars"), Vocabulary()
        bars, spec = source.bars()
        assert (len(bars), spec.price_decimals) == (120, 0)
        windows = 0
        for drawn in source.batches(vocabulary, 64, 64):
            for row in range(len(drawn.name)):
                text = vocabulary.tokenizer.decode(drawn.header[row])
                words = text.split()
                reference, unit = int(words[1]), int(words[3])
                prices = (drawn.levels.close[row] - 500) * unit + reference
                assert any(np.array_equal(prices * 10**9, bars["c"][at : at + 64]) for at in range(57))
                windows += 1
        assert windows == 4

    def test_windows_of_different_tapes_share_no_bars(self, tmp_path: Path) -> None:
        source, vocabulary = Recorded(self.bars_file(tmp_path / "a.csv", 700), "btc_perp_bars"), Vocabulary()
        bars, _ = source.bars()
        closes = bars["c"] // 10**9
        tapes: dict[int, set[int]] = {}
        for drawn in source.batches(vocabulary, 64, 64):
            for row, name in enumerate(drawn.name.tolist()):
                moves = np.diff(drawn.levels.close[row])
                fits = [at for at in range(637) if np.array_equal(np.diff(closes[at : at + 64]), moves)]
                assert len(fits) == 1
                tapes.setdefault(name, set()).update(range(fits[0], fits[0] + 64))
        assert len(tapes) == 3
        assert sum(map(len, tapes.values())) == len(set.union(*tapes.values())) >= 600

    def test_ticks_become_bars(self, tmp_path: Path) -> None:
        path = tmp_path / "ticks.csv"
        path.write_text(
            "".join(
                f"20200101 17{m:02d}{s:02d}000,1.{1200 + m + s},1.{1202 + m + s},0\n"
                for m in range(3)
                for s in (1, 30)
            )
        )
        bars, spec = Recorded(path, "histdata_quotes").bars()
        assert (len(bars), spec.price_decimals, spec.price_scale) == (3, 4, 9)
        assert [int(bar["c"]) for bar in bars] == [10**5 * (11_200 + m + 30 + 1) for m in range(3)]

    def test_levels_of_bars_are_what_compact_lines_print(self) -> None:
        rows = [(i, p, p + 50, p - 30, p + 20, 10 * (i % 3)) for i, p in enumerate(range(1000, 1400, 10))]
        bars = bars_of((at, *(value * 10**7 for value in values)) for at, *values in rows)
        anchor = anchor_of(bars, CompactSpec(price_decimals=2))
        x = levels_of(bars, anchor)
        assert [anchor.price(level) for level in x.close[0]] == bars["c"].tolist()
        assert (x.volume[0] == 0).tolist() == [i % 3 == 0 for i in range(40)]


class TestCommands:
    def test_evaluate_writes_table_json_and_plots(self, model: Path, tmp_path: Path) -> None:
        options = ["--labels", "30", "--window", "32", "--windows", "1", "--placement", "terse"]
        files = ["--json", str(tmp_path / "found.json"), "--plots", str(tmp_path / "found.png")]
        result = CliRunner().invoke(
            evaluate, ["--model", str(model), *options, *files], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        assert "balanced" in result.output
        report = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Report)
        (scores,) = report.settings.values()
        assert [each.question for each in scores] == list(QUESTIONS)
        assert all(each.accuracy.answers >= 30 for each in scores)
        for kind in ("reliability", "risk-coverage", "distance"):
            assert (tmp_path / f"found-terse-1-{kind}.png").read_bytes().startswith(b"\x89PNG")

    def test_calibrate_writes_what_evaluate_then_uses(self, model: Path, tmp_path: Path) -> None:
        own = tmp_path / "model"
        own.symlink_to(model)
        out = tmp_path / "calibration.json"
        options = ["--model", str(own), "--window", "32", "--labels", "1000", "--max-tapes", "80"]
        result = CliRunner().invoke(calibrate, [*options, "--out", str(out)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        asked = ["--windows", "1", "--placement", "terse", "--json", str(tmp_path / "found.json")]
        small = ["--model", str(own), "--window", "32", "--labels", "30", "--calibration", str(out)]
        result = CliRunner().invoke(evaluate, [*small, *asked], catch_exceptions=False)
        report = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Report)
        (scores,) = report.settings.values()
        by_name = {each.question: each for each in scores}
        assert by_name["trend"].calibrated is not None
        assert by_name["trend"].sets is not None

    def test_a_calibration_of_another_model_is_refused(self, model: Path, tmp_path: Path) -> None:
        out = tmp_path / "calibration.json"
        out.write_text('{"model": "ffff", "lines": "compact", "data": {}, "questions": []}')
        result = CliRunner().invoke(evaluate, ["--model", str(model), "--calibration", str(out)])
        assert result.exit_code == 1
        assert "was fitted for model ffff" in result.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--tape", "nowhere.csv"], "there is no such file"),
            (["--tape", __file__], "--tape FILE needs --format"),
        ],
    )
    def test_unusable_tapes_are_refused(self, model: Path, arguments: list[str], message: str) -> None:
        result = CliRunner().invoke(evaluate, ["--model", str(model), *arguments])
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())

    def test_a_directory_without_a_model_is_refused(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(evaluate, ["--model", str(tmp_path)])
        assert result.exit_code == 1
        assert "is no model: it has no config.json" in result.output


@pytest.mark.parametrize("placement", ["terse", "numbered"])
def test_a_model_read_prompt_by_prompt_answers_as_the_packed_one(model: Path, placement: str) -> None:
    """The tape model both ways, in a fresh window; numbered questions stand in the same order."""
    setting = Setting("numbered" if placement == "numbered" else "terse", 1, 32)
    drawn = next(Generated(seed=4).batches(Vocabulary(), 32, 32))
    two = Drawn(
        replace(drawn.levels, **{name: getattr(drawn.levels, name)[:2] for name in FIELDS}),
        drawn.header[:2],
        drawn.name[:2],
    )
    wanted, cuts = np.arange(len(QUESTIONS)), np.array([25, 31])
    served = Served.load(model)
    loaded = tape_model(model)
    by_question = {
        part.question: part for part in served.read(two, setting, cuts, wanted, np.random.default_rng(0))
    }
    layout = Layout(32, 32, 2, 2, 0, placement == "numbered")
    order = np.tile(wanted, (2, 1))
    batch = pack(np.random.default_rng(0), Vocabulary(), layout, two.levels, two.header, cuts, order)
    with torch.no_grad():
        logits = loaded(batch)[0]
    vocabulary = Vocabulary()
    for question, rule in enumerate(RULES):
        part = by_question[question]
        ids = [*vocabulary.choices[question][: len(rule.choices)], vocabulary.none]
        tape, query = np.nonzero(batch.queries.kind == question)
        packed = torch.from_numpy(
            np.array([logits[t, q, ids].tolist() for t, q in zip(tape, query, strict=True)])
        )
        order_of = np.lexsort((part.bar, part.tape))
        theirs = torch.from_numpy(part.chosen[order_of])
        bound = rounding(largest(logits), width=SMALL.hidden, depth=SMALL.layers)
        assert apart(packed, theirs) <= bound


def test_any_other_model_can_be_evaluated(tmp_path: Path) -> None:
    """With a tokenizer of words that knows nothing of tapes."""
    path = embedded_directory(tmp_path)
    options = [
        "--labels",
        "2",
        "--max-tapes",
        "8",
        "--window",
        "32",
        "--windows",
        "1",
        "--placement",
        "terse",
    ]
    result = CliRunner().invoke(
        evaluate,
        ["--model", str(path), *options, "--json", str(tmp_path / "found.json")],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Report)
    (scores,) = report.settings.values()
    assert len(scores) == len(QUESTIONS)


def test_a_model_is_evaluated_with_kv_of_another_type(tmp_path: Path) -> None:
    """As another model; a calibration of it needs a place of its own."""
    path, found = TAPE_MODEL, tmp_path / "found.json"
    small = ["--model", str(path), "--kv-dtype", "int8"]
    options = ["--labels", "8", "--max-tapes", "1", "--windows", "1", "--placement", "terse"]
    result = CliRunner().invoke(evaluate, [*small, *options, "--json", str(found)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode(found.read_bytes(), type=Report)
    assert report.revision != revision_of(path)
    (scores,) = report.settings.values()
    assert len(scores) == len(RULES) + 1
    assert all(each.calibrated is None for each in scores)
    refused = CliRunner().invoke(calibrate, small)
    assert refused.exit_code == 2
    assert "--out is needed with --weights or --kv-dtype" in refused.output


def test_a_model_that_reads_one_kind_of_lines_is_asked_on_no_other(model: Path) -> None:
    result = CliRunner().invoke(evaluate, ["--model", str(model), "--lines", "decimal", "--labels", "1"])
    assert result.exit_code == 1
    assert "reads compact lines only" in result.output


TWO = {
    "closes_up": """
name = "closes_up"
text = "Did the last bar close above its open?"
rule = "close > open"
""",
    "place": """
name = "place"
text = "Where in the range of the last ten bars is the close?"
choices = ["TOP", "MIDDLE", "BOTTOM"]
rule = ["share > 2 / 3", "share > 1 / 3"]
where = "top > bottom"
[define]
top = "highest(high, 10)"
bottom = "lowest(low, 10)"
share = "(close - bottom) / (top - bottom)"
""",
}
TEXT = "Did the last bar close above its open?"


@pytest.fixture
def own_questions(tmp_path: Path) -> list[str]:
    options = []
    for name, text in TWO.items():
        (tmp_path / f"{name}.toml").write_text(text)
        options += ["--question", str(tmp_path / f"{name}.toml")]
    return options


def test_own_questions_are_calibrated_and_scored_with_any_model(
    tmp_path: Path, own_questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of random weights: its answers are no better than chance. Few labels: asked one by one."""
    monkeypatch.setattr("training.calibrate.LEAST_LABELS", 8)
    monkeypatch.setattr("training.calibrate.LEAST_OF_A_CHOICE", 1)
    path = embedded_directory(tmp_path)
    small = ["--model", str(path), *own_questions, "--placement", "terse", "--window", "32"]
    enough = ["--labels", "40", "--max-tapes", "24", "--lines", "decimal"]
    out = tmp_path / "calibration.json"
    result = CliRunner().invoke(calibrate, [*small, *enough, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    fitted = msgspec.json.decode(out.read_bytes(), type=Calibration)
    assert fitted.lines == "decimal"
    assert fitted.find(TEXT, ("YES", "NO")) is not None
    found = tmp_path / "found.json"
    scored = ["--labels", "30", "--windows", "1", "--lines", "decimal", "--json", str(found)]
    result = CliRunner().invoke(
        evaluate, [*small, *scored, "--calibration", str(out)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode(found.read_bytes(), type=Report)
    (scores,) = report.settings.values()
    by_name = {each.question: each for each in scores}
    assert list(by_name) == list(TWO)
    up = by_name["closes_up"]
    assert up.calibrated is not None
    assert abs(up.balanced.share - 0.5) < 0.3
    kept = len(fitted.questions)
    only = ["--model", str(path), "--question", str(tmp_path / "place.toml"), *small[-4:], *enough]
    result = CliRunner().invoke(calibrate, [*only, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    again = msgspec.json.decode(out.read_bytes(), type=Calibration)
    assert again.find(TEXT, ("YES", "NO")) == fitted.find(TEXT, ("YES", "NO"))
    assert len(again.questions) == kept


def test_the_plain_guess_of_an_own_question_finds_what_the_last_bar_shows(tmp_path: Path) -> None:
    """Fitted on the other half of the tapes; with nothing to fit on it guesses the first choice."""
    (tmp_path / "up.toml").write_text(TWO["closes_up"])
    x = generate(np.random.default_rng(3), 40, 64)
    label = read_question(tmp_path / "up.toml").label(x).value[:, 40:].ravel().astype(np.int64)
    shape, tape = shapes(x)[:, 40:].reshape(len(label), -1), np.repeat(np.arange(40), 24)
    assert (fitted_guess(shape, label, tape) == label).mean() > 0.97
    assert not fitted_guess(shape, np.full_like(label, UNDEFINED), tape).any()


def test_an_own_question_is_not_for_the_tape_model(model: Path, own_questions: list[str]) -> None:
    result = CliRunner().invoke(evaluate, ["--model", str(model), *own_questions])
    assert result.exit_code == 1
    assert "closes_up: this model" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("close > open", "close > volume"), "mixes a price and a volume"),
        (("close > open", "close[-2] > open"), "looks ahead"),
        (("close > open", "close > close"), "YES is right at none of"),
        (("close > open", "close / (close - close) > 1"), "its rule is defined at none of"),
        (("close > open", "close[40] > open"), "reads 41 bars, but 32 are shown"),
        (("close > open", "time > '09:40'"), "its rule reads the time of day, and compact lines have none"),
        (("rule =", "rules ="), "is no question"),
        (("rule =", 'choices = ["UP"]\nrule ='), "has 2 to 255 choices"),
        (("rule =", 'choices = ["A", "B", "C"]\nrule ='), "3 choices need 2 rules, not 1"),
        (("name =", "name = ="), "is no question"),
    ],
)
def test_questions_that_cannot_be_are_refused_before_a_model_is_asked(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path, file = embedded_directory(tmp_path), tmp_path / "own.toml"
    file.write_text(TWO["closes_up"].replace(*change))
    options = ["--model", str(path), "--question", str(file), "--window", "32", "--lines", "compact"]
    result = CliRunner().invoke(evaluate, options)
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.output.split())


def test_two_questions_of_one_name_are_refused(tmp_path: Path, own_questions: list[str]) -> None:
    path = embedded_directory(tmp_path)
    result = CliRunner().invoke(evaluate, ["--model", str(path), *own_questions, *own_questions[:2]])
    assert result.exit_code == 1
    assert "two questions have one name" in result.output


def test_a_choice_of_a_multiple_question_is_the_first_whose_rule_holds(tmp_path: Path) -> None:
    """As plain words say it, with the distance to the nearer boundary."""
    (tmp_path / "place.toml").write_text(TWO["place"])
    rule = read_question(tmp_path / "place.toml")
    x = next(Generated(seed=5).batches(Vocabulary(), 64, 64)).levels
    label = rule.label(x)
    assert rule.bars == 10
    assert np.all(label.value[:, :9] == UNDEFINED)
    for tape in range(len(x.close)):
        for bar in range(9, 64):
            top, bottom = (
                int(x.high[tape, bar - 9 : bar + 1].max()),
                int(x.low[tape, bar - 9 : bar + 1].min()),
            )
            if top == bottom:
                assert label.value[tape, bar] == UNDEFINED
                continue
            share = (int(x.close[tape, bar]) - bottom) / (top - bottom)
            assert label.value[tape, bar] == (0 if share > 2 / 3 else 1 if share > 1 / 3 else 2)
            nearest = share - 2 / 3 if share > 2 / 3 else min(abs(share - 2 / 3), abs(share - 1 / 3))
            assert abs(label.margin[tape, bar]) == pytest.approx(abs(nearest))
