"""`foretick history --bars`: answers beside their bars, and what was right by a plain look at the closes."""

import csv
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from daemon.audit.bar_table import BarTable, ns_of
from daemon.audit.right_answers import RightAnswers
from engine.model.question_pack import pinned, write_pack
from engine.model.terse import TAPE_MODEL
from feeds.market_data import Answer, Basis, Latency
from feeds.mock_broker import MockBroker
from flash.question import EXACT_VALUE, PAPER_SIX, Question
from tests.daemon.audit.broker import FORM, run_fill
from tests.kit import SECOND, START, trade
from tests.kit.config import inproc_config
from tests.kit.daemon import invoke
from tests.kit.packs import random_pack
from tests.training.test_training_ahead import bars_file
from training.taught_question import read_taught

pytestmark = pytest.mark.timeout(600)
KEY, WINDOW, BARS, HORIZON = "V:AAA", 14, 60, 3
TREND, *_ = PAPER_SIX
BY_NAME = Question("mine", "trend", ("UP", "DOWN"))
NEXT = Question("next", "Will the close be higher three bars from now?", ("YES", "NO"))
OTHER = Question("other", "Is it a good day?", ("YES", "NO"))
NAMED = Question("named", "Is the last close the highest of the bars shown?", ("YES", "NO"))
ASKED = (TREND, BY_NAME, NEXT, OTHER, NAMED, EXACT_VALUE)
MEANT = {
    NEXT: f'horizon = {HORIZON}\nrule = "last(future.close) > close"\n',
    NAMED: 'rule = "close >= highest(close, 5)"\n',
}
RULES = {q.name: f'name = "{q.name}"\ntext = "{q.text}"\n{rule}' for q, rule in MEANT.items()}
DRAW = random.Random(5)
CLOSES = [10_000 + DRAW.randint(-150, 150) for _ in range(BARS)]
"""In cents: so near to each other that a price unit is a cent, and no price is rounded."""
RECORDED = """kind = "replay"
[source.replay]
file = "{0}/trades.csv"
format = "{0}/form.toml"
"""
GAPS = {20, 21, 40}
"""Seconds without a trade: no bar."""
SECONDS = [n for n in range(BARS + len(GAPS)) if n not in GAPS]


class Place(NamedTuple):
    """Where answers and records are."""

    bootstrap: str
    config: str
    recorded: str
    bars: str
    rule: str


def price(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def answer(bar: int, question: Question, text: str, shown: int = WINDOW) -> Answer:
    """To a question behind a bar, whose newest record came 2 ms after its opening."""
    opened = START + SECONDS[bar] * SECOND
    return Answer(
        session="aaa",
        symbol=KEY,
        question=question.name,
        question_hash=question.hash,
        data_version=bar + 1,
        as_of=opened + 2_000_000,
        text=text,
        answer_id=f"aaa:{question.hash}:{opened}",
        model="m",
        model_revision="r",
        latency=Latency(),
        reused_tokens=1,
        computed_tokens=2,
        basis=Basis(window_bars=min(bar + 1, shown)),
    )


def texts(question: Question) -> list[str]:
    return [question.choices[n % 2] if question.choices else price(CLOSES[n]) for n in range(BARS)]


def expected(question: Question, bar: int) -> str | None:
    """What was right, from the closes alone."""
    now, shown = CLOSES[bar], CLOSES[max(0, bar + 1 - WINDOW) : bar + 1]
    if question in (TREND, BY_NAME):
        ago = shown[-11] if len(shown) > 10 else now
        return None if now == ago else "UP" if now > ago else "DOWN"
    if question == NEXT:
        return None if bar + HORIZON >= BARS else "YES" if CLOSES[bar + HORIZON] > now else "NO"
    if question == NAMED:
        return None if len(shown) < 5 else "YES" if now >= max(shown[-5:]) else "NO"
    return price(now) if question == EXACT_VALUE else None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Two trades a bar in a topic, and the answers to six questions in another; the bars of a file, too."""
    folder = tmp_path_factory.mktemp("history")
    for name, text in RULES.items():
        (folder / f"{name}.toml").write_text(text)
    with MockBroker() as broker:
        for topic in ("in", "answers.v1"):
            broker.create_topic(topic, 1)
        pairs = zip(SECONDS, CLOSES, strict=True)
        trades = [
            (START + second * SECOND + late, price(cents))
            for second, close in pairs
            for late, cents in ((1_000_000, close - 1), (2_000_000, close))
        ]
        # it closes the last bar, and its own stays open
        end = START + (SECONDS[-1] + 1) * SECOND
        records = [trade(KEY, at, text, "2.5") for at, text in (*trades, (end, "100.00"))]
        run_fill(broker.bootstrap, "in", records)
        said = [answer(bar, q, texts(q)[bar]) for bar in range(BARS) for q in ASKED]
        run_fill(broker.bootstrap, "answers.v1", said)
        (folder / "a.toml").write_text(config_of(broker.bootstrap, folder))
        (folder / "recorded.toml").write_text(
            config_of(broker.bootstrap, folder, source=RECORDED.format(folder))
        )
        config, recorded, bars = (str(folder / name) for name in ("a.toml", "recorded.toml", "bars.csv"))
        (folder / "form.toml").write_text(FORM)
        rows = [f"{at},AAA,{text},2.5" for at, text in trades]
        (folder / "trades.csv").write_text("\n".join(["time,symbol,price,size", *rows]) + "\n")
        played = invoke(
            "replay", str(folder / "trades.csv"), "--format", str(folder / "form.toml"), "--to", "inproc",
            "--speed", "0", "--bars", bars, "--set", "model.path=untrained", "--set", "standing=none",
        )  # fmt: skip
        assert played.exit_code == 0, played.output
        assert f"{BARS} bars read" in played.output
        yield Place(broker.bootstrap, config, recorded, bars, str(folder / "named.toml"))


def config_of(bootstrap: str, folder: Path, more: str = "", source: str = "") -> str:
    kafka = f'kafka = {{ bootstrap = "{bootstrap}"'
    topic = f'kind = "kafka"\n{kafka}, topics = ["in"] }}'
    return f"""
standing = "none"
[model]
path = "untrained"
threads = 1
[[sessions]]
name = "aaa"
symbol = "{KEY}"
[[questions]]
name = "next"
text = "{NEXT.text}"
choices = ["YES", "NO"]
rule = "{folder / "next.toml"}"
{more}
[source]
{source or topic}
[sink]
{kafka}, topic = "answers.v1" }}
"""


def history(*arguments: str) -> list[dict[str, str]]:
    done = invoke("history", *arguments)
    assert done.exit_code == 0, done.output
    return list(csv.DictReader(io.StringIO(done.stdout)))


def refused(*arguments: str) -> str:
    done = invoke("history", *arguments)
    assert done.exit_code == 2, done.output
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_each_answer_is_beside_its_bar_and_what_was_right(place: Place) -> None:
    """Bars of the file and those made again, from the topic and from recorded trades, are the same."""
    by_file = history("--config", place.config, "--bars", place.bars, "--rule", place.rule)
    for config in (place.config, place.recorded):
        made_again = history("--config", config, "--bars", "sources", "--rule", place.rule)
        assert [row for row, other in zip(made_again, by_file, strict=True) if row != other] == []
    assert len(by_file) == BARS * len(ASKED)
    by_name, known = {each.name: each for each in ASKED}, 0
    for row in by_file:
        question, bar = by_name[row["question"]], int(row["data_version"]) - 1
        assert ns_of(row["bar_opens"]) == START + SECONDS[bar] * SECOND
        prices = [row[f"bar_{name}"] for name in ("open", "high", "low", "close")]
        assert [float(text) for text in prices] == [
            cents / 100 for cents in (CLOSES[bar] - 1, CLOSES[bar], CLOSES[bar] - 1, CLOSES[bar])
        ]
        assert (row["bar_volume"], row["bar_records"], row["bar_interval"]) == ("5", "2", str(SECOND))
        right = expected(question, bar)
        assert row["right"] == (right or ""), (question.name, bar)
        assert row["is_right"] == ("" if right is None else str(row["text"] == right))
        known += right is not None
    assert known > 4 * BARS


def test_without_a_configuration_there_are_bars_alone(place: Place) -> None:
    at_broker = ("answers.v1", "--bootstrap", place.bootstrap)
    (first, *_), (plain, *_) = history(*at_broker, "--bars", place.bars), history(*at_broker)
    added = {name: value for name, value in first.items() if name not in plain}
    assert {**plain, **added} == first
    assert {name.partition("_")[0] for name in added} == {"bar"}
    assert "is_right" in history("--config", place.config, "--bars", place.bars)[0]


def test_the_three_kinds_of_files_hold_the_same(place: Place, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    for name in ("a.jsonl", "a.parquet", "a.csv"):
        own = ("--config", place.config, "--bars", place.bars, "--output", str(tmp_path / name))
        assert history(*own) == []
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    table = pq.read_table(tmp_path / "a.parquet").drop_columns(["as_of", "published_at"])
    for line, row in zip(lines, table.to_pylist(), strict=True):
        assert row == {name: line[name] for name in row}
    with (tmp_path / "a.csv").open(newline="") as file:
        for line, row in zip(lines, csv.DictReader(file), strict=True):
            shown = {name: "" if line[name] is None else str(line[name]) for name in ("right", "is_right")}
            assert shown == {name: row[name] for name in shown}


def changed(place: Place, folder: Path, change: Any) -> str:
    """The file of bars with its lines, as dictionaries, changed."""
    with Path(place.bars).open(newline="") as file:
        lines = list(csv.DictReader(file))
    names = list(lines[0])
    with (folder / "changed.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(change(lines))
    return str(folder / "changed.csv")


def rights(place: Place, bars: str) -> dict[tuple[str, int], str]:
    rows = history("--config", place.config, "--bars", bars, "--rule", place.rule)
    return {(row["question"], int(row["data_version"]) - 1): row["right"] for row in rows}


def test_what_needs_a_bar_that_is_missing_is_not_known(place: Place, tmp_path: Path) -> None:
    """Neither by its window nor by its horizon; all else is the same."""
    lost, whole = 30, rights(place, place.bars)
    found = rights(place, changed(place, tmp_path, lambda lines: lines[lost:]))
    for (question, bar), right in found.items():
        needed = 1 if question == EXACT_VALUE.name else WINDOW
        is_there = bar - lost + 1 >= needed
        assert right == (whole[question, bar] if is_there else ""), (question, bar)


def test_a_correction_came_later_and_none_reaches_across_a_roll(place: Place, tmp_path: Path) -> None:
    rolled, whole = 40, rights(place, place.bars)

    def change(lines: list[dict[str, str]]) -> list[dict[str, str]]:
        lines[rolled]["flags"] = "rolled"
        return [*lines, {**lines[20], "close": "1.00", "flags": "amended"}]

    found = rights(place, changed(place, tmp_path, change))
    for (question, bar), right in found.items():
        reached = {"trend": range(bar - 10, bar + 1), "named": range(bar - 4, bar + 1)}
        reached["mine"] = reached["trend"]
        reached |= {"next": range(bar, bar + HORIZON + 1)}
        crosses = rolled in reached.get(question, ()) and rolled - 1 in reached[question]
        assert right == ("" if crosses else whole[question, bar]), (question, bar)


def test_the_rule_of_a_pack_says_what_was_right(place: Place, tmp_path: Path) -> None:
    """As `foretick teach` writes it: a pack that was taught by labels has an empty rule."""
    by_hand = f'name = "named"\ntext = "{NAMED.text}"\nlabels = "mine.csv"\n'
    (tmp_path / "by_hand.toml").write_text(by_hand)
    for file, knows in ((Path(place.rule), True), (tmp_path / "by_hand.toml", False)):
        rows = rights_of_a_pack(place, tmp_path, read_taught(file, WINDOW).source)
        assert rows == [(knows and expected(NAMED, bar)) or "" for bar in range(BARS)]


def rights_of_a_pack(place: Place, folder: Path, taught_by: dict[str, Any]) -> list[str]:
    own = {"name": "named", "text": NAMED.text, "question": taught_by}
    write_pack(folder / "named.pack", random_pack(TAPE_MODEL, **own))
    pack = pinned(str(folder / "named.pack"))
    table = f'[[questions]]\nname = "named"\ntext = "{NAMED.text}"\nchoices = ["YES", "NO"]\npack = "{pack}"'
    config = folder / "b.toml"
    config.write_text(config_of(place.bootstrap, Path(place.config).parent, table))
    taught = Question("named", NAMED.text, NAMED.choices, pack=pack)
    with MockBroker() as broker:
        broker.create_topic("past", 1)
        run_fill(broker.bootstrap, "past", [answer(bar, taught, "YES") for bar in range(BARS)])
        sink = ("--set", f"sink.kafka.bootstrap={broker.bootstrap}")
        rows = history("past", "--config", str(config), *sink, "--bars", place.bars)
    return [row["right"] for row in rows]


def table_of(*openings: int, newest_ns: int | None = None) -> BarTable:
    """One-second bars of V:A; ``newest_ns``: of their newest records behind the openings."""
    table, one = BarTable(), dict.fromkeys(("open", "high", "low", "close", "volume", "records"), "0")
    for second in openings:
        newest = "" if newest_ns is None else f"1970-01-01T00:00:0{second}.{newest_ns:09d}Z"
        line = {"session": "s", "symbol": "V:A", "opens": f"1970-01-01T00:00:0{second}Z", "newest": newest}
        table.add({**line, "interval": str(SECOND), **one})
    return table


def beside(table: BarTable, as_of: int, answer_id: str | None) -> str | None:
    row = table.row("s", "V:A", as_of, answer_id)
    return None if row is None else row.opens[-2:]


def test_a_table_finds_the_bar_that_an_id_names() -> None:
    """Of bars without a record too, whose newest record is that of the bar before them."""
    table = table_of(1, 2, 3)
    for named, opens in (
        (f"{3 * SECOND}", "3Z"),
        (f"{2 * SECOND},{3 * SECOND}", "2Z"),  # the answer's symbol is the session's first
        (f"{4 * SECOND}", None),
        (f"{4 * SECOND},{3 * SECOND}", None),
        (f"-1,{3 * SECOND}", None),
    ):
        assert beside(table, SECOND + 5, f"s:h:{named}") == opens, named
    assert table.row("s", "V:B", SECOND, None) is None


@pytest.mark.parametrize("named", ["s:h:k/0/7", "", None])
def test_without_an_opening_it_is_the_bar_that_holds_the_answer(named: str | None) -> None:
    table = table_of(1, 3)
    times = (SECOND - 1, SECOND, 2 * SECOND - 1, 2 * SECOND, 3 * SECOND + 5, 4 * SECOND, 9 * SECOND)
    assert [beside(table, as_of, named) for as_of in times] == [None, "1Z", "1Z", None, "3Z", None, None]
    known = table_of(1, newest_ns=7)
    # behind its newest record an event came while it was open
    assert [beside(known, SECOND + ns, named) for ns in (6, 7, 8)] == [None, "1Z", None]


def test_an_answer_whose_bar_the_table_lacks_has_nothing_beside_it(place: Place, tmp_path: Path) -> None:
    """Nor is it right or wrong: the bars of the file end before it."""
    ends, whole = 45, rights(place, place.bars)
    rows = history("--config", place.config, "--bars", changed(place, tmp_path, lambda lines: lines[:ends]))
    behind = [row for row in rows if int(row["data_version"]) > ends]
    assert len(behind) == (BARS - ends) * len(ASKED)
    empty = ("bar_opens", "bar_close", "bar_interval", "right", "is_right")
    assert {row[name] for row in behind for name in empty} == {""}
    for row in rows:
        bar = int(row["data_version"]) - 1
        if row["question"] == EXACT_VALUE.name and bar < ends:
            assert row["right"] == whole[EXACT_VALUE.name, bar]


@pytest.mark.parametrize(
    ("anchor", "right"),
    [([], "100.07"), (["100.0", "0.05", "1"], "100.05"), (["100.0", "0.2", "1"], "100.00")],
)
def test_an_exact_value_is_right_at_the_level_that_the_model_was_shown(anchor: list[str], right: str) -> None:
    table, bar = BarTable(), dict.fromkeys(("interval", "open", "high", "low", "volume", "records"), "0")
    table.add({"session": "aaa", "symbol": KEY, "opens": "1970-01-01T00:00:01Z", "close": "100.07", **bar})
    said = answer(0, EXACT_VALUE, right)
    said = replace(
        said, as_of=2 * SECOND, answer_id=f"aaa:h:{SECOND}", basis=Basis(window_bars=1, anchor=anchor)
    )
    assert RightAnswers(inproc_config([KEY]), table).of(said) == right


@pytest.mark.parametrize("max_gap_minutes", [0, 60])
def test_a_horizon_counts_bars_and_a_hole_may_end_it(tmp_path: Path, max_gap_minutes: int) -> None:
    """As labels of a running daemon and of `teach` do: the next bars, or none with a longest gap."""
    hole, closes, table = 6, CLOSES[:12], BarTable()
    openings = [60 * bar + (7200 if bar >= hole else 0) for bar in range(len(closes))]
    same = {"session": "aaa", "symbol": KEY, "interval": str(60 * SECOND), "volume": "1", "records": "1"}
    for opened, close in zip(openings, closes, strict=True):
        at = f"1970-01-01T{opened // 3600:02d}:{opened // 60 % 60:02d}:00Z"
        table.add({**same, "opens": at, **dict.fromkeys(("open", "high", "low", "close"), price(close))})
    (tmp_path / "next.toml").write_text(f"{RULES[NEXT.name]}max_gap_minutes = {max_gap_minutes}\n")
    right = RightAnswers(inproc_config([KEY]), table, [tmp_path / "next.toml"])
    for bar, opened in enumerate(openings):
        said = replace(answer(bar, NEXT, "YES"), as_of=opened * SECOND, answer_id=f"aaa:h:{opened * SECOND}")
        crosses = bar < hole <= bar + HORIZON and max_gap_minutes
        known = bar + HORIZON < len(closes) and not crosses
        label = "YES" if known and closes[bar + HORIZON] > closes[bar] else "NO" if known else None
        assert right.of(said) == label, bar


def test_what_cannot_be_is_one_sentence(place: Place, tmp_path: Path) -> None:
    at_broker = ("answers.v1", "--bootstrap", place.bootstrap)
    assert "--config" in refused(*at_broker, "--bars", "sources")
    assert "--bars and --config" in refused(*at_broker, "--bars", place.bars, "--rule", place.rule)
    assert "no column" in refused(*at_broker, "--bars", str(bars_file(tmp_path / "other.csv")))
    assert "none.csv" in refused(*at_broker, "--bars", str(tmp_path / "none.csv"))
    (tmp_path / "bad.toml").write_text("rule = 1")
    own = ("--config", place.config, "--bars", place.bars)
    assert "bad.toml is no question" in refused(*own, "--rule", str(tmp_path / "bad.toml"))
