"""A calibrated model through the daemon: probability, choice set and abstention of every answer."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from math import exp
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from msgspec.structs import replace

from daemon.api.messages import Ask, AskReply, QueryError
from daemon.config.schema import FlashConfig, ModelConfig, ProcessConfig, QuestionConfig
from daemon.engine.confidence_metrics import calibration_of
from engine.model.revision import CALIBRATION, revision_of
from feeds.connector import SettingError
from feeds.durations import Duration
from feeds.market_data import Answer
from flash.confidence import AdaptiveCoverage, Calibration, QuestionCalibration, write_calibration
from flash.question import PAPER_SIX
from metrics.catalogue import LABEL_OUTCOMES
from tests.kit import SECOND, START, inproc_config, sessions, tolerance, trade, until
from tests.kit.daemon import invoke
from tests.kit.inproc import RunningDaemon, running
from tests.kit.models import terse_directory

OTHER: dict[str | None, str] = {"UP": "DOWN", "DOWN": "UP"}
TEMPERATURE, COVERAGE, ABSTAIN_BELOW = 2.0, 0.6, 0.52
FITTED = QuestionCalibration(
    name="trend",
    text="Is the last close above or below the close ten bars before it?",
    choices=["UP", "DOWN"],
    temperature=TEMPERATURE,
    scores=[0.2, 0.48, 0.49, 0.9],
    labels=4,
    mean_gap=0.5,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return terse_directory(tmp_path / "model")


def write(
    path: Path, revision: str, lines: str = "compact", also: Iterable[QuestionCalibration] = ()
) -> None:
    write_calibration(path, Calibration(model=revision, lines=lines, data={}, questions=[FITTED, *also]))


async def feed(daemon: RunningDaemon, seconds: Iterable[int]) -> None:
    """A trade in each second; the six answers to each bar that it closes."""
    for n in seconds:
        price = 100 + (n * n) % 7 / 10
        daemon.put(trade("V:AAA", START + n * SECOND, f"{price:.2f}"))
        await until(lambda n=n: len(daemon.answers()) == 6 * n)


def trends(daemon: RunningDaemon) -> list[Answer]:
    return [answer for answer in daemon.answers() if answer.question == "trend"]


async def test_answers_carry_what_the_calibration_says_of_their_logits(directory: Path) -> None:
    """The file lies in the model's directory; questions that it does not list stay as they were."""
    write(directory / CALIBRATION, revision_of(directory))
    model = ModelConfig(path=str(directory), coverage=COVERAGE, abstain_below=ABSTAIN_BELOW)
    config = inproc_config(sessions=sessions("V:AAA"), model=model, standing="paper_six")
    async with running(config) as daemon:
        await feed(daemon, range(31))
        trend = trends(daemon)
        sizes = {
            size: daemon.count("choice_sets", session="aaa", size=size)
            for size in ("empty", "one", "several")
        }
    others = [answer for answer in daemon.answers() if answer.question != "trend"]
    assert all(answer.probability is None and answer.choice_set is None for answer in others)
    assert {answer.uncalibrated for answer in others} == {"not_calibrated", "free_text"}
    assert {answer.uncalibrated for answer in trend} == {None}
    assert not any("abstained" in answer.flags for answer in others)
    assert len(trend) == 30
    for answer in trend:
        expected = 1 / (1 + exp(-answer.logit_gap / TEMPERATURE))
        assert answer.probability == tolerance.near(expected, tolerance.of_float64(1.0))
        other = OTHER[answer.choice]
        # of four scores the third smallest: coverage of 0.6 allows a score of 0.49
        allowed = [(1 - expected, answer.choice), (expected, other)]
        assert answer.choice_set == tuple(choice for score, choice in allowed if score <= 0.49)
        assert ("abstained" in answer.flags) is (answer.probability < ABSTAIN_BELOW)
    assert sum(sizes.values()) == 30
    assert sizes["one"] == sum(len(answer.choice_set or ()) == 1 for answer in trend)


async def test_a_question_asked_by_number_is_judged_by_what_was_fitted_so(directory: Path) -> None:
    """In frozen placement; asks bring the question itself."""
    numbered = replace(FITTED, temperature=4.0, numbered=True)
    write(directory / CALIBRATION, revision_of(directory), also=[numbered])
    config = inproc_config(
        sessions=sessions("V:AAA"),
        model=ModelConfig(path=str(directory)),
        standing="paper_six",
        flash=FlashConfig(placement="frozen"),
    )
    async with running(config) as daemon:
        await feed(daemon, range(4))
        asked = await daemon.ask_engine(Ask(1, "aaa", "trend"))
    trend = trends(daemon)
    assert len(trend) == 3
    found = [(answer, numbered) for answer in trend] + [(asked, FITTED)]
    for answer, fitted in found:
        expected = 1 / (1 + exp(-answer.logit_gap / fitted.temperature))
        assert answer.probability == tolerance.near(expected, tolerance.of_float64(1.0))


async def test_asks_are_judged_as_standing_answers_are(directory: Path) -> None:
    """From the cache and computed; those of other choices or without choices are not."""
    write(directory / CALIBRATION, revision_of(directory))
    model = ModelConfig(path=str(directory), coverage=COVERAGE, abstain_below=0.99)
    config = inproc_config(sessions=sessions("V:AAA"), model=model, standing="paper_six")
    async with running(config) as daemon:
        await feed(daemon, range(4))
        counted = daemon.count("choice_sets", session="aaa", size="one")
        standing = daemon.state().answers[PAPER_SIX[0].hash].answer
        cached = await daemon.call("ask", "aaa", PAPER_SIX[0].text, 1, ("UP", "DOWN"))
        computed = await daemon.ask_engine(Ask(1, "aaa", "trend"))
        others = [
            await daemon.call("ask", "aaa", "trend", 1, ("DOWN", "UP")),
            await daemon.call("ask", "aaa", "pullback", 1, ("YES", "NO")),
            await daemon.call("ask", "aaa", "exact_value", 4),
        ]
        assert daemon.count("choice_sets", session="aaa", size="one") == counted
    assert (cached.cached, computed.cached) == (True, False)
    assert (cached.probability, cached.choice_set) == (standing.probability, standing.choice_set)
    expected = 1 / (1 + exp(-computed.logit_gap / TEMPERATURE))
    assert computed.probability == tolerance.near(expected, tolerance.of_float64(1.0))
    assert computed.choice_set == FITTED.choice_set(judged(computed), COVERAGE)
    assert "abstained" in cached.flags
    assert "abstained" in computed.flags
    assert all(each.probability is None and each.choice_set is None for each in others)
    assert [each.uncalibrated for each in others] == ["not_calibrated", "not_calibrated", "free_text"]
    assert (cached.uncalibrated, computed.uncalibrated) == (None, None)
    assert not any("abstained" in each.flags for each in others)


def judged(answer: Answer | AskReply) -> list[float]:
    """Logits with the answer's gap."""
    return [answer.logit_gap, 0.0] if answer.choice == "UP" else [0.0, answer.logit_gap]


@pytest.mark.parametrize("mode", ["inproc", "two"])
async def test_labels_that_come_later_adapt_the_coverage_of_their_question(
    directory: Path, mode: Literal["inproc", "two"]
) -> None:
    """Against `AdaptiveCoverage` alone; what is of no use is refused, counted, and changes nothing."""
    write(directory / CALIBRATION, revision_of(directory))
    model = ModelConfig(path=str(directory), coverage=COVERAGE)
    process = ProcessConfig(mode=mode, drain=Duration(5 * SECOND))
    config = inproc_config(sessions=sessions("V:AAA"), model=model, standing="paper_six", process=process)
    async with running(config) as daemon:
        await feed(daemon, range(11))
        trend = trends(daemon)
        state, in_set = AdaptiveCoverage.of(COVERAGE), 0
        for answer in trend[:1:-1]:  # in any order
            told = answer.choice if answer.data_version > 7 else OTHER[answer.choice]
            reply = await daemon.call("label", "aaa", "trend", answer.data_version, told)
            state = state.after(told in FITTED.choice_set(judged(answer), state.asked))
            covered = told in (answer.choice_set or ())
            in_set += covered
            assert (reply.question, reply.data_version) == ("trend", answer.data_version)
            assert (reply.right, reply.covered) == (answer.choice == told, covered)
            assert reply.coverage == state.asked
        told = OTHER[trend[1].choice]
        typed = ["label", "aaa", "trend", "2", told, "--endpoint", daemon.endpoint]
        state = state.after(told in FITTED.choice_set(judged(trend[1]), state.asked))
        in_set += told in (trend[1].choice_set or ())
        done, again = [await asyncio.to_thread(invoke, *typed) for _ in range(2)]
        assert (done.exit_code, again.exit_code) == (0, 1)
        assert done.stdout.startswith(f"the answer was wrong, {told} ")
        assert done.stdout.endswith(f"in the choice set; coverage {state.asked:.4f} from now on\n")
        typed = ["label", "aaa", "volume", "3", "YES", "--endpoint", daemon.endpoint]
        unjudged = await asyncio.to_thread(invoke, *typed)
        assert unjudged.stdout.endswith("it had no choice set\n")
        assert again.stderr == "aaa/trend: the answer of version 2 has its label (repeated)\n"
        assert state.asked != COVERAGE
        refused = {
            "bad_request": [("aaa", "tren", 3, "UP"), ("aaa", "trend", 11, "SIDEWAYS")],
            "unknown_session": [("bbb", "trend", 3, "UP")],
            "unknown_version": [("aaa", "trend", 99, "UP")],
            "not_calibrated": [("aaa", "exact_value", 3, "1")],
            "repeated": [("aaa", PAPER_SIX[0].text, 3, "UP")],
        }
        await feed(daemon, [11])
        for code, labels in refused.items():
            for label in labels:
                with pytest.raises(QueryError) as error:
                    await daemon.call("label", *label)
                assert error.value.code == code
        newest = trends(daemon)[-1]
        assert newest.data_version == 11
        assert newest.choice_set == FITTED.choice_set(judged(newest), state.asked)
        asked = await daemon.call("ask", "aaa", PAPER_SIX[0].text, 1, ("UP", "DOWN"))
        assert asked.choice_set == newest.choice_set
        values = (await daemon.call("stats")).values
        past = (await daemon.call("versions", "aaa")).versions
    counted = Counter({"right": 3, "wrong": 6, "repeated": 1})
    counted[unjudged.stdout.removeprefix("the answer was ").partition(";")[0]] += 1
    for code, labels in refused.items():  # rare codes count together
        counted[code if code in LABEL_OUTCOMES else "other"] += len(labels)
    for outcome, n in counted.items():
        assert values[f'foretick_labels_total{{outcome="{outcome}"}}'] == n
    assert values['foretick_labelled_sets_total{session="aaa",covered="yes"}'] == in_set
    assert values['foretick_labelled_sets_total{session="aaa",covered="no"}'] == 9 - in_set
    assert values['foretick_adapted_coverage{session="aaa"}'] == state.asked
    labels = {each.data_version: a.label for each in past for a in each.answers if a.question == "trend"}
    told = {a.data_version: a.choice if a.data_version > 7 else OTHER[a.choice] for a in trend[1:]}
    assert labels == told | {1: None, 11: None}


async def test_labels_come_from_a_rule_as_bars_close(directory: Path, tmp_path: Path) -> None:
    """Without a client; the running daemon gives them when it has nothing else to do."""
    write(directory / CALIBRATION, revision_of(directory))
    rule = tmp_path / "trend.toml"
    asked = f'text = "{FITTED.text}"\nchoices = ["UP", "DOWN"]\n'
    rule.write_text(f'name = "trend"\n{asked}horizon = 2\nrule = "last(future.close) > close"\n')
    question = QuestionConfig("trend", FITTED.text, ("UP", "DOWN"), rule=str(rule))
    model = ModelConfig(path=str(directory), coverage=COVERAGE)
    config = inproc_config(sessions=sessions("V:AAA"), model=model, standing="none", questions=(question,))
    async with running(config) as daemon:
        for n in range(12):
            daemon.put(trade("V:AAA", START + n * SECOND, f"{100 + (n * n) % 7 / 10:.2f}"))
            await until(lambda n=n: len(daemon.answers()) == n)
        closes = [(n * n) % 7 for n in range(11)]
        right = ["UP" if closes[n + 2] > closes[n] else "DOWN" for n in range(9)]
        found = sum(answer.choice == each for answer, each in zip(daemon.answers(), right, strict=False))
        sets = [("covered", "yes"), ("covered", "no")]
        await until(
            lambda: sum(daemon.count("labelled_sets", session="aaa", **{k: v}) for k, v in sets) == len(right)
        )
        assert daemon.count("labelled_right", session="aaa") == found
        await until(
            lambda: sum(a.label is not None for v in daemon.state().past.since(0) for a in v.answers) == 9
        )
        versions = (await daemon.http("GET", "/v1/sessions/aaa/versions")).json["versions"]
        assert [each["close"] for each in versions] == [f"{100 + close / 10:.2f}" for close in closes]
        told = [each["answers"][0] for each in versions]
        assert [each["text"] for each in told] == [answer.choice for answer in daemon.answers()]
        assert [each.get("label") for each in told] == [*right, None, None]
        (quality,) = (await daemon.http("GET", "/v1/quality/trend")).json["sessions"]
        counts = [quality["tally"][each] for each in ("answers", "labels", "right")]
        assert counts == [len(closes), len(right), found]
        same = (await daemon.call("quality", "aaa", FITTED.text)).quality
        assert msgspec.convert(quality, type(same)) == same


def test_a_file_beside_the_model_is_read_unless_it_is_off(directory: Path) -> None:
    assert calibration_of(ModelConfig(), directory, "r", ["compact"]) is None
    write(directory / CALIBRATION, "r")
    found = calibration_of(ModelConfig(), directory, "r", ["compact"])
    assert found is not None
    assert found.questions == [FITTED]
    assert calibration_of(ModelConfig(calibration="off"), directory, "r", ["compact"]) is None


@pytest.mark.parametrize(
    ("revision", "lines", "file", "message"),
    [
        ("other", ["compact"], "", "was fitted for model r, this one is other"),
        ("r", ["compact", "decimal"], "", "was fitted on 'compact' lines, this session writes 'decimal'"),
        ("r", ["compact"], "/none.json", "none.json"),
    ],
)
def test_a_file_that_does_not_fit_or_exist_is_refused_under_its_key(
    directory: Path, revision: str, lines: list[str], file: str, message: str
) -> None:
    write(directory / CALIBRATION, "r")
    with pytest.raises(SettingError, match=message) as refused:
        calibration_of(ModelConfig(calibration=file), directory, revision, lines)
    assert refused.value.key == "model.calibration"
