"""Clients that listen over HTTP, measured small."""

from __future__ import annotations

from bench.query import cached, kept
from bench.query.events import QUICK, measure
from bench.run import SuiteRun


def test_every_client_of_both_transports_gets_every_event() -> None:
    figures = list(measure(SuiteRun(quick=True)))
    assert {figure.setting["transport"] for figure in figures} == {"SSE", "WebSocket"}
    (clients,) = QUICK.clients
    delivered = [figure for figure in figures if figure.name == "delivery P50"]
    assert [figure.n for figure in delivered] == [clients * QUICK.events] * 2
    assert all(figure.ours > 0 for figure in delivered)


def test_cached_answers_are_beside_bare_servers_of_the_same_loop() -> None:
    figures = list(cached.measure(SuiteRun(quick=True)))
    trips = [figure for figure in figures if figure.name.startswith("cached")]
    assert {(figure.setting["over"], figure.setting["condition"]) for figure in trips} == {
        (over, condition)
        for over in ("ZeroMQ", "HTTP")
        for condition in ("engine idle", "other sessions flooded")
    }
    assert all(figure.ratio for figure in trips)
    rates = list(cached.rates(SuiteRun(quick=True)))
    assert [figure.setting["over"] for figure in rates] == ["ZeroMQ", "HTTP"]
    assert all(figure.ratio and figure.n == cached.QUICK.rounds for figure in rates)


def test_kept_responses_and_prefixes_by_length() -> None:
    figures = list(kept.measure(SuiteRun(quick=True)))
    tokens = {figure.setting["tokens"] for figure in figures}
    assert len(tokens) == len(kept.QUICK.words)
    assert [figure.name for figure in figures if figure.goal] == [
        *["another tenant's P50"] * len(kept.QUICK.words),
        "kept response P50",
        "kept prefix P50",
    ]
    assert all(figure.ratio for figure in figures)
