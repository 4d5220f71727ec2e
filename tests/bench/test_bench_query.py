"""Clients over HTTP and ZeroMQ, measured small."""

import pytest
from prometheus_client import generate_latest

from bench.query import cached, decisions, events, scrape, webhooks
from bench.run import SuiteRun
from metrics.export import exposition
from metrics.store import MetricStore


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_every_client_gets_every_event() -> None:
    figures = list(events.measure(SuiteRun(quick=True)))
    (delivered,) = (figure for figure in figures if figure.name == "delivery P50")
    assert delivered.n == delivered.setting["clients"] * events.QUICK.events
    assert all(figure.ours > 0 and figure.ratio for figure in figures if figure.unit == "ms")


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_cached_answers_are_beside_bare_servers_of_the_same_loop() -> None:
    figures = list(cached.measure(SuiteRun(quick=True)))
    trips = [figure for figure in figures if figure.name.startswith("cached")]
    assert {(figure.setting["over"], figure.setting["condition"]) for figure in trips} == {
        (over, condition)
        for over in ("ZeroMQ", "HTTP")
        for condition in ("engine idle", "other sessions flooded")
    }
    assert all(figure.ratio for figure in trips)


def test_a_signal_of_every_other_bar_reaches_its_receiver_beside_a_bare_post() -> None:
    figures = {figure.name: figure for figure in webhooks.measure(SuiteRun(quick=True))}
    whole, behind = (figures[f"{name} P50"] for name in ("bar close to webhook", "answers to webhook"))
    assert whole.n == behind.n > 0
    assert whole.ratio
    assert behind.ratio
    assert whole.ours > behind.ours > 0
    assert figures["bar close to webhook P99"].goal is not None


def test_ten_typed_questions_are_beside_a_bare_route_and_one_pass() -> None:
    figures = {figure.name: figure for figure in decisions.measure(SuiteRun(threads=1, quick=True))}
    assert all(figure.ours > 0 and figure.ratio for figure in figures.values())
    assert figures["ready P99"].goal is not None
    assert figures["right after a bar P50"].goal is not None
    assert (figures["ready P50"].n, figures["right after a bar P50"].n) == (20, 3)


def test_a_scrape_is_beside_the_same_series() -> None:
    figures = {figure.name: figure for figure in scrape.measure(SuiteRun(quick=True))}
    assert figures["scrape P50"].ratio
    store = MetricStore.local({"session": ["a", "b"], "source": ["kafka"], "sink": ["kafka"]})
    ours, other = scrape.series(exposition(store)), scrape.series(generate_latest(scrape.registry_of(store)))
    alike = [sorted(line for line in each if b"_bucket{" not in line) for each in (ours, other)]
    assert alike[0] == alike[1]
