"""Events in declared formats: headlines, states, corporate actions and books, as others write them."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds.batch_body import BodyFormat, TooMany, convert
from feeds.codec import MAX_LEVELS, MalformedRecord
from feeds.file_format import FormatError, load_format
from feeds.market_data import Action, Book, Status, Text, Trade
from feeds.payloads.format_decoder import FormatDecoder
from feeds.recorded_file import read_records
from feeds.source import Incoming

NOW = 1_767_225_600 * 10**9  # 2026-01-01T00:00:00Z
DAY = 86_400 * 10**9
DESK = """
description = "a desk's own topic: prices, news, states, actions and books"
container = "json"
[[records]]
kind = "trade"
venue = "X"
match = { field = "type", values = ["t"] }
time = { field = "at", format = "epoch-ms" }
fields = { symbol = "sym", price = "px", size = "qty" }
[[records]]
kind = "text"
venue = "X"
match = { field = "type", values = ["news"] }
each = "symbols"
time = { field = "$.at", format = "epoch-ms" }
fields = { symbol = "name", text = "$.headline", id = "$.id" }
[[records]]
kind = "status"
venue = "X"
match = { field = "type", values = ["state"] }
time = { field = "at", format = "epoch-ms" }
fields = { symbol = "sym", state = "code", reason = "why", seq = "n" }
state_values = { H = "halt", T = "resume" }
[[records]]
kind = "status"
venue = "X"
symbol = "*"
state = "close"
match = { field = "type", values = ["bell"] }
time = { field = "at", format = "epoch-ms" }
fields = {}
[[records]]
kind = "action"
venue = "X"
match = { field = "type", values = ["corporate"] }
time = { field = "at", format = "epoch-ms" }
effective = { field = "ex", format = "%Y-%m-%d", zone = "America/New_York" }
action_values = { SPLIT = "split", CASH = "dividend", RENAME = "symbol_change" }
fields = { symbol = "sym", action = "what", factor = "ratio", amount = "cash", new_symbol = "new" }
[[records]]
kind = "book"
venue = "X"
match = { field = "type", values = ["depth"] }
time = { field = "at", format = "epoch-ms" }
levels = { price = "p", size = "q" }
fields = { symbol = "sym", bids = "b", asks = "a" }
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> FormatDecoder:
    return decoder(tmp_path_factory.mktemp("formats"), DESK)


def decoder(folder: Path, text: str) -> FormatDecoder:
    path = folder / "form.toml"
    path.write_text(text)
    made = FormatDecoder(load_format(path, of_messages=True), 1 << 16)
    made.read_symbols(["X:AAA"])
    return made


def message(document: object, offset: int = 0) -> Incoming:
    return Incoming("desk", 0, offset, None, json.dumps(document).encode(), ts_recv_ns=NOW + 5)


def sent(kind: str, **members: object) -> dict[str, object]:
    return {"type": kind, "at": NOW // 10**6, "sym": "AAA"} | members


def read(desk: FormatDecoder, document: object) -> list[Any]:
    parts, passed_over = desk.parts(message(document))
    assert not passed_over
    return [part.record for part in parts]


def refused(desk: FormatDecoder, document: object) -> tuple[str, str]:
    (error,) = read(desk, document)
    assert isinstance(error, MalformedRecord)
    return error.reason, error.message


COMMON: dict[str, Any] = {"venue": "X", "symbol": "AAA", "ts_event": NOW, "ts_recv": NOW + 5}


def test_a_headline_about_several_symbols_is_a_text_of_each(desk: FormatDecoder) -> None:
    news = sent("news", headline="Rates cut", id=17, symbols=[{"name": "AAA"}, {"name": "BBB"}])
    expected = Text(**COMMON, text="Rates cut", id="17")
    assert read(desk, news) == [expected, Text(**COMMON | {"symbol": "BBB"}, text="Rates cut", id="17")]
    assert read(desk, sent("news", headline="None", symbols=[])) == []
    assert refused(desk, sent("news", id=1, symbols=[{"name": "AAA"}]))[0] == "missing_field"


def test_symbols_may_be_an_array_of_names(tmp_path: Path) -> None:
    desk = decoder(tmp_path, DESK.replace('symbol = "name", text', 'symbol = "@", text'))
    found = read(desk, sent("news", headline="Rates cut", symbols=["AAA", "BBB"]))
    assert [(each.key, each.text) for each in found] == [("X:AAA", "Rates cut"), ("X:BBB", "Rates cut")]


def test_states_are_in_the_words_of_the_format(desk: FormatDecoder) -> None:
    assert read(desk, sent("state", code="H", why="LUDP", n=7)) == [
        Status(**COMMON, seq=7, state="halt", reason="LUDP")
    ]
    assert read(desk, sent("state", code="T", n=8)) == [Status(**COMMON, seq=8, state="resume")]
    assert read(desk, sent("bell")) == [Status(**COMMON | {"symbol": "*"}, state="close")]
    reason, says = refused(desk, sent("state", code="Q", n=9))
    assert (reason, "is not among state_values" in says) == ("type", True)


def test_an_action_has_what_its_kind_needs_and_when_it_takes_effect(desk: FormatDecoder) -> None:
    ex = {"ex": "2026-01-02"}
    effective = NOW + DAY + 5 * 3600 * 10**9
    (split,) = read(desk, sent("corporate", what="SPLIT", ratio="4", **ex))
    assert isinstance(split, Action)
    assert (split.action, str(split.factor), split.effective) == ("split", "4", effective)
    (paid,) = read(desk, sent("corporate", what="CASH", cash="0.24", ratio="", **ex))
    assert (paid.action, str(paid.amount), paid.factor) == ("dividend", "0.24", None)
    (renamed,) = read(desk, sent("corporate", what="RENAME", new="ZZZ", **ex))
    assert (renamed.action, renamed.new_symbol) == ("symbol_change", "ZZZ")
    assert refused(desk, sent("corporate", what="SPLIT", cash="0.24", **ex))[0] == "missing_field"
    assert refused(desk, sent("corporate", what="SPLIT", ratio="0", **ex))[0] == "missing_field"
    assert refused(desk, sent("corporate", what="SPLIT", ratio="4:1", **ex))[0] == "price"
    assert refused(desk, sent("corporate", what="SPLIT", ratio="4", ex="soon"))[0] == "timestamp_unit"


PRICES = st.decimals("0.01", 10**6, places=2)
SIZES = st.decimals(0, 10**6, places=3)


@given(
    st.lists(PRICES, max_size=30, unique=True), st.lists(SIZES, min_size=30, max_size=30), st.integers(0, 30)
)
def test_the_best_levels_of_a_book_are_read_exactly(
    desk: FormatDecoder, prices: list[Decimal], sizes: list[Decimal], bids: int
) -> None:
    below, above = sorted(prices[:bids], reverse=True), sorted(prices[bids:])
    found = [
        [{"p": str(price), "q": str(size)} for price, size in zip(side, sizes, strict=False)]
        for side in (below, above)
    ]
    made = read(desk, sent("depth", b=found[0], a=found[1]))
    if not prices:
        assert [each.reason for each in made] == ["missing_field"]
        return
    (book,) = made
    assert isinstance(book, Book)
    for levels, side in ((book.bids, below), (book.asks, above)):
        expected = list(zip(side, sizes, strict=False))[:MAX_LEVELS]
        assert [(Decimal(int(p)).scaleb(-18), Decimal(int(q)).scaleb(-18)) for p, q in levels] == expected


def test_levels_may_be_pairs_and_a_side_may_be_left_out(tmp_path: Path) -> None:
    pairs = decoder(
        tmp_path, DESK.replace('levels = { price = "p", size = "q" }\n', "").replace(', asks = "a"', "")
    )
    (book,) = read(pairs, sent("depth", b=[["9.5", 3, "0", 1], ["9", "4"]]))
    assert ([(str(p), str(q)) for p, q in book.bids], book.asks) == ([("9.5", "3"), ("9", "4")], [])


def test_a_side_that_is_not_there_is_empty(desk: FormatDecoder) -> None:
    for other in ({}, {"a": None}, {"a": []}):
        (book,) = read(desk, sent("depth", b=[{"p": "9", "q": "1"}], **other))
        assert (len(book.bids), book.asks) == (1, [])
    assert refused(desk, sent("depth"))[0] == "missing_field"
    assert "asks: there is no array at a" in refused(desk, sent("depth", b=[], a="none"))[1]


def test_an_action_may_take_effect_at_once(desk: FormatDecoder) -> None:
    for ex in ({}, {"ex": None}):
        (split,) = read(desk, sent("corporate", what="SPLIT", ratio="4", **ex))
        assert (split.action, split.effective) == ("split", 0)


@pytest.mark.parametrize(
    ("levels", "reason"),
    [
        ([{"p": "9"}], "missing_field"),
        ([{"p": "x", "q": "1"}], "price"),
        ([{"p": "9", "q": "x"}], "size"),
        ([{"p": "9", "q": "-1"}], "size"),
        ([{"p": "9", "q": "1"}, {"p": "9", "q": "2"}], "price"),
        ([{"p": "8", "q": "1"}, {"p": "9", "q": "2"}], "price"),
        ({"p": "9", "q": "1"}, "type"),
        (7, "type"),
    ],
)
def test_a_book_with_a_wrong_level_is_refused(desk: FormatDecoder, levels: object, reason: str) -> None:
    assert refused(desk, sent("depth", b=levels, a=[]))[0] == reason


def test_prices_among_events_still_come_as_columns(desk: FormatDecoder) -> None:
    """Events are left to the readers of rows, and cost the others nothing."""
    trade = sent("t", px="1.25", qty="2")
    messages = [
        message(each, at)
        for at, each in enumerate([trade, sent("depth", b=[], a=[]), trade, sent("bell")] * 8)
    ]
    rows = desk.columns(messages)
    assert rows["taken"].tolist() == [1, 0, 1, 0] * 8
    assert {int(each) for each in rows["a"][rows["taken"] == 1]} == {1_250_000_000}


FILE = """
description = "halts in a file"
container = "csv"
[[records]]
kind = "trade"
venue = "X"
match = { field = "kind", values = ["trade"] }
time = { field = "at", format = "iso" }
fields = { symbol = "sym", price = "a", size = "b" }
[[records]]
kind = "status"
venue = "X"
match = { field = "kind", values = ["status"] }
time = { field = "at", format = "iso" }
fields = { symbol = "sym", state = "a", reason = "b" }
"""


def test_events_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "form.toml").write_text(FILE)
    lines = [
        "kind,at,sym,a,b",
        "trade,2026-01-01T00:00:00Z,AAA,1.5,2",
        "status,2026-01-01T00:00:01Z,AAA,halt,news",
    ]
    (tmp_path / "tape.csv").write_text("\n".join(lines))
    trade, status = read_records(tmp_path / "tape.csv", load_format(tmp_path / "form.toml"))
    assert isinstance(trade, Trade)
    assert status == Status(
        venue="X", symbol="AAA", ts_event=NOW + 10**9, ts_recv=NOW + 10**9, seq=2, state="halt", reason="news"
    )


WORDS = 'action_values = { SPLIT = "split", CASH = "dividend", RENAME = "symbol_change" }'
STATES = 'state_values = { H = "halt", T = "resume" }'


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('text = "$.headline", ', "", r"\[1\].fields.text: missing"),
        ('state = "close"', "", r"\[3\]: either state"),
        ('state = "code", ', 'state = "code"\n', "form.toml"),
        ('state = "close"', 'state = "closed"', r"\[3\].state"),
        (STATES, 'state = "halt"\n' + STATES, r"\[2\]: either state"),
        (STATES, 'state_values = { H = "stop" }', r"stop"),
        (STATES, STATES + '\nlevels = { price = "p" }', r"\[2\].levels: only a book"),
        (STATES, STATES + '\ninterval = "1m"', r"\[2\].interval"),
        (STATES, STATES + '\nrounded = ["price"]', r"\[2\].rounded"),
        ('format = "%Y-%m-%d"', 'format = "day-s"', r"\[4\].effective.format: day-s"),
        ('format = "%Y-%m-%d"', 'format = "date"', r"\[4\].effective: 'date'"),
        ('symbol = "sym", bids', 'symbol = "@", bids', r"\[5\].fields: @ is"),
        (WORDS, 'action = "split"', r"\[4\]: either action"),
        (', bids = "b", asks = "a"', "", r"\[5\].fields: a book"),
        ('container = "json"', 'container = "csv"', "no arrays|no levels"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_names_its_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in DESK
    (tmp_path / "form.toml").write_text(DESK.replace(old, new))
    with pytest.raises(FormatError, match=says):
        load_format(tmp_path / "form.toml", of_messages=True)


def test_an_action_of_one_kind_needs_its_field(tmp_path: Path) -> None:
    text = DESK.replace(WORDS, 'action = "split"').replace('action = "what", factor = "ratio", ', "")
    (tmp_path / "form.toml").write_text(text)
    with pytest.raises(FormatError, match=r"\[4\].fields.factor: missing"):
        load_format(tmp_path / "form.toml", of_messages=True)


CELLS = """
description = "no header, and no time"
container = "csv"
header = false
[[records]]
kind = "trade"
venue = "X"
symbol = "AAA"
time = { format = "receive" }
fields = { price = 0, size = 1 }
"""


def test_a_body_may_be_a_message_or_a_file(tmp_path: Path) -> None:
    """Files come first: a message's format is what only messages can be."""
    received = DESK.replace('format = "epoch-ms"', 'format = "receive"')
    (tmp_path / "desk.toml").write_text(
        received.replace('field = "at", ', "").replace('field = "$.at", ', "")
    )
    (tmp_path / "tape.toml").write_text(FILE)
    desk, tape = (BodyFormat.load(str(tmp_path / f"{name}.toml")) for name in ("desk", "tape"))
    assert (desk.of_messages, tape.of_messages) == (True, False)
    body = json.dumps([sent("t", px="1.5", qty="2"), sent("t", px="-1", qty="2"), sent("bell")]).encode()
    found = convert(body, desk, None, most=5, now_ns=NOW, signed={"X:BBB"})
    assert found.moments == [("X:AAA", NOW), ("X:*", NOW)]
    assert [(number, error.reason) for number, error in found.errors] == [(0, "price")]
    found = convert(body, desk, None, most=5, now_ns=NOW, signed={"X:AAA"})
    assert (found.usable, found.errors) == (3, [])
    (tmp_path / "cells.toml").write_text(CELLS)
    cells = BodyFormat.load(str(tmp_path / "cells.toml"))
    for line in (b"1.5,2", b"1.5,2,more", b"1.5,2"):
        assert convert(line, cells, None, most=5, now_ns=NOW).usable == 1, "a body is a file of its own"
    with pytest.raises(TooMany):
        convert(body, desk, None, most=2, now_ns=NOW)
    with pytest.raises(FormatError, match=r"none\.toml"):
        BodyFormat.load(str(tmp_path / "none.toml"))
