"""Prometheus and Alertmanager beside a daemon: faults, and what an operator gets to know of them.

The clock of alerts runs `FASTER` times as fast: windows, waits, scrapes and evaluations are so much shorter,
and so are Alertmanager's. What the daemon does by its own clock takes as long as ever. An alert is told in
time if it comes within a minute, by the fast clock, of when its condition has held for as long as it waits.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from click.testing import CliRunner

from daemon.cli import doctor
from dashboards import alerts
from tests.e2e.faults.fault import Fault
from tests.e2e.faults.watched import Watched
from tests.kit import until_slowly
from tests.kit.alertmanager import AlertmanagerServer, Receiver, Told, committed
from tests.kit.daemon import logging_put_back
from tests.kit.programs import need
from tests.kit.prometheus import PrometheusServer

FASTER = float(os.environ.get("TESTS_FASTER", "20"))
"""How much faster the clock of alerts is; less on a machine that is busy."""
SCRAPE_S = 15.0
"""Between scrapes, by the fast clock; rules are evaluated as often."""
IN_TIME_S = 60.0
PATIENCE_S = 300.0
"""For an alert, by the machine's clock."""
FOUND = alerts.read()
ALERTS = {each.name: each for each in FOUND.alerts}


B = TypeVar("B", bound=Watched)


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    ``held_s``: from its cause to the alert's condition, by the machine's clock; ``told_s``: from there to the
    notification; ``late_s``: the same less what the alert waits, by the fast clock.
    ``besides``: what else the doctor found that was not there before.
    """

    fault: str
    alert: str
    severity: str
    summary: str
    held_s: float
    told_s: float
    late_s: float
    check: str
    finding: str
    step: str
    besides: tuple[str, ...]


class Watch:
    """One Prometheus and one Alertmanager, which look at one daemon after the other.

    Each fault has the daemon as an instance of another name, so no window has anything of an earlier fault.
    """

    def __init__(self, prometheus: PrometheusServer, receiver: Receiver) -> None:
        self.prometheus, self.receiver = prometheus, receiver
        self._expected: dict[str, tuple[str, ...]] = {}
        self._reported: set[tuple[str, str]] = set()
        self._known: set[str] = set()

    async def see(self, fault: Fault[B], bench: B) -> Outcome:
        """Cause the fault, and return what came of it. Fails where another alert fires, or none."""
        await self.look_at(bench, fault.name, fault.alert)
        await asyncio.sleep(fault.before_s / FASTER)
        begun = time.time()
        async with fault.cause(bench):
            told, since = await self._told(fault)
            findings = await examined(bench)
        await bench.healthy()
        self.leave()
        self._expected[fault.name] = (fault.alert, *fault.after)
        assert fault.says in told.summary, told.summary
        return self._outcome(fault, told, since, begun, findings)

    async def look_at(self, bench: Watched, instance: str, alert: str = "") -> None:
        """Watch a daemon by the name of a fault, whose ``alert`` may fire, "" for none."""
        self._expected[instance] = (alert,)
        await asyncio.to_thread(self.prometheus.watch, bench.target, instance, bench.scheme)

    def leave(self) -> None:
        """All is well; what follows is not scraped."""
        self.check()
        self.prometheus.leave()

    async def learn(self, bench: Watched) -> None:
        """What the doctor finds now is not of a fault."""
        self._known |= {each["check"] for each in await examined(bench)}

    def check(self) -> None:
        """Nobody was told of anything but what was expected, of this fault and all before."""
        others = {
            (instance, name): each.summary
            for instance, told in self.receiver.fired().items()
            for name, each in told.items()
            if name not in self._expected.get(instance, ()) and (instance, name) not in self._reported
        }
        self._reported |= set(others)  # the faults behind it are none the worse
        assert not others, others

    async def _told(self, fault: Fault[B]) -> tuple[Told, float]:
        """The notification, and since when its condition has held; before, it may have come and gone."""
        instance, since = fault.name, 0.0

        def look() -> Told | None:
            nonlocal since
            self.check()
            since = active(self.prometheus, fault.alert, instance) or since
            found = self.receiver.fired()
            return found.get(instance, {}).get(fault.alert) or found.get("foretick", {}).get(fault.alert)

        await until_slowly(look, PATIENCE_S, f"{fault.alert}; {self.prometheus.firing()} fire")
        told = look()
        assert told is not None
        return told, since or told.at

    def _outcome(
        self, fault: Fault[B], told: Told, since: float, begun: float, findings: list[dict[str, Any]]
    ) -> Outcome:
        new = {each["check"]: each for each in findings if each["check"] not in self._known}
        own = next(
            (each for each in findings if each["check"] == fault.check and fault.shows in each["seen"]), None
        )
        self._known |= {fault.check} if own and "above 0" in own["seen"] else set()
        waits = alerts.seconds(ALERTS[fault.alert].wait) / FASTER
        return Outcome(
            fault.name,
            fault.alert,
            told.severity,
            told.summary,
            since - begun,
            told.at - since,
            max(0.0, told.at - since - waits) * FASTER,
            fault.check,
            own["seen"] if own else "",
            own["step"] if own else "",
            tuple(check for check in new if check != fault.check),
        )


def active(prometheus: PrometheusServer, alert: str, instance: str) -> float:
    """Since when an alert's condition has held, Unix time; 0 where it does not."""
    found = prometheus.query(f'ALERTS_FOR_STATE{{alertname="{alert}",instance="{instance}"}}')
    return min((float(each["value"][1]) for each in found), default=0.0)


async def examined(bench: Watched) -> list[dict[str, Any]]:
    """What `foretick doctor` has a next step for."""
    with logging_put_back():
        arguments = ["--json", "--config", str(bench.config)]
        done = await asyncio.to_thread(CliRunner().invoke, doctor.command, arguments)
    assert done.stdout, done.stderr
    return [each for each in json.loads(done.stdout) if each["step"]]


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Both programs, on a fast clock."""
    rules = alerts.prometheus(FOUND, FASTER)
    every = f"{SCRAPE_S / FASTER * 1000:.0f}ms"
    with (
        Receiver() as receiver,
        AlertmanagerServer(need("prometheus-alertmanager"), committed(receiver.url, FASTER)) as manager,
        PrometheusServer(
            need("prometheus"), "", rules, alertmanager=manager.target, every=every
        ) as prometheus,
    ):
        yield Watch(prometheus, receiver)
