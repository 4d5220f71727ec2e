"""Every panel of the Latency dashboard finds its series in a Prometheus that scrapes a running daemon."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import dashboards
from daemon.api.client import QueryClient
from tests.e2e.process import Replaying, until_slowly
from tests.prometheus_server import check_panels, expressions

pytestmark = pytest.mark.prometheus


async def test_every_panel_shows_a_daemon_at_work(replaying: Replaying, start_prometheus) -> None:
    daemon, session = replaying.daemon, replaying.session
    dashboard = json.loads((Path(dashboards.__file__).parent / "latency.json").read_text())
    prometheus = await asyncio.to_thread(start_prometheus, f"127.0.0.1:{daemon.http_port}")
    with QueryClient(replaying.endpoint) as client:
        await asyncio.to_thread(client.ask, session, "Rise or fall?", 1, ("UP", "DOWN"))
    await until_slowly(lambda: daemon.metric("foretick_answers_total") >= 12)
    await asyncio.to_thread(prometheus.wait_for_scrapes, 4)
    assert await asyncio.to_thread(check_panels, prometheus.url, dashboard) == []
    assert len(expressions(dashboard)) > 20
    # Prometheus has the daemon's values
    answered = daemon.metric("foretick_answers_total")

    def scraped() -> bool:
        (series,) = prometheus.query(f'foretick_answers_total{{session="{session}"}}')
        return float(series["value"][1]) >= answered

    await until_slowly(scraped)
    (up,) = prometheus.query("foretick_engine_up")
    assert up["value"][1] == "1"
    p99 = prometheus.query('histogram_quantile(0.99, foretick_stage_seconds_bucket{stage="end_to_end"})')
    assert 0 < float(p99[0]["value"][1]) < 10
