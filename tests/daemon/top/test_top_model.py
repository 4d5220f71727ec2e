"""What `foretick top` makes of two readings: rates, quantiles, rows, panels and waterfalls."""

from collections.abc import Sequence

import pytest
from rich.console import Console, RenderableType

from daemon.top import panels
from daemon.top.scrape import Growth, Scrape, parse
from daemon.top.snapshot import (
    COLUMNS,
    FAMILIES,
    Reading,
    Row,
    chosen,
    per_second,
    shown,
    snapshot,
)
from daemon.traces.recorded_trace import Span
from metrics.catalogue import BY_NAME
from tests.kit.top import listed_answer, session_info

STAGE = "foretick_stage_seconds"
OLD = """
# TYPE foretick_stage_seconds histogram
foretick_stage_seconds_bucket{stage="end_to_end",le="0.01"} 100.0
foretick_stage_seconds_bucket{stage="end_to_end",le="0.02"} 100.0
foretick_stage_seconds_bucket{stage="end_to_end",le="+Inf"} 100.0
foretick_stage_seconds_count{stage="end_to_end"} 100.0
foretick_stage_seconds_sum{stage="end_to_end"} 0.5
foretick_stage_seconds_bucket{stage="bars",le="+Inf"} 4.0
foretick_stage_seconds_count{stage="bars"} 4.0
foretick_stage_seconds_sum{stage="bars"} 1.0
foretick_records_total{source="a\\"b"} 50.0
foretick_records_total{source="c"} 10.0
foretick_source_up{source="a\\"b"} 1.0
foretick_source_up{source="c"} 0.0
foretick_records_lost_upstream_total{source="c"} 3.0
foretick_ring_fill_ratio{source="all"} 0.25
foretick_ring_dropped_total{source="all"} 2.0
foretick_consumer_lag_records{partition="t/0"} 40.0
foretick_consumer_lag_records{partition="t/1"} 2.0
foretick_venue_delay_seconds{venue="V"} -0.0021
foretick_waiting_requests{class="flash"} 5.0
foretick_live_requests{class="flash"} 6.0
foretick_batch_tokens_total{class="flash"} 0.0
foretick_preemptions_total{class="flash",by_class="pool"} 1.0
foretick_pool_blocks{state="free"} 30.0
foretick_pool_blocks{state="used"} 10.0
foretick_host_blocks{state="free"} 0.0
foretick_host_blocks{state="used"} 0.0
foretick_engine_up 1.0
foretick_bars_total{session="a"} 1.0
"""


def grown(text: str, **counts: float) -> str:
    """The scrape with these lines' values in place of their own; a key is a part of a line."""
    lines = text.splitlines()
    for part, value in counts.items():
        found = [n for n, line in enumerate(lines) if part in line]
        assert found, part
        for n in found:
            lines[n] = f"{lines[n].rpartition(' ')[0]} {value}"
    return "\n".join(lines)


NEW = grown(
    OLD,
    **{
        'end_to_end",le="0.01"': 110.0,
        'end_to_end",le="0.02"': 118.0,
        'end_to_end",le="+Inf"': 120.0,
        'count{stage="end_to_end"': 120.0,
        'sum{stage="end_to_end"': 0.7,
        'records_total{source="a': 150.0,
        "batch_tokens": 2500.0,
    },
)


def scrape(text: str) -> Scrape:
    return parse(text, FAMILIES)


def reading(at: float, text: str, *names: str, version: int = 7) -> Reading:
    return Reading(at, tuple(session_info(name, data_version=version) for name in names), scrape(text))


def text_of(panel: RenderableType) -> list[list[str]]:
    """The words of each line."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(panel)
    return [line.split() for line in captured.get().splitlines()]


def test_only_the_families_that_are_shown_are_parsed() -> None:
    assert set(FAMILIES) <= BY_NAME.keys()
    assert all("session" not in BY_NAME[name].labels for name in FAMILIES)
    assert not scrape(OLD).by("foretick_bars_total", "session")
    assert scrape(OLD).by("foretick_records_total", "source") == {'a"b': 50.0, "c": 10.0}
    with pytest.raises(ValueError, match="float"):
        scrape("foretick_engine_up up")


def test_rates_are_of_the_time_between_two_scrapes() -> None:
    growth = Growth.between(scrape(OLD), scrape(NEW), 4.0)
    assert growth.rate("foretick_records_total") == 25.0
    assert growth.rate("foretick_records_total", source="c") == 0.0
    assert growth.mean(STAGE, stage="end_to_end") == pytest.approx(0.01)
    assert growth.mean(STAGE, stage="bars") is None
    assert Growth().rate("foretick_records_total") is None


def test_counters_that_fell_count_from_zero() -> None:
    again = scrape(grown(NEW, **{'records_total{source="a': 8.0, "batch_tokens": 3000.0}))
    assert again.has_fallen(scrape(NEW))
    growth = Growth.between(scrape(NEW), again, 2.0)
    assert growth.rate("foretick_records_total", source='a"b') == 4.0
    assert growth.rate("foretick_batch_tokens_total") == 1500.0, (
        "began again, too, and is beyond its old value"
    )
    gauge = scrape(grown(NEW, pool_blocks=0.0))
    assert not gauge.has_fallen(scrape(NEW))


@pytest.mark.parametrize(("q", "expected"), [(0.25, 0.005), (0.5, 0.01), (0.7, 0.015), (0.99, 0.02)])
def test_quantiles_are_linear_within_a_bucket(q: float, expected: float) -> None:
    growth = Growth.between(scrape(OLD), scrape(NEW), 4.0)
    assert growth.quantile(q, STAGE, stage="end_to_end") == pytest.approx(expected)


def test_there_is_no_quantile_without_buckets_or_observations() -> None:
    quiet = Growth.between(scrape(NEW), scrape(NEW), 4.0)
    assert quiet.quantile(0.5, STAGE, stage="end_to_end") is None
    busy = Growth.between(scrape(OLD), scrape(grown(OLD, **{'stage="bars"': 9.0})), 4.0)
    assert busy.quantile(0.5, STAGE, stage="bars") is None


def test_versions_a_second_are_of_sessions_that_were_there_before() -> None:
    old = reading(1.0, OLD, "aaa", "bbb", version=7)
    new = reading(3.0, NEW, "aaa", "ccc", version=10)
    assert [(row.info.name, row.versions_s) for row in snapshot(new, old).rows] == [
        ("aaa", 1.5),
        ("ccc", None),
    ]
    assert [row.versions_s for row in snapshot(new).rows] == [None, None]
    assert [row.versions_s for row in snapshot(reading(4.0, NEW, "aaa", version=1), new).rows] == [0.0]


def test_the_state_is_the_worst_of_a_session() -> None:
    well = session_info("a")
    states = [
        Row(each).state
        for each in (
            well,
            session_info("a", data_version=0),
            session_info("a", bars_waiting=1, data_version=0),
            session_info("a", silent=True, bars_waiting=1),
            session_info("a", halted=True, silent=True),
            session_info("a", owner_failure="timeout", halted=True),
        )
    ]
    assert states == ["ok", "no data", "late", "silent", "halted", "timeout"]


ROWS = [
    Row(session_info("btc", symbol="BINANCE:BTCUSDT", staleness_ns=5_000_000_000), 3.0),
    Row(session_info("eth", symbol="BINANCE:ETHUSDT", silent=True, staleness_ns=1), 9.0),
    Row(session_info("new", symbol="KRAKEN:ETHUSD", data_version=0, staleness_ns=0)),
]


@pytest.mark.parametrize(
    ("words", "names"),
    [("", "btc eth new"), ("BINANCE", "btc eth"), ("eth", "eth new"), ("eth silent", "eth"), ("zzz", "")],
)
def test_a_filter_is_words_of_name_symbols_and_state(words: str, names: str) -> None:
    assert [row.info.name for row in chosen(ROWS, words, 0, False)] == names.split()


def order(title: str, rows: Sequence[Row] = ROWS, *, reverse: bool = False) -> list[str]:
    column = [each.title for each in COLUMNS].index(title)
    return [row.info.name for row in chosen(rows, "", column, reverse)]


def test_rows_are_sorted_by_values_and_not_by_their_texts() -> None:
    assert order("age") == ["new", "eth", "btc"], "without data it has no age"
    assert order("age", reverse=True) == ["btc", "eth", "new"]
    assert order("versions/s", reverse=True) == ["eth", "btc", "new"]
    assert order("bars", ROWS[::-1]) == ["btc", "eth", "new"], "equals by name"
    assert order(
        "version", [Row(session_info("a", data_version=9)), Row(session_info("b", data_version=10))]
    ) == [
        "a",
        "b",
    ]


def test_a_session_without_data_has_no_age() -> None:
    texts = {column.title: column.text(ROWS[2]) for column in COLUMNS}
    assert (texts["age"], texts["daemon age"], texts["versions/s"]) == ("-", "-", "-")


def test_panels_show_what_the_scrapes_have() -> None:
    seen = snapshot(reading(5.0, NEW, "aaa", "bbb"), reading(1.0, OLD, "aaa", "bbb"))
    assert text_of(panels.feeds(seen)) == [
        ['a"b', "up", "25/s", "0", "lost"],
        ["c", "down", "0/s", "3", "lost"],
        ["ring", "of", "all", "25%", "2", "dropped"],
        ["t/0", "lag", "40", "42", "in", "all"],
        ["V", "delay", "-2.1", "ms"],
    ]
    assert text_of(panels.queues(seen))[1:] == [["flash", "5", "6", "625"]]
    assert text_of(panels.pool(seen)) == [
        ["device", "25%", "10", "of", "40", "blocks"],
        ["windows", "200", "tokens"],
        ["preempted", "0/s"],
    ]
    assert text_of(panels.stages(seen))[1:] == [
        ["end_to_end", "5", "10", "ms", "10", "ms", "20", "ms"],
    ]


def test_panels_of_one_reading_have_no_rates() -> None:
    seen = snapshot(reading(1.0, OLD))
    assert text_of(panels.feeds(seen))[0] == ['a"b', "up", "-/s", "0", "lost"]
    assert len(text_of(panels.stages(seen))) == 1
    nothing = snapshot(reading(1.0, ""))
    assert text_of(panels.pool(nothing)) == [["windows", "0", "tokens"], ["preempted", "-/s"]]


def test_a_waterfall_has_each_stage_at_its_place() -> None:
    spans = (
        Span("queue", 0, 2_000_000),
        Span("prefill", 3_000_000, 4_000_000),
        Span("decode", 7_000_000, 1_000_000),
    )
    lines = text_of(panels.bars(spans))
    assert [line[:4] for line in lines] == [
        ["queue", "2", "ms", "25%"],
        ["prefill", "4", "ms", "50%"],
        ["decode", "1", "ms", "12%"],
    ]
    assert [len(line[-1]) for line in lines] == [10, 20, 5]
    assert text_of(panels.bars([])) == [[]]


def test_texts_of_others_cannot_steer_the_terminal() -> None:
    assert panels.plain("\x1b[31m[red]x\n").plain == "·[31m[red]x·"
    assert panels.answer_row(listed_answer("up", value="1.5", probability=0.25, flags=("gap", "late"))) == (
        "up", "1.5", "0.000", "0.250", "-", "7", "0 us", "8 ms", "gap late",
    )  # fmt: skip
    assert panels.answer_row(listed_answer("up"))[1] == "UP"
    assert panels.answer_row(listed_answer("up", act=True))[4] == "yes"
    why = listed_answer("up", act=False, abstain_reason="few_labels")
    assert panels.answer_row(why)[4] == "no: few_labels"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 us"),
        (0.0218341, "21.8 ms"),
        (0.99996, "1000 ms"),
        (412.4, "412 s"),
        (600.0, "10 min"),
        (90_000.0, "25 h"),
        (-0.0021, "-2.1 ms"),
    ],
)
def test_times_have_a_unit_and_three_digits(seconds: float | None, text: str) -> None:
    assert shown(seconds) == text


def test_rates_are_short() -> None:
    assert [per_second(rate) for rate in (None, 0.0, 0.123, 25.0, 12_345.6)] == [
        "-",
        "0",
        "0.123",
        "25",
        "12,346",
    ]
