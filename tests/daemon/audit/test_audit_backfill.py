"""A backfill says what a daemon said live, knows nothing of what came later, and goes on where it was."""

import asyncio
import random
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from daemon.audit.backfill import Backfill, CannotBackfill, Reached, Span, asked_of, identity_of
from daemon.audit.backfill_output import ParquetOutput
from daemon.config.schema import Config
from daemon.engine.build import Loaded, load
from engine.device import use_threads
from engine.model.question_pack import write_pack
from engine.model.terse import TAPE_MODEL
from feeds.connector import SettingError
from feeds.market_data import Answer
from feeds.source import Incoming
from tests.daemon.audit.backfilling import (
    ALWAYS,
    KEY,
    asked_up,
    config_of,
    given,
    lived,
    messages_of,
    past,
    said,
    tape_model_config,
    trades,
)
from tests.kit import SECOND, START, trade
from tests.kit.packs import random_pack
from tests.kit.tolerance import near, of_embedded_gap

pytestmark = pytest.mark.timeout(600)  # a daemon and several engines


@pytest.fixture(scope="module")
def model() -> Loaded:
    config = config_of("carry")
    use_threads(config.model.threads)
    return load(config)


def check_equal(config: Config, messages: list[Incoming], model: Loaded) -> list[Answer]:
    live = asyncio.run(lived(config, messages))
    found = asyncio.run(past(asked_up(config), model, messages))
    assert len(live) == len(found) > len(messages) // 3
    has_rollup = any(session.rollup for session in config.sessions)
    for his, mine in zip(live, found, strict=True):
        if has_rollup:  # what shares a pass with its prefill depends on the moment
            assert mine.logit_gap == near(his.logit_gap, of_embedded_gap())
            mine, his = (msgspec.structs.replace(each, logit_gap=0.0) for each in (mine, his))
        assert said(mine) == said(his)
        assert mine.flags[-1] == "backfill"
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", ["ephemeral", "frozen"])
@pytest.mark.parametrize("kind", ["carry", "exact", "rollup"])
def test_it_says_what_the_daemon_said(kind: str, placement: str, model: Loaded) -> None:
    """With late records, and another question in the same pass at times."""
    found = check_equal(config_of(kind, placement), messages_of(trades(60)), model)
    assert any("amended" in each.flags for each in found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", ["ephemeral", "frozen"])
@pytest.mark.parametrize("answers_by", ["the model", "a question pack"])
def test_a_calibrated_model_says_what_it_said(answers_by: str, placement: str, tmp_path: Path) -> None:
    """With the same probability and choice set, over anchors that change."""
    pack = tmp_path / "near.pack" if answers_by == "a question pack" else None
    if pack is not None:
        write_pack(pack, random_pack(TAPE_MODEL))
    config = tape_model_config(placement, pack)
    found = check_equal(config, messages_of(trades(60, jump=700)), load(config))
    assert all(each.probability is not None and each.choice_set is not None for each in found)
    assert len({each.probability for each in found}) > len(found) // 2
    assert len({each.choice_set for each in found}) > 1
    assert len({tuple(each.basis.anchor) for each in found if each.basis is not None}) > 1
    is_numbered = placement == "frozen" and pack is None
    assert {each.computed_tokens for each in found} == {3 if is_numbered else 2}  # with the answer


def test_the_other_questions_are_asked_when_they_are_due() -> None:
    together = asked_up(config_of("carry")).together.questions
    assert {each.name: each.ask_every_bars for each in together} == {"up": 1, "seldom": 3}


@pytest.mark.parametrize("seed", [1, 2])
def test_records_that_are_dropped_for_their_lateness_are_flagged_alike(seed: int, model: Loaded) -> None:
    config = config_of("carry", late="drop")
    assert any("late" in each.flags for each in check_equal(config, messages_of(trades(40, seed)), model))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kind", "placement"), [("carry", "frozen"), ("exact", "ephemeral"), ("rollup", "frozen")]
)
def test_ten_thousand_versions_are_equal(kind: str, placement: str, model: Loaded, tmp_path: Path) -> None:
    """Late records among them; and over three restarts."""
    config, messages = config_of(kind, placement), messages_of(trades(10_000))
    found = check_equal(config, messages, model)
    assert len(found) >= 10_000
    for stop_after in (2_500, 2_500, 2_500, 1 << 30):
        asyncio.run(written(tmp_path, config, model, messages, stop_after))
    rows = pytest.importorskip("pyarrow.parquet").read_table(tmp_path).to_pylist()
    told = [(row["data_version"], row["text"], row["logit_gap"], row["answer_id"]) for row in rows]
    assert sorted(told) == [(each.data_version, each.text, each.logit_gap, each.answer_id) for each in found]


def test_versions_outside_the_range_are_made_and_not_asked(model: Loaded) -> None:
    config, messages = config_of("exact"), messages_of(trades(50))
    whole = asyncio.run(past(asked_up(config), model, messages))
    span = Span(START + 20 * SECOND, START + 30 * SECOND)
    found = asyncio.run(past(asked_up(config), model, messages, span))
    expected = [each for each in whole if span.from_ns <= each.as_of < span.to_ns]
    assert list(map(said, found)) == list(map(said, expected))
    assert len(found) >= 10


MESSAGES = trades(30)


@pytest.fixture(
    scope="module", params=product(["carry", "exact", "rollup"], ["ephemeral", "frozen"]), ids=" ".join
)
def told(request: pytest.FixtureRequest, model: Loaded) -> tuple[Config, list[Answer], list[int]]:
    """What is said of `MESSAGES`, and how much of it before each of them was read."""
    config, messages = config_of(*request.param), messages_of(MESSAGES)

    async def one_by_one() -> tuple[list[Answer], list[int]]:
        made = Backfill(asked_up(config), ALWAYS, Reached())
        built, answers, before = made.build(model), list[Answer](), list[int]()

        async def batches() -> Any:
            for message in messages:
                before.append(len(answers))
                yield "", [message]

        async for each in made.answers(built, batches(), ends=True):
            answers += [] if each is None else [each]
        return answers, before

    return config, *asyncio.run(one_by_one())


@pytest.mark.sampled(2)
@settings(max_examples=6)
@drawn(st.integers(4, len(MESSAGES) - 1), st.integers(0, 2**32), st.sampled_from([1, 7, 300]))
def test_what_comes_later_changes_nothing(
    told: tuple[Config, list[Answer], list[int]], model: Loaded, cut: int, seed: int, size: int
) -> None:
    """The canary: behind a record everything is another, and what was said before it stays."""
    config, answers, before = told
    draw = random.Random(seed)
    later = [
        trade(KEY, START + draw.randint(-5, 60) * SECOND, f"{draw.randint(1, 10**6) / 100:.2f}")
        for _ in MESSAGES[cut:]
    ]
    changed = messages_of([*MESSAGES[:cut], *later])
    found = asyncio.run(past(asked_up(config), model, changed, size=size))
    assert list(map(said, found[: before[cut]])) == list(map(said, answers[: before[cut]]))


async def written(
    directory: Path, config: Config, model: Loaded, messages: list[Incoming], stop_after: int = 1 << 30
) -> None:
    """A run of a backfill into ``directory``, which ends after that many answers."""
    asked, output = asked_up(config), ParquetOutput(directory)
    made = Backfill(asked, ALWAYS, await output.reached(identity_of(asked, model, ALWAYS)))
    answers = made.answers(made.build(model), given(messages, 50), ends=True)  # type: ignore[arg-type]  # it is one
    async for each in answers:
        if each is None:
            continue
        await output.write(each)
        stop_after -= 1
        if not stop_after:
            break
    await answers.aclose()
    await output.flush()


def rows_in(directory: Path) -> bytes:
    """All rows as one buffer, without the files' borders."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables = [pq.ParquetFile(file).read() for file in sorted(directory.iterdir())]
    table = pa.concat_tables(tables).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["exact", "rollup"])
def test_after_three_restarts_the_rows_are_the_same(kind: str, model: Loaded, tmp_path: Path) -> None:
    config, messages = config_of(kind), messages_of(trades(40))
    asyncio.run(written(tmp_path / "whole", config, model, messages))
    for stop_after in (9, 1, 13):
        asyncio.run(written(tmp_path / "parts", config, model, messages, stop_after))
    asyncio.run(written(tmp_path / "parts", config, model, messages))
    assert len(list((tmp_path / "parts").iterdir())) == 4
    assert rows_in(tmp_path / "parts") == rows_in(tmp_path / "whole")


def test_an_output_of_another_backfill_is_left_alone(model: Loaded, tmp_path: Path) -> None:
    messages = messages_of(trades(10))
    asyncio.run(written(tmp_path, config_of("carry"), model, messages))
    before = rows_in(tmp_path)
    with pytest.raises(CannotBackfill, match="another configuration"):
        asyncio.run(written(tmp_path, config_of("exact"), model, messages))
    asked = asked_of(config_of("carry"), "aaa", "seldom")
    with pytest.raises(CannotBackfill, match="another question"):
        asyncio.run(ParquetOutput(tmp_path).reached(identity_of(asked, model, ALWAYS)))
    other = identity_of(asked_up(config_of("carry")), model, Span(0, 6, begin_ns=5))
    with pytest.raises(CannotBackfill, match="another --begin"):
        asyncio.run(ParquetOutput(tmp_path).reached(other))
    earlier = identity_of(asked_up(config_of("carry")), model, Span(-1, 6))
    with pytest.raises(CannotBackfill, match="another --from"):
        asyncio.run(ParquetOutput(tmp_path).reached(earlier))
    assert rows_in(tmp_path) == before


def test_a_budget_of_engine_time_skips_no_version_of_the_past(model: Loaded) -> None:
    """A backfill takes all of an engine's time that it gets; a live daemon would hold the question back."""
    config, messages = config_of("carry"), messages_of(trades(12))
    up, seldom = config.questions
    scarce = config_of("carry", questions=(msgspec.structs.replace(up, engine_share=1e-6), seldom))
    found = [asyncio.run(past(asked_up(each), model, messages)) for each in (config, scarce)]
    assert list(map(said, found[0])) == list(map(said, found[1]))
    assert len(found[1]) > 10


def test_a_later_start_goes_on_without_a_hole(model: Loaded, tmp_path: Path) -> None:
    """As of a start that counts from now."""
    config, messages = config_of("carry"), messages_of(trades(12))
    asyncio.run(written(tmp_path, config, model, messages, 3))
    asked, later = asked_up(config), Span(START + 8 * SECOND, 2**62)
    reached = asyncio.run(ParquetOutput(tmp_path).reached(identity_of(asked, model, later)))
    found = asyncio.run(past(asked, model, messages, later, reached))
    assert found[0].data_version == reached.version + 1 == 4


def test_a_new_question_is_asked_without_those_of_the_daemon(model: Loaded) -> None:
    config, messages = config_of("carry", "frozen"), messages_of(trades(12))
    asked = asked_of(config, "aaa", "Is it high?", ("YES", "NO"))
    found = asyncio.run(past(asked, model, messages))
    assert {each.question for each in found} == {"backfill"}
    versions = [each.data_version for each in found]
    assert all(later == earlier + 1 for earlier, later in pairwise(versions))
    assert {each.text for each in found} <= {"YES", "NO"}
    assert len(asked.together.questions) == 1


@pytest.mark.parametrize(
    ("text", "choices", "says"),
    [
        ("down", (), "no standing question 'down'"),
        ("up", ("UP", "DOWN"), "has its own choices"),
        ("High?", ("YES",), "two choices"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(text: str, choices: tuple[str, ...], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        asked_of(config_of("carry"), "aaa", text, choices)
