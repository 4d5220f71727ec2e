"""`[quality]`: which actions a kind has, splits, calendars, and what depends on them."""

import re

import pytest

from daemon.config.errors import ConfigError
from daemon.config.fingerprint import fingerprint, window_settings
from daemon.config.load import load_config
from daemon.config.schema import Config, SessionConfig
from daemon.engine.tape_feeder import feeds_of, policy_of
from daemon.gateway.wiring import silence_monitor
from ingest.feed_rules import actions_code
from ingest.lines import LineSpec
from metrics.feed_faults import ACTIONS, CONFIGURED, RULED

CALENDAR = {"venue": "V", "zone": "UTC", "hours": ["mon-fri 09:30-16:00"]}


def loaded(**values: object) -> Config:
    return load_config(None, {}, values)


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as raised:
        loaded(**values)
    return str(raised.value)


@pytest.mark.parametrize("kind", CONFIGURED, ids=lambda kind: kind.name)
def test_a_kind_has_its_actions_and_no_other(kind: object) -> None:
    name, actions = kind.name, kind.actions  # type: ignore[attr-defined]
    assert getattr(Config().quality, name) == actions[0]
    for action in ACTIONS:
        values = {f"quality.{name}": action, "bars.lateness": "1s"}
        if action in actions:
            assert getattr(loaded(**values).quality, name) == action
        else:
            assert re.search(
                rf"quality\.{name}: must be one of .*{actions[0]}.*not '{action}'", refusal(**values)
            )


def test_a_reordered_record_is_held_only_by_a_bar_that_stays_open() -> None:
    assert "quality.reordered: hold needs" in refusal(**{"quality.reordered": "hold"})


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"zone": "Nowhere"}, "quality.calendars[0]"),
        ({"hours": ["always"]}, "quality.calendars[0]"),
        ({"holidays": ["tomorrow"]}, "quality.calendars[0]"),
        ({"venue": "V:A"}, "quality.calendars[0].venue"),
    ],
)
def test_a_calendar_is_checked(changed: dict[str, object], key: str) -> None:
    assert f"{key}: " in refusal(**{"quality.calendars": [CALENDAR | changed]})


def test_a_venue_has_one_calendar() -> None:
    assert "is already quality.calendars[0]" in refusal(**{"quality.calendars": [CALENDAR, CALENDAR]})


@pytest.mark.parametrize("factor", [0, -2])
def test_a_split_has_a_factor_above_0(factor: int) -> None:
    split = {"symbol": "V:A", "at": "2026-01-01T00:00:00Z", "factor": factor}
    assert "quality.splits[0].factor: " in refusal(**{"quality.splits": [split]})


def test_what_bars_depend_on_is_in_the_hashes_and_silence_is_not() -> None:
    session = SessionConfig(name="a", symbol="V:A")
    before = Config()
    split = [{"symbol": "V:A", "at": "2026-01-01T00:00:00Z", "factor": 2.0}]
    for key, value, differs in (
        ("crossed", "drop", True), ("bad_tick_band", 9.0, True), ("splits", split, True),
        ("silent", "count", False), ("silence_factor", 9.0, False), ("calendars", [CALENDAR], False),
    ):  # fmt: skip
        after = loaded(**{f"quality.{key}": value})
        assert (fingerprint(after, session, ()) != fingerprint(before, session, ())) == differs, key
        assert (window_settings(after, session) != window_settings(before, session)) == differs, key


def test_the_engine_gets_the_actions_splits_and_venues_of_a_session() -> None:
    split = {"symbol": "W:B", "at": "2026-01-01T00:00:00Z", "factor": 4.0}
    config = loaded(**{"quality.crossed": "drop", "quality.bad_tick_band": 7.0, "quality.splits": [split]})
    names = {kind.name for kind in RULED}
    one, two = (
        SessionConfig(name="a", symbol="V:A"),
        SessionConfig(name="b", symbol="V:A", more_symbols=("W:B",)),
    )
    policy = policy_of(config, one)
    assert (policy.actions, policy.bad_tick_band, policy.venue_lag_ns) == (
        actions_code({"crossed": "drop"}),
        7,
        0,
    )
    feeds = feeds_of(config, two, {"V:A": 3, "W:B": 5}, 0, LineSpec())
    assert (feeds.symbols, feeds.venues, feeds.policy.venue_lag_ns) == ((3, 5), (0, 1), 2 * 10**9)
    assert feeds.splits == ((), ((1_767_225_600 * 10**9, 4.0),))
    assert {kind.name for kind in CONFIGURED} - {"silent"} <= names


def test_the_gateway_watches_with_the_calendars_of_its_venues() -> None:
    monitor = silence_monitor(loaded(**{"quality.calendars": [CALENDAR]}).quality)
    monitor.read({"V:A": 0})
    assert monitor.silence_ns("V:A", 10, 10) == 0
