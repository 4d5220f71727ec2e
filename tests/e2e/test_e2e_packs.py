"""Question packs in a daemon: configured, installed while it runs, refused; other answers stay to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from daemon.api.messages import Ask, QueryError
from daemon.config.checks import cross_check
from daemon.config.schema import (
    Config,
    FlashConfig,
    ModelConfig,
    ProcessConfig,
    QuestionConfig,
    RecoveryConfig,
)
from engine.model.question_pack import pinned, write_pack
from feeds.connector import SettingError
from feeds.durations import Duration
from feeds.market_data import Answer
from flash.question import PAPER_SIX
from tests.kit import SECOND, QueueSource, inproc_config, sessions, tolerance, until
from tests.kit.daemon import invoke
from tests.kit.inproc import RunningDaemon, Tape, running
from tests.kit.models import terse_directory
from tests.kit.packs import CHOICES, TEXT, random_pack
from training.tokenizer import NONE

BARS = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return terse_directory(tmp_path_factory.mktemp("terse") / "model")


@pytest.fixture
def foreign(directory: Path, tmp_path: Path) -> Path:
    """A pack of another model."""
    write_pack(tmp_path / "foreign.pack", random_pack(directory, base="0123456789abcdef"))
    return tmp_path / "foreign.pack"


@pytest.fixture
def cut(pack: Path, tmp_path: Path) -> Path:
    (tmp_path / "cut.pack").write_bytes(pack.read_bytes()[:-100])
    return tmp_path / "cut.pack"


@pytest.fixture
def pack(directory: Path, tmp_path: Path) -> Path:
    write_pack(tmp_path / "near.pack", random_pack(directory))
    return tmp_path / "near.pack"


def config(directory: Path, *packs: Path, **settings: object) -> Config:
    own = tuple(QuestionConfig(f"near{n}", TEXT, CHOICES, pack=str(each)) for n, each in enumerate(packs))
    model = ModelConfig(path=str(directory))
    return inproc_config(
        sessions=sessions("V:AAA"), model=model, standing="paper_six", questions=own, **settings
    )


def said(answers: Sequence[Answer], begin: int = 0) -> dict[tuple[int, str], tuple[object, ...]]:
    """What each answer of the model's own questions says, to the bit."""
    return {
        (each.data_version, each.question): (
            each.text,
            each.choice,
            each.logit_gap,
            each.value,
            each.question_hash,
        )
        for each in answers
        if not each.question.startswith("near") and each.data_version > begin
    }


@pytest.fixture
async def without(directory: Path) -> dict[tuple[int, str], tuple[object, ...]]:
    """The answers of a daemon without packs."""
    async with running(config(directory)) as daemon:
        await daemon.advance(BARS)
        return said(daemon.answers())


def near(daemon: RunningDaemon, name: str = "near0") -> list[Answer]:
    return [each for each in daemon.answers() if each.question == name]


async def test_configured_packs_answer_and_change_no_other_answer(
    directory: Path, tmp_path: Path, pack: Path, without: dict[tuple[int, str], tuple[object, ...]]
) -> None:
    """Two packs of one text, told apart by the hash; windows slide, as they have eight bars."""
    write_pack(tmp_path / "other.pack", random_pack(directory, tokens=3, seed=5))
    async with running(config(directory, pack, tmp_path / "other.pack")) as daemon:
        await daemon.advance(BARS)
        assert said(daemon.answers()) == without
        one, other = near(daemon), near(daemon, "near1")
        asked = await daemon.ask_engine(Ask(1, "aaa", TEXT))
        shown = await daemon.call("show_prompt", "aaa", "near1")
    assert len(one) == len(other) == BARS
    assert {each.choice for each in one} <= set(CHOICES)
    assert [each.logit_gap for each in one] != [each.logit_gap for each in other]
    assert one[0].question_hash != other[0].question_hash
    assert [each.computed_tokens for each in one] == [2] * BARS  # with the answer
    assert [each.computed_tokens for each in other] == [4] * BARS
    assert all(each.probability is not None and each.choice_set is not None for each in one)
    assert (shown.question.text, shown.question.tokens) == (TEXT, 3)
    assert asked.choice == one[-1].choice
    assert asked.logit_gap == tolerance.near(one[-1].logit_gap, 1e-4)


async def test_a_pack_is_installed_and_removed_while_the_daemon_runs(
    directory: Path, pack: Path, without: dict[tuple[int, str], tuple[object, ...]]
) -> None:
    async with running(config(directory)) as daemon:
        await daemon.advance(4)
        done = await asyncio.to_thread(
            invoke, "questions", "install", str(pack), "--name", "near0", "--endpoint", daemon.endpoint
        )
        assert done.exit_code == 0, done.output
        assert done.stdout == f"aaa: asks {TEXT!r} from now on\n"
        await daemon.advance(4)
        assert [each.data_version for each in near(daemon)] == [5, 6, 7, 8]
        reply = await daemon.call("remove_question", "aaa", "near0")
        assert "near0" not in {each.name for each in reply.questions}
        await daemon.advance(BARS - 8)
        assert len(near(daemon)) == 4
        assert said(daemon.answers()) == without


async def test_what_cannot_be_installed_is_refused_and_nothing_is_lost(
    directory: Path,
    tmp_path: Path,
    pack: Path,
    foreign: Path,
    cut: Path,
    without: dict[tuple[int, str], tuple[object, ...]],
) -> None:
    async with running(config(directory)) as daemon:
        await daemon.advance(4)

        async def refused(text: str, choices: tuple[str, ...], file: Path | str, why: str) -> None:
            with pytest.raises(QueryError, match=why):
                await daemon.call("set_question", "aaa", "near0", text, choices, pack=str(file))

        await refused(TEXT, CHOICES, foreign, "was taught to model 0123456789abcdef")
        await refused(TEXT, CHOICES, cut, "is cut or broken")
        await refused(TEXT, CHOICES, tmp_path / "none.pack", "cannot read the question pack")
        await refused(TEXT, CHOICES, f"{pack}@0123456789abcdef", "is another question pack by now")
        await refused("Is it far?", CHOICES, pack, "the pack is of another question")
        await refused(TEXT, ("YES", "MAYBE"), pack, "the pack answers")
        await refused(TEXT, (), pack, "the pack answers .*, not free text")
        for file, why in ((cut, "is cut or broken"), (foreign, "installed in 0 of 1 sessions")):
            done = await asyncio.to_thread(
                invoke, "questions", "install", str(file), "--endpoint", daemon.endpoint
            )
            assert done.exit_code == 1
            assert why in done.output
        with_none = (*CHOICES, NONE)
        await daemon.call("set_question", "aaa", "near0", TEXT, with_none, pack=str(pack))
        await daemon.advance(BARS - 4)
        assert said(daemon.answers()) == without
        assert {each.choice for each in near(daemon)} <= set(with_none)


async def test_a_numbered_prefix_leaves_packs_to_their_tokens(directory: Path, pack: Path) -> None:
    """And changes no bit of the answers to questions that are asked by their number."""
    flash, bits = FlashConfig(placement="frozen"), []
    for packs in ((), (pack,)):
        async with running(config(directory, *packs, flash=flash)) as daemon:
            await daemon.advance(BARS)
            bits.append(said(daemon.answers()))
            trend = [each for each in daemon.answers() if each.question == "trend"]
            assert {each.computed_tokens for each in trend} == {3}  # with the answer
            assert [each.computed_tokens for each in near(daemon)] == [2] * BARS * len(packs)
    assert len(bits[0]) == BARS * len(PAPER_SIX)
    assert bits[0] == bits[1]


def test_a_configuration_says_which_pack_cannot_answer(directory: Path, tmp_path: Path, pack: Path) -> None:
    def problems(**changes: object) -> list[str]:
        made = config(directory, pack)
        own = msgspec.structs.replace(made.questions[0], **changes)
        return [
            f"{each.key}: {each.message}"
            for each in cross_check(msgspec.structs.replace(made, questions=(own,)))
        ]

    assert problems() == []
    assert problems(pack=pinned(str(pack))) == []
    (why,) = problems(pack=str(tmp_path / "none.pack"))
    assert why.startswith("questions[0].pack: cannot read the question pack")
    (why,) = problems(text="Is it far?")
    assert why == f"questions[0].pack: the pack is of another question: {TEXT!r}"
    (why,) = problems(choices=())
    assert why == "questions[0].pack: the pack answers ['YES', 'NO', 'NONE'], not free text"


async def test_a_pack_of_another_model_stops_the_start_with_its_key(directory: Path, foreign: Path) -> None:
    with pytest.raises(SettingError, match="to model 0123456789abcdef") as refused:
        async with running(config(directory, foreign)):
            raise AssertionError("it started")
    assert refused.value.key == "questions[0].text"


def of_newest(daemon: RunningDaemon) -> list[Answer]:
    """The ready answers."""
    state = daemon.state()
    return state.answers_of(state.questions)


async def test_a_session_that_comes_back_from_a_snapshot_answers_by_its_packs_as_before(
    directory: Path, tmp_path: Path, pack: Path
) -> None:
    """But for rounding, as all its answers: the window lies in other blocks, merged in another order."""
    tape = Tape("V:AAA")
    write_pack(tmp_path / "other.pack", random_pack(directory, tokens=3, seed=5))
    recovery = RecoveryConfig(Duration(3600 * SECOND), str(tmp_path / "snapshots"))
    made = config(directory, pack, tmp_path / "other.pack", recovery=recovery)
    async with running(made, QueueSource("dropping"), tape) as daemon:
        await daemon.advance(BARS)
        before = of_newest(daemon)
        assert await daemon.gateway.stop()
    async with running(made, QueueSource("dropping"), tape) as daemon:
        assert daemon.count("snapshots_restored", session="aaa") == 1
        await until(lambda: len(of_newest(daemon)) == len(before))
        for one, other in zip(of_newest(daemon), before, strict=True):
            same = "question", "question_hash", "data_version", "text", "choice", "choice_set"
            assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
            assert one.logit_gap == tolerance.near(other.logit_gap, 1e-4)
            assert (one.probability is None) == (other.probability is None)
            assert (one.probability or 0) == tolerance.near(other.probability or 0, 1e-4)
        assert daemon.answers() == []
        daemon.feed(2)  # the bar that was open may be lost: this source cannot read it again
        await until(lambda: daemon.answered("aaa", BARS + 1), 60)
        assert near(daemon)[0].data_version > BARS
        await daemon.gateway.stop()
    assert {each.question for each in before} >= {"near0", "near1"}


def removed(file: Path) -> bytes:
    """Delete it; what it had."""
    content = file.read_bytes()
    file.unlink()
    return content


def put_back(file: Path, content: bytes) -> None:
    file.write_bytes(content)


async def test_packs_that_are_gone_when_the_engine_starts_again_pause_their_questions_alone(
    directory: Path, tmp_path: Path, pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One file is deleted, one replaced; nothing happens before. Put back, its question is asked again."""
    other, stays = tmp_path / "other.pack", tmp_path / "stays.pack"
    write_pack(other, random_pack(directory, tokens=3, seed=5))
    write_pack(stays, random_pack(directory, seed=7))
    process = ProcessConfig(mode="two", drain=Duration(5 * SECOND))
    async with running(
        config(directory, pack, other, stays, process=process), restart_after_s=(0.0,)
    ) as daemon:
        await daemon.advance(3)
        written, whole = removed(pack), near(daemon)[0].question_hash
        write_pack(other, random_pack(directory, tokens=3, seed=6))
        await daemon.advance()
        assert [len(near(daemon, f"near{n}")) for n in range(3)] == [4, 4, 4]

        engine = daemon.gateway.engine.connected()
        assert engine is not None
        assert await engine.end()
        await until(lambda: daemon.count("engine_restarts") == 1, 30.0)
        await until(lambda: not daemon.gateway.status.not_ready(), 180.0)
        assert daemon.count("packs_unreadable") == 2
        for why in (
            f"aaa: question 'near0' is paused: cannot read the question pack {pack}",
            f"aaa: question 'near1' is paused: {other} is another question pack by now",
        ):
            assert why in caplog.text
        daemon.feed(2)  # the bar that was open is lost with the engine: this source cannot read it again
        await until(lambda: daemon.answered("aaa", 5), 60)
        await daemon.advance()
        later = {each.question for each in daemon.answers() if each.data_version > 4}
        assert later == {*(each.name for each in PAPER_SIX), "near2"}
        listed = await daemon.call("questions", "aaa")
        assert [each.name for each in listed.questions if each.paused] == ["near0", "near1"]

        with pytest.raises(QueryError, match="cannot read the"):
            await daemon.call("pause", "aaa", "near0", False)
        with pytest.raises(QueryError, match="cannot read the"):
            await daemon.call("ask", "aaa", "near0")
        put_back(pack, written)
        await daemon.call("pause", "aaa", "near0", False)
        await daemon.advance()
        assert near(daemon)[-1].data_version == daemon.state().version
        assert near(daemon)[-1].question_hash == whole
