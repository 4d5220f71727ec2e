"""From a bar's close to a webhook's receiver, beside the same HTTP client that posts as many bytes to it."""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2
import msgspec
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.data.ticks import AnswerTimes, LiveSource
from bench.figures import Figure, Goal, Setting, latency
from bench.query.bare import bare_server
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.processes import child
from bench.stream.serving import config, rest, serving, windowed
from daemon.config import schema
from daemon.gateway.webhooks import webhook_routes
from feeds.connector import SinkRoute
from feeds.decimals import parse_fixed
from feeds.durations import Duration
from feeds.synthetic import Instrument
from feeds.webhook_signatures import read_keys, signed
from metrics.store import MetricStore

_S = 1_000_000_000
_AFTER, _BARE = "close to answers, and a bare POST", "a bare POST"
_GOAL = Goal(1.5)
_SWING = 100
"""Hundredths by which the price of every other second is higher."""
_HOOK, _BENCH = "desk", "bench-"

Arrived = tuple[str, int, bytes]
"""Id, Unix ns when all of it was there, body."""


@dataclass(frozen=True)
class WebhooksPlan:
    """A signal every other second of each session, for ``seconds``; ``window``: bars before the first one."""

    sessions: tuple[int, ...] = (1, 10)
    seconds: int = 240
    window: int = 64


QUICK = WebhooksPlan(sessions=(1,), seconds=8, window=4)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A daemon of two processes with the tape model, bars of a second and six standing questions a session;
    trades, ten a second and session, are made on the wall clock in the gateway's process. A condition on the
    answer to `exact_value` begins to hold with every other bar, and its signal is posted to a receiver in a
    process of its own, which notes when it has all of it. The time runs from the trade that closes the bar.
    Signals wait in a file until they are delivered, as by default. *A bare POST*: a request of as many bytes
    and the same headers, by the same HTTP client in the gateway's process and while the daemon goes on, to
    the same receiver. *Answers to webhook* runs from the last answer of the version, as it is handed to a
    sink that keeps it.
    """
    plan = run.sized(WebhooksPlan(), QUICK)
    for sessions in plan.sessions:
        found = uvloop.run(_measure(plan, sessions, run.threads))
        setting: Setting = {"sessions": sessions}
        least = [answers + bare for answers, bare in zip(found.answers_ns, found.bare_ns, strict=True)]
        whole = [answers + behind for answers, behind in zip(found.answers_ns, found.behind_ns, strict=True)]
        beside = setting, "", _AFTER, least
        yield from latency("bar close to webhook", whole, *beside, paired=False, goals={0.99: _GOAL})
        bare = setting, "", _BARE, found.bare_ns
        yield from latency("answers to webhook", found.behind_ns, *bare, paired=False)
        yield Figure("signals delivered", found.delivered, "share", setting=setting)


@dataclass(frozen=True)
class _Found:
    """By signal, ns: from the bar's close to its last answer, from there to the receiver; of a bare POST.

    ``delivered``: of the signals that there should have been.
    """

    answers_ns: list[int]
    behind_ns: list[int]
    bare_ns: list[int]
    delivered: float


class _Swinging(LiveSource):
    """Prices are higher in every other second."""

    def price(self, number: int, at: int) -> int:
        """See `LiveSource.price`."""
        return super().price(number, at) + at // _S % 2 * _SWING


async def _measure(plan: WebhooksPlan, sessions: int, threads: int) -> _Found:
    markets = instruments(sessions, 1)
    source, sink = _Swinging(markets, 10 * sessions, plan.window), AnswerTimes()
    with tempfile.TemporaryDirectory() as folder, child(_receive) as receiver:
        settings = _settings(Path(folder), receiver.recv(), plan, markets, threads)
        hooks = webhook_routes(settings, MetricStore.local({"webhook": [_HOOK]}))
        async with serving(settings, source, [SinkRoute(sink, "answers.v1"), *hooks]) as gateway:
            await rest(gateway)
            source.live.set()
            await asyncio.sleep(plan.seconds)
            arrived = await _arrived(receiver)
            times = _times(arrived, source, sink)
            posted = await _posted(settings.webhooks[0], [body for _, _, body in arrived][: len(times)])
            noted = {id_: at for id_, at, _ in await _arrived(receiver)}
        receiver.send(None)
    bare = [noted[id_] - sent for id_, sent in posted.items()]
    expected = (plan.seconds - 1) * sessions / 2
    answers, behind = zip(*times, strict=True)
    return _Found(list(answers), list(behind), bare, min(1.0, len(times) / expected))


def _settings(
    folder: Path, port: int, plan: WebhooksPlan, markets: list[Instrument], threads: int
) -> schema.Config:
    """A signal of each session, whose level is between the prices of two seconds."""
    secret = folder / "webhook.secret"
    secret.touch(mode=0o600)
    secret.write_text(f"whsec_{base64.b64encode(bytes(range(24))).decode()}\n")
    hook = schema.WebhookConfig(_HOOK, f"http://127.0.0.1:{port}/signals", str(secret))
    source = LiveSource(markets, 1, 0)
    signals = []
    for number, market in enumerate(markets):
        session = windowed(market, plan.window)
        level = parse_fixed(f"{(source.price(number, 0) + _SWING // 2) / 100:.2f}")
        clause = schema.ClauseConfig(session=session.name, question="exact_value", above=level)
        signals.append(schema.SignalConfig(f"{session.name}-up", (clause,), withheld_by=()))
    return msgspec.structs.replace(
        config(schema.ModelConfig(threads=threads), [windowed(market, plan.window) for market in markets]),
        source=schema.SourceConfig(backlog_policy="skip"),
        sink=schema.SinkConfig(),
        signals=tuple(signals),
        webhooks=(hook,),
        recovery=schema.RecoveryConfig(Duration(60 * _S), str(folder / "snapshots")),
    )


def _times(arrived: list[Arrived], source: LiveSource, sink: AnswerTimes) -> list[tuple[int, int]]:
    """Of each signal, ns from the bar's close to its last answer, and from there to the receiver.

    Raises MeasurementFailed where there is none.
    """
    answered: dict[tuple[str, int], int] = {}
    for at, symbol, bar in sink.seen:
        answered[symbol, bar] = max(at, answered.get((symbol, bar), 0))
    found = []
    for _, at, body in arrived:
        signal = json.loads(body)
        of = signal["symbol"].partition(":")[2], signal["as_of"] // _S
        if (closed := source.closed.get(of)) and of in answered:
            found.append((answered[of] - closed, at - answered[of]))
    if not found:
        raise MeasurementFailed("no signal came")
    return found


async def _posted(hook: schema.WebhookConfig, bodies: list[bytes]) -> dict[str, int]:
    """Post each body; Unix ns when each was begun, by its id."""
    keys, begun = read_keys("secret_file", hook.secret_file), dict[str, int]()
    async with httpx2.AsyncClient(trust_env=False, follow_redirects=False) as client:
        for number, body in enumerate(bodies):
            id_ = f"{_BENCH}{number}"
            headers = signed(keys, id_, int(time.time()), body)
            begun[id_] = time.time_ns()
            async with client.stream("POST", hook.url, content=body, headers=headers, timeout=None) as reply:
                assert reply.status_code == 200
            await asyncio.sleep(0.02)
    return begun


async def _arrived(receiver: Connection) -> list[Arrived]:
    """What the receiver has got since it was asked last."""
    receiver.send("what came")
    found: list[Arrived] = await asyncio.to_thread(receiver.recv)
    return found


def _receive(pipe: Connection) -> None:
    """A receiver of webhooks; sends "ready", its port, and what came whenever it is asked, until None."""
    arrived: list[Arrived] = []

    async def take(request: Request) -> Response:
        body = await request.body()
        arrived.append((request.headers["webhook-id"], time.time_ns(), body))
        return Response()

    async def serve() -> None:
        async with bare_server(Route("/signals", take, methods=["POST"])) as port:
            pipe.send("ready")
            pipe.send(port)
            while await asyncio.to_thread(pipe.recv) is not None:
                pipe.send(list(arrived))
                arrived.clear()

    uvloop.run(serve())
