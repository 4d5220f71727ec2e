"""Which lines a session has, which questions a terse model takes, and how its answers are printed."""

from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon.config.checks import cross_check
from daemon.config.schema import (
    UNTRAINED,
    Config,
    FlashConfig,
    ModelConfig,
    PoolConfig,
    QuestionConfig,
    SchedulerConfig,
    SessionConfig,
)
from daemon.config.standing import questions_of
from daemon.engine.assembly import ready_tokens
from daemon.engine.build import Built, build, register, text_of
from daemon.engine.prefixes import EnginePrefixes, Explanation
from feeds.connector import SettingError
from feeds.decimals import from_units
from flash.question import PAPER_SIX, Question
from flash.registry import Registry
from ingest.compact import WIDEST, Anchor, CompactSpec
from ingest.lines import LineSpec
from tests.kit.models import WINDOW_BARS, terse_directory

QUARTER = 250_000_000


@pytest.fixture(scope="module")
def terse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return terse_directory(tmp_path_factory.mktemp("terse") / "model")


def config(path: Path | None, *sessions: SessionConfig, questions: tuple[QuestionConfig, ...] = ()) -> Config:
    return Config(
        model=ModelConfig(path=str(path) if path else UNTRAINED),
        sessions=sessions or (session("a"),),
        questions=questions,
    )


def session(name: str, **settings: object) -> SessionConfig:
    return SessionConfig(name=name, symbol=f"X:{name}", retention_tokens=256, **settings)  # type: ignore[arg-type]  # its own


@pytest.fixture(scope="module")
def built(terse: Path) -> Built:
    return build(config(terse, session("a"), session("b", unit=from_units(QUARTER), retention_records=5)), {})


def test_a_terse_model_has_a_ready_position_where_asks_may_exit(built: Built) -> None:
    on = replace(config(None), flash=FlashConfig(early_exit=2.0))
    assert ready_tokens(on, built.prompt) == built.prompt.encode("\n")
    assert ready_tokens(config(None), built.prompt) == ()


def test_a_terse_model_s_sessions_are_compact_and_as_long_as_it_was_trained_for(built: Built) -> None:
    assert built.lines == {
        "a": CompactSpec(2, 0, 256, WINDOW_BARS, 0),
        "b": CompactSpec(2, QUARTER, 256, 5, 0),
    }
    assert [tape.retention.records for tape in built.tapes.values()] == [WINDOW_BARS, 5]


def test_a_terse_model_refuses_decimal_lines(terse: Path) -> None:
    with pytest.raises(SettingError, match="compact lines") as refused:
        build(config(terse, session("a"), session("b", lines="decimal")), {})
    assert refused.value.key == "sessions[1].lines"


def test_a_unit_without_compact_lines_is_refused() -> None:
    with pytest.raises(SettingError, match="compact lines") as refused:
        build(config(None, session("a", unit=from_units(QUARTER))), {})
    assert refused.value.key == "sessions[0].unit"


def test_other_models_take_either(terse: Path) -> None:
    made = build(config(None, session("a"), session("b", lines="compact", price_decimals=4)), {})
    assert made.lines == {"a": LineSpec(2, 3), "b": CompactSpec(4, 0, 256, 0, 0)}
    prefixes = [made.prompt.decode(list(made.prefixes.newest(name))) for name in "ab"]
    assert prefixes[0].endswith("time,open,high,low,close,volume")
    assert prefixes[1].endswith("reference 0.0000 unit 0.0001 volume 1 percent 001")
    asked = made.prepare(PAPER_SIX[5])
    assert (asked.is_price, asked.max_tokens) == (True, None)
    assert not made.prepare(Question("other", "What is the volume?")).is_price


def test_the_paper_s_questions_are_known_by_name_and_take_a_token_each(built: Built) -> None:
    registry = Registry(built.prepare)
    standing = [register(registry, asked) for asked in questions_of(config(None))]
    assert [len(each.prepared.prompt_tokens) for each in standing] == [1] * 6
    assert [each.prepared.answer_tokens(each.question) for each in standing] == [1] * 6
    assert [each.prepared.is_price for each in standing] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("question", "key", "message"),
    [
        (QuestionConfig("rain", "Will it rain?", ("YES", "NO")), "text", "does not answer 'Will it rain"),
        (
            QuestionConfig("t", "trend", ("BULL", "BEAR")),
            "choices",
            r"its answers are \['UP', 'DOWN', 'NONE'\]",
        ),
        (QuestionConfig("trend", "Will it rain?"), "text", "does not answer 'Will it rain"),
    ],
)
def test_a_question_that_the_model_does_not_answer_is_refused_where_it_is_declared(
    built: Built, question: QuestionConfig, key: str, message: str
) -> None:
    declared = [each for each in questions_of(config(None, questions=(question,))) if each.key != "standing"]
    with pytest.raises(SettingError, match=message) as refused:
        register(Registry(built.prepare), declared[0])
    assert refused.value.key == f"questions[0].{key}"


def test_an_answer_without_choices_ends_where_the_model_s_answer_ends(built: Built) -> None:
    for text in ("trend", "exact_value"):
        question = Question("ask", text, max_tokens=64)
        assert built.prepare(question).answer_tokens(question) == 1


def test_a_pool_without_room_for_a_second_window_is_refused_when_the_model_chooses_compact_lines(
    terse: Path,
) -> None:
    """`foretick check` without the model cannot know that a session with lines = "auto" is compact."""
    small = replace(
        config(terse, replace(session("a"), retention_records=40)),
        pool=PoolConfig(blocks=50, block_size=16, frame_limit=2048),
        scheduler=SchedulerConfig(max_prompt_tokens=64, max_new_tokens=64),
    )
    assert not cross_check(small)
    with pytest.raises(SettingError, match="of 16") as refused:
        build(small, {})
    assert refused.value.key == "pool.blocks"


def test_numbered_questions_must_leave_room_for_the_longest_header(built: Built) -> None:
    """Otherwise a later anchor could not be used, in the middle of the stream."""
    prompt = built.prompt
    header = Anchor(0, 10**7, 10**9).header
    prefixes = EnginePrefixes(prompt, partial(text_of, prompt), numbers=True)
    prefixes.add(session("a"), header, (), Explanation())
    questions = [Question(q.name, q.text, q.choices) for q in PAPER_SIX[:2]]
    shown = len(prompt.frozen(header, [text_of(prompt, q) for q in questions]))
    widest = len(prompt.encode(WIDEST.header)) - len(prompt.encode(header))
    assert prefixes.longest("a", questions) == shown + widest > shown
