"""Clients over HTTP and ZeroMQ, measured small."""

from bench.query import cached, events
from bench.run import SuiteRun


def test_every_client_gets_every_event() -> None:
    figures = list(events.measure(SuiteRun(quick=True)))
    (delivered,) = (figure for figure in figures if figure.name == "delivery P50")
    assert delivered.n == delivered.setting["clients"] * events.QUICK.events
    assert all(figure.ours > 0 and figure.ratio for figure in figures if figure.unit == "ms")


def test_cached_answers_are_beside_bare_servers_of_the_same_loop() -> None:
    figures = list(cached.measure(SuiteRun(quick=True)))
    trips = [figure for figure in figures if figure.name.startswith("cached")]
    assert {(figure.setting["over"], figure.setting["condition"]) for figure in trips} == {
        (over, condition)
        for over in ("ZeroMQ", "HTTP")
        for condition in ("engine idle", "other sessions flooded")
    }
    assert all(figure.ratio for figure in trips)
