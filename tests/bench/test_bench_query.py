"""Clients that listen over HTTP, measured small."""

from __future__ import annotations

from bench.query.events import QUICK, measure
from bench.run import SuiteRun


def test_every_client_of_both_transports_gets_every_event() -> None:
    figures = list(measure(SuiteRun(quick=True)))
    assert {figure.setting["transport"] for figure in figures} == {"SSE", "WebSocket"}
    (clients,) = QUICK.clients
    delivered = [figure for figure in figures if figure.name == "delivery P50"]
    assert [figure.n for figure in delivered] == [clients * QUICK.events] * 2
    assert all(figure.ours > 0 for figure in delivered)
