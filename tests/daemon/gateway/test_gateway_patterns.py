"""Which symbols get sessions by patterns: against a plain count of records and names."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.errors import ConfigError
from daemon.config.instruments import Instrument, read_instruments
from daemon.config.load import load_config
from daemon.config.schema import PatternConfig, SessionConfig
from daemon.gateway.patterns import Patterns, Unopened
from daemon.progress import Opened
from feeds.codec import MalformedRecord
from feeds.decimals import Fixed, parse_fixed
from feeds.durations import Duration
from feeds.market_data import Bar, Quote, Trade
from tests.kit import SECOND, START

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
PRICES = st.decimals("0.0001", "1000", places=4).map(lambda each: f"{each.normalize():f}")


def tick(symbol: str, price: str = "10.5") -> Trade:
    venue, _, name = symbol.partition(":")
    value = parse_fixed(price)
    return Trade(venue=venue, symbol=name, ts_event=START, ts_recv=START, price=value, size=Fixed(10**18))


def opened(
    patterns: Patterns, symbol: str, price: str = "10.5", names: tuple[str, ...] = ()
) -> SessionConfig:
    found = patterns.consider(tick(symbol, price), START, names)
    assert isinstance(found, SessionConfig), found
    patterns.add(found)
    return found


@given(
    st.lists(st.tuples(st.sampled_from(["B:A", "B:B", "B:C", "W:A", "V:X"]), PRICES), max_size=30),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_each_symbol_opens_with_its_nth_record_until_there_are_enough(
    records: list[tuple[str, str]], least: int, most: int
) -> None:
    patterns = Patterns([PatternConfig(match="[BW]:*", least_records=least, max_sessions=most)], {})
    prices: dict[str, list[str]] = {}
    sessions: dict[str, SessionConfig] = {}
    for symbol, price in records:
        if symbol in sessions:
            continue
        found = patterns.consider(tick(symbol, price), START, [])
        if not fnmatchcase(symbol, "[BW]:*"):
            assert found is Unopened.UNMATCHED
        elif len(sessions) == most:
            assert found is Unopened.LIMIT
        else:
            prices.setdefault(symbol, []).append(price)
            if len(prices[symbol]) < least:
                assert found is Unopened.ACTIVITY
                continue
            assert isinstance(found, SessionConfig)
            patterns.add(found)
            sessions[symbol] = found
            decimals = max(len(each.partition(".")[2]) for each in prices[symbol])
            assert (found.symbol, found.price_decimals) == (symbol, decimals)
    assert {each.symbol for each in patterns.opened.values()} == sessions.keys()


@given(st.lists(st.text("AB:/-_. %é", min_size=1, max_size=70), unique=True, max_size=8))
def test_names_are_valid_and_differ(symbols: list[str]) -> None:
    patterns = Patterns([PatternConfig(match="V:*")], {})
    names: list[str] = []
    for symbol in symbols:
        found = patterns.consider(tick(f"V:{symbol}"), START, names)
        assert isinstance(found, SessionConfig)
        names.append(found.name)
    assert len(set(names)) == len(names)
    assert all(NAME.match(name) and len(name) <= 64 for name in names)


def test_too_few_records_within_the_time_count_from_the_start_again() -> None:
    patterns = Patterns(
        [PatternConfig(match="V:*", least_records=2, least_records_within=Duration(SECOND))], {}
    )
    record = tick("V:A")
    assert patterns.consider(record, 0, []) is Unopened.ACTIVITY
    assert patterns.consider(record, SECOND + 1, []) is Unopened.ACTIVITY
    assert isinstance(patterns.consider(record, SECOND + 2, []), SessionConfig)


def test_the_first_pattern_that_matches_counts() -> None:
    special = PatternConfig(match="V:A*", exclude=("V:AB",), price_decimals=4, interval=Duration(SECOND))
    patterns = Patterns([special, PatternConfig(match="V:*")], {})
    assert opened(patterns, "V:AA").price_decimals == 4
    assert opened(patterns, "V:AB").interval is None
    patterns.remove("V-AA")
    patterns.remove("unknown")
    assert set(patterns.opened) == {"V-AB"}


def test_quotes_and_bars_tell_decimals_too() -> None:
    patterns = Patterns([PatternConfig(match="V:*")], {})
    common = {"venue": "V", "ts_event": START, "ts_recv": START}
    one, two = parse_fixed("1.25"), parse_fixed("1.125")
    quote = Quote(**common, symbol="Q", bid=one, ask=two)  # type: ignore[arg-type]  # a Quote's
    bar = Bar(**common, symbol="B", open=one, high=two, low=one, close=one, volume=one, interval_ns=SECOND)  # type: ignore[arg-type]  # a Bar's
    for record in (quote, bar):
        found = patterns.consider(record, START, [])
        assert isinstance(found, SessionConfig)
        assert found.price_decimals == 3


def test_instruments_say_how_fine_prices_and_sizes_are_and_whether_they_are_signed() -> None:
    known = Instrument("V:A", tick_size="0.05", lot_size="0.1", signed=True)
    patterns = Patterns([PatternConfig(match="V:*")], {"V:A": known})
    found = opened(patterns, "V:A", "-1")
    assert (found.price_decimals, found.volume_decimals, found.signed) == (2, 1, True)
    with pytest.raises(MalformedRecord):
        patterns.consider(tick("V:B", "0"), START, [])
    explicit = Patterns([PatternConfig(match="V:*", price_decimals=5)], {"V:A": known})
    assert opened(explicit, "V:A").price_decimals == 5


def test_what_was_opened_before_comes_back_unless_it_was_silent_for_too_long() -> None:
    patterns = Patterns([PatternConfig(match="V:*", idle_timeout=Duration(SECOND))], {})
    before = Opened("V:A", 3)
    found = patterns.reopened("name", before, SECOND)
    assert found is not None
    assert (found.name, found.symbol, found.price_decimals) == ("name", "V:A", 3)
    assert patterns.reopened("name", before, SECOND + 1) is None
    assert patterns.reopened("name", Opened("W:A", 3), 0) is None


def test_one_that_was_refused_waits() -> None:
    patterns = Patterns([PatternConfig(match="V:*")], {})
    patterns.refuse("V:A", 0)
    assert patterns.consider(tick("V:A"), SECOND, []) is Unopened.REFUSED
    assert isinstance(patterns.consider(tick("V:A"), 10 * SECOND, []), SessionConfig)


def test_replaced_patterns_count_their_own_sessions() -> None:
    patterns = Patterns([PatternConfig(match="V:*", max_sessions=1)], {})
    opened(patterns, "V:A")
    assert patterns.consider(tick("W:A"), START, []) is Unopened.UNMATCHED
    assert list(patterns.unmatched) == ["W:A"]
    patterns.replace([PatternConfig(match="[VW]:*", max_sessions=2)], {})
    assert list(patterns.unmatched) == []
    opened(patterns, "W:A")
    assert patterns.consider(tick("V:B"), START, []) is Unopened.LIMIT


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("symbol,tick_size\nV:A,0.25\n", {"V:A": 2}),
        ("\ufeffsymbol,price_decimals,name\r\nV:A,3,x\r\nV:B,,\r\n", {"V:A": 3, "V:B": None}),
        (
            '[{"symbol": "V:A", "tick_size": 0.5}, {"symbol": "V:B", "tick_size": "1e-8"}]',
            {"V:A": 1, "V:B": 8},
        ),
        ('{"V:A": {"price_decimals": 0}}', {"V:A": 0}),
    ],
)
def test_instruments_files_are_csv_or_json(tmp_path: Path, text: str, found: dict[str, int | None]) -> None:
    (tmp_path / "file").write_text(text)
    read = read_instruments(str(tmp_path / "file"))
    assert {symbol: each.decimals for symbol, each in read.items()} == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("symbol,tick_size\nV:A,0\n", "a step must be above 0"),
        ("symbol,tick_size\nA,1\n", "symbol"),
        ("symbol,price_decimals\nV:A,19\n", "<= 18"),
        ("[1]", "Expected"),
        ("[{", "truncated"),
        (None, "cannot read"),
    ],
)
def test_an_instruments_file_that_is_wrong_is_refused_whole(
    tmp_path: Path, text: str | None, why: str
) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_instruments(str(path))
    (problem,) = refused.value.problems
    assert problem.key == "symbols.instruments_file"
    assert why in problem.message


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ('match = "V:*"\nretention_tokens = 1', "sessions[1].retention_tokens"),
        ('match = "V:*"\nname = "a"', "sessions[1].name"),
        ('match = "V"', "sessions[1].match"),
        ('match = "V:*"\nprice_jump = 0.5', "sessions[1].price_jump"),
        ('match = "V:*"\n[[sessions]]\nname = "a"\nsymbol = "V:B"', "sessions[2].name"),
    ],
)
def test_problems_name_the_tables_of_the_file(tmp_path: Path, tables: str, key: str) -> None:
    path = tmp_path / "foretick.toml"
    path.write_text(f'[[sessions]]\nname = "a"\nsymbol = "V:A"\n[[sessions]]\n{tables}\n')
    with pytest.raises(ConfigError) as refused:
        load_config(path, environment={})
    assert [each.key for each in refused.value.problems] == [key]


def test_questions_name_sessions_by_patterns(tmp_path: Path) -> None:
    from daemon.config.changes import questions_by_session

    path = tmp_path / "foretick.toml"
    path.write_text(
        'standing = "none"\n[[questions]]\nname = "q"\ntext = "Up?"\nsessions = ["V-*"]\n'
        + "".join(f'[[sessions]]\nname = "{n}"\nsymbol = "V:{n}"\n' for n in ("V-A", "b"))
    )
    found = questions_by_session(load_config(path, environment={}))
    assert {name: len(each) for name, each in found.items()} == {"V-A": 1, "b": 0}
