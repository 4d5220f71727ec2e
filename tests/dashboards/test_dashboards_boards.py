"""The dashboards: committed as built, catalogue names only, valid grid, series in a real Prometheus."""

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import dashboards
from daemon.api.http_server import HttpServer
from daemon.supervision import Tasks
from dashboards import alerts
from dashboards.boards import BOARDS
from dashboards.expressions import STAGE, buckets, gauge, increase, labelled, per_second, quantile
from dashboards.panels import Board
from metrics.catalogue import BY_NAME, CLASSES, METRICS, STAGES
from metrics.export import exposition
from metrics.store import MetricStore
from tests.kit.prometheus import check_panels, expressions

FOLDER = Path(dashboards.__file__).parent
SELECTOR = re.compile(r"(foretick_\w+)(?:\{([^}]*)\})?")
BOARD = {board.name: json.loads(board.build()) for board in BOARDS}


@pytest.fixture(params=BOARD)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BOARD[request.param]


def family(name: str) -> str:
    """The catalogue's name of a series: a histogram's series have suffixes."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return base if base in BY_NAME and BY_NAME[base].kind == "histogram" else name


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_the_committed_file_is_what_the_code_builds(board: Board):
    committed = (FOLDER / f"{board.name}.json").read_text()
    assert committed == board.build(), "run: foretick dashboards build"


def test_every_expression_uses_names_labels_and_values_of_the_catalogue(board):
    for title, expression in expressions(board):
        found = SELECTOR.findall(expression)
        assert found, f"{title} reads no metric: {expression}"
        # a join has the labels of both sides
        joined = {label for name, _ in found for label in BY_NAME[family(name)].labels}
        others = joined if "group_left" in expression else set()
        for name, selector in found:
            metric = BY_NAME[family(name)]
            for label, pattern in re.findall(r'(\w+)=~"([^"]*)"', selector):
                assert label in {*metric.labels, "instance"}, title
                allowed = metric.values.get(label)
                assert allowed is None or set(pattern.split("|")) <= set(allowed), title
            for labels in re.findall(r"by \(([^)]*)\)", expression):
                assert set(labels.split(", ")) <= {*metric.labels, *others, "le"}, title


def test_every_metric_is_on_a_panel_or_in_an_alert():
    shown = {
        family(name)
        for each in BOARD.values()
        for _, e in expressions(each)
        for name, _ in SELECTOR.findall(e)
    }
    found = alerts.read()
    shown |= {name for each in found.alerts for name, _ in SELECTOR.findall(found.expression(each))}
    assert shown == set(BY_NAME)


def test_every_series_follows_the_variables(board):
    for title, expression in expressions(board):
        for name, selector in SELECTOR.findall(expression):
            labels = BY_NAME[family(name)].labels
            if "group_left" not in expression or name != "foretick_scheduler_info":
                assert 'instance=~"$instance"' in selector, title
            for label in ("session", "tenant"):
                assert label not in labels or f'{label}=~"${label}"' in selector, title


def test_panels_have_their_own_ids_and_do_not_overlap(board):
    panels = board["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        columns, rows = range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])
        for cell in itertools.product(columns, rows):
            assert taken.setdefault(cell, panel["title"]) == panel["title"]


def test_every_query_of_a_panel_has_its_own_reference_and_the_chosen_data_source(board):
    for panel in board["panels"]:
        targets = panel.get("targets", [])
        assert len({target["refId"] for target in targets}) == len(targets)
        assert all(target["datasource"]["uid"] == "${datasource}" for target in targets)


@pytest.mark.parametrize(
    "write",
    [
        lambda: per_second("foretick_nothing_total"),
        lambda: per_second("foretick_engine_up"),
        lambda: gauge("foretick_batches_total"),
        lambda: per_second("foretick_batches_total", "session"),
        lambda: gauge("foretick_pool_blocks", state="lent"),
        lambda: gauge("foretick_pool_blocks", session="a"),
        lambda: quantile(STAGE, 0.5, "stage", stage="ring_wait|lunch"),
        lambda: buckets(STAGE, "source", stage="forward"),
        lambda: increase("foretick_batches_total", state="free"),
        lambda: quantile("foretick_transaction_seconds", 0.5),
        lambda: quantile("foretick_batches_total", 0.5),
        lambda: quantile("foretick_ttft_seconds", 0.5, "reason"),
        lambda: buckets("foretick_ttft_seconds", "le", **{"class": "stream"}),
        lambda: labelled("foretick_waiting_requests", "class", "foretick_scheduler_info", "k"),
        lambda: labelled("foretick_waiting_requests", "k", "foretick_scheduler_info", "policy"),
    ],
)
def test_what_the_catalogue_does_not_list_cannot_be_written(write):
    with pytest.raises((KeyError, ValueError), match="foretick_"):
        write()


def record(store: MetricStore, round_: int) -> None:
    """One second of a daemon at work, in every series."""
    for metric in METRICS:
        for labels in store.series(metric):
            if metric.kind == "histogram":
                store.observe(metric.name, 1_000_000 * (round_ + 1), **labels)
            elif metric.kind == "counter":
                store.inc(metric.name, 5, **labels)
            else:
                store.set(metric.name, float(round_ + 1), **labels)


@pytest.mark.prometheus
async def test_every_panel_finds_series_in_a_real_prometheus(start_prometheus):
    labels = {"session": ["a", "b"], "source": ["kafka"], "sink": ["kafka"], "partition": ["t/0"]}
    labels |= {"policy": ["klpm"], "eviction": ["cost"], "tenant": ["desk"], "venue": ["X"]}
    labels |= {"webhook": ["desk"], "question": ["trend"]}
    store = MetricStore.local(labels)
    server = HttpServer(lambda names: exposition(store), lambda: [])
    await server.start(Tasks())
    try:
        prometheus = await asyncio.to_thread(start_prometheus, f"127.0.0.1:{server.port}")
        for round_ in range(4):
            record(store, round_)
            await asyncio.to_thread(prometheus.wait_for, f"foretick_engine_up == {round_ + 1}")
        for each in BOARD.values():
            await asyncio.to_thread(prometheus.wait_for_panels, each)
        # The check detects a panel without series and one that is not PromQL.
        broken = {"panels": [{"title": "t", "targets": [{"expr": "foretick_nothing"}]}]}
        assert await asyncio.to_thread(check_panels, prometheus.url, broken) == ["t: foretick_nothing"]
        broken["panels"][0]["targets"][0]["expr"] = "rate(foretick"
        with pytest.raises(RuntimeError, match="refuses"):
            await asyncio.to_thread(check_panels, prometheus.url, broken)
        # It shows the recorded values: 1 to 4 ms, within the exposition's bounds.
        p99 = await asyncio.to_thread(
            prometheus.query, 'histogram_quantile(0.99, foretick_stage_seconds_bucket{stage="forward"})'
        )
        assert 0.001 <= float(p99[0]["value"][1]) <= 0.0042
        waiting = await asyncio.to_thread(prometheus.query, "foretick_waiting_requests")
        assert {series["metric"]["class"] for series in waiting} == set(CLASSES)
        stages = await asyncio.to_thread(prometheus.query, "foretick_stage_seconds_count")
        assert {series["metric"]["stage"] for series in stages} == set(STAGES)
    finally:
        await server.stop()
        store.close()
