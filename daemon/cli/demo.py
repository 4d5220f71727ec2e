"""`foretick demo`: the whole pipeline on embedded defaults, in about a minute.

The daemon is the real one, in two processes. The broker is librdkafka's mock cluster, in this process.
"""

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop
from rich.console import Console
from rich.live import Live
from rich.table import Table

from daemon.api.client import QueryClient
from daemon.api.messages import AskReply
from daemon.cli.options import stopping_on_signals, tell_if_cold
from daemon.cli.truth import Tally, Truth
from daemon.config.schema import (
    OFF,
    BarsConfig,
    Config,
    HttpConfig,
    LogConfig,
    NamedModel,
    ProcessConfig,
    QueryConfig,
    QuestionConfig,
    RecoveryConfig,
    SessionConfig,
    SinkConfig,
    SourceConfig,
)
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from daemon.logs import set_up_logging
from feeds.codec import decode_message, encode, make_headers
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.durations import Duration, parse_duration
from feeds.kafka_progress import TOPIC as PROGRESS_TOPIC
from feeds.kafka_sink import KafkaSink
from feeds.kafka_source import KafkaSource
from feeds.market_data import Answer, Trade
from feeds.mock_broker import NOTICE, MockBroker
from feeds.synthetic import INSTRUMENTS, Instrument, SyntheticTape
from flash.question import PAPER_SIX
from ingest.compact import CompactSpec
from metrics.catalogue import BY_NAME
from tapes.rules import RULES

TRADES, ANSWERS, DEAD = "md.trades.v1", "answers.v1", "dlq.v1"
ANSWERS_KEPT = "answers.jsonl"
HISTORY_S = 60
ASKED = next(rule for rule in RULES if rule.name == "breakout")
WORDS = "words"
"""What the demo calls the model of --model."""
COMMENT = QuestionConfig(
    name="comment",
    text="Describe in one sentence what the price did.",
    max_tokens=40,
    ask_every=Duration(parse_duration("5s")),
    sessions=(f"*-{WORDS}",),
)
WINDOW = 64
"""Bars that the tape model sees; set here so that the truth covers as many."""
INTERVAL = Duration(parse_duration("1s"))
_SLOT_NS = 50_000_000
"""Trades in the same slot of event time are sent together."""
HTTP_PORT, QUERY_PORT = 7800, 7801
"""Where other commands look for a daemon."""


@dataclass
class Seen:
    """What the consumer has read from the answers topic."""

    truth: Truth
    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)
    count: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


def _port_option(name: str, default: int, what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    port, why = click.IntRange(0, 65535), f"{what}; 0, or one that is taken: any"
    return click.option(name, type=port, default=default, show_default=True, help=why)


@click.command("demo")
@click.option("--forever", is_flag=True, help="run until Ctrl-C; a second Ctrl-C ends at once")
@click.option(
    "--seconds", type=click.IntRange(min=5), default=40, show_default=True, help="seconds of live tape"
)
@click.option("--seed", type=int, default=7, show_default=True, help="random seed of the synthetic tape")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="write the configuration (foretick.toml) and the answers (answers.jsonl) to this directory, for "
    "`foretick explain` and `foretick reproduce` while the demo runs",
)
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    help="directory or GGUF file of a language model, which reads the first symbol beside the tape model, "
    "answers the same questions, and one in its own words",
)
@_port_option("--http-port", HTTP_PORT, "port to serve HTTP at")
@_port_option("--query-port", QUERY_PORT, "port of the query socket")
def command(
    forever: bool,
    seconds: int,
    seed: int,
    keep: Path | None,
    model: Path | None,
    http_port: int,
    query_port: int,
) -> None:
    """Run the whole pipeline on embedded defaults: no broker, no GPU, no download."""
    sys.exit(demo(None if forever else seconds, seed, keep, model, http_port, query_port))


def demo(
    seconds: int | None,
    seed: int,
    keep: Path | None = None,
    model: Path | None = None,
    http_port: int = 0,
    query_port: int = 0,
) -> int:
    """Run for ``seconds`` of live tape (None: until Ctrl-C); the exit status."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    set_up_logging(LogConfig(level="warning"), "demo")
    with MockBroker() as broker:
        broker.create_topic(TRADES, 3)
        broker.create_topic(ANSWERS, 1)
        broker.create_topic(DEAD, 1)
        broker.create_topic(PROGRESS_TOPIC, 1)
        console.print(f"[bold]Foretick demo[/bold] - {NOTICE} ({broker.bootstrap})")
        config = demo_config(broker.bootstrap, _free(http_port), _free(query_port), model)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / ANSWERS_KEPT).write_bytes(b"")
        return uvloop.run(_demo(console, config, seconds, seed, keep))


def _free(port: int) -> int:
    """``port``, or 0 where something listens at it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port


def demo_file(config: Config, endpoint: str, http_port: int) -> str:
    """The demo's configuration as a file, for other commands. ``endpoint``: of its query socket."""
    kafka = config.sink.kafka
    assert kafka is not None  # see `demo_config`
    lines = [f'bars.interval = "{config.bars.interval}"']
    lines += [f'query.endpoint = "{endpoint}"', f"http.port = {http_port}"]
    for session in config.sessions:
        lines += ["", "[[sessions]]", f'name = "{session.name}"', f'symbol = "{session.symbol}"']
        names = ("price_decimals", "retention_tokens", "retention_records")
        lines += [f"{name} = {getattr(session, name)}" for name in names]
        lines += [f'model = "{session.model}"'] if session.model else []
    for model in config.models:
        lines += ["", "[[models]]", f'name = "{model.name}"', f"path = {json.dumps(model.path)}"]
    for asked in config.questions:
        lines += ["", "[[questions]]", f'name = "{asked.name}"', f'text = "{asked.text}"']
        lines += [f"max_tokens = {asked.max_tokens}", f'ask_every = "{asked.ask_every}"']
        lines += [f"sessions = {json.dumps(asked.sessions)}"]
    lines += ["", "[source]", 'kind = "kafka"', "", "[source.kafka]"]
    lines += [f'bootstrap = "{kafka.bootstrap}"', f'topics = ["{TRADES}"]', "", "[sink.kafka]"]
    lines += [f'bootstrap = "{kafka.bootstrap}"', f'topic = "{kafka.topic}"', f'dlq = "{kafka.dlq}"']
    return "\n".join(lines) + "\n"


def demo_config(bootstrap: str, http_port: int = 0, query_port: int = 0, model: Path | None = None) -> Config:
    """Three symbols as three sessions, the paper's six questions each, one-second bars.

    With a ``model`` it reads the first symbol in a session of its own.
    """
    sessions = [
        SessionConfig(
            name=i.symbol.lower(),
            symbol=i.key,
            price_decimals=_decimals(i),
            retention_tokens=2048,
            retention_records=WINDOW,
        )
        for i in INSTRUMENTS
    ]
    if model is not None:
        first = sessions[0]
        named = {"name": f"{first.name}-{WORDS}", "model": WORDS, "retention_tokens": 4096}
        sessions.append(msgspec.structs.replace(first, **named))
    return Config(
        sessions=tuple(sessions),
        models=() if model is None else (NamedModel(name=WORDS, path=str(model.absolute())),),
        questions=() if model is None else (COMMENT,),
        bars=BarsConfig(interval=INTERVAL),
        source=SourceConfig(kind="kafka", kafka=KafkaSourceConnector(bootstrap=bootstrap, topics=(TRADES,))),
        sink=SinkConfig(kafka=KafkaSinkConnector(bootstrap=bootstrap, topic=ANSWERS, dlq=DEAD)),
        query=QueryConfig(endpoint=f"tcp://127.0.0.1:{query_port or '*'}"),
        http=HttpConfig(port=http_port),
        process=ProcessConfig(spare_engine=False),
        recovery=RecoveryConfig(interval=OFF),
    )


def _decimals(instrument: Instrument) -> int:
    return 5 if instrument.tick == 10_000 else 2


async def _demo(
    console: Console, config: Config, seconds: int | None, seed: int, keep: Path | None = None
) -> int:
    stop = asyncio.Event()
    specs = {i.key: CompactSpec(_decimals(i)) for i in INSTRUMENTS}
    seen = Seen(Truth(INTERVAL, WINDOW, specs))
    bootstrap = config.source.kafka.bootstrap if config.source.kafka else ""
    with stopping_on_signals(stop):
        console.print("starting the engine process ...")
        tell_if_cold()
        began = time.monotonic()
        gateway = make_gateway(config)
        await gateway.start()
        assert gateway.query is not None  # see `demo_config`
        if keep is not None:
            text = demo_file(config, gateway.query.endpoint, gateway.http.port)
            (keep / "foretick.toml").write_text(text)
        beside = "".join(f", and {Path(each.path).name}" for each in config.models)
        console.print(
            f"ready in {time.monotonic() - began:.1f} s: model [bold]{gateway.status.model}[/bold], "
            f"trained on generated tapes{beside}\n"
            f"  live page http://127.0.0.1:{gateway.http.port}/, query socket {gateway.query.endpoint}"
        )
        kept = None if keep is None else keep / ANSWERS_KEPT
        async with _running(_consume(bootstrap, seen, kept)):
            async with _running(_produce(bootstrap, seed, seen.truth, stop)):
                reply = await _watch(console, gateway, seen, seconds, stop)
            clean = await gateway.stop()
            await _read_back(gateway, seen)
    _close(console, gateway, seen, reply)
    return 0 if clean else 1


async def _produce(bootstrap: str, seed: int, truth: Truth, stop: asyncio.Event) -> None:
    """Produce a minute of history at once, then one second of tape a second."""
    sink = KafkaSink("demo-tape", bootstrap)
    await sink.start()
    tapes = [SyntheticTape(instrument, seed) for instrument in INSTRUMENTS]
    second = time.time_ns() // 1_000_000_000 - HISTORY_S
    try:
        while not stop.is_set():
            trades = [trade for tape in tapes for trade in tape.second(second * 1_000_000_000)]
            trades.sort(key=lambda trade: trade.ts_event)
            for slot, due in groupby(trades, key=lambda trade: trade.ts_event // _SLOT_NS):
                await asyncio.sleep(max(0.0, (slot + 1) * _SLOT_NS / 1e9 - time.time()))
                sent = list(due)
                for trade in sent:
                    truth.add(trade)
                await asyncio.gather(*(_send(sink, trade) for trade in sent))
            second += 1
    finally:
        await sink.stop()


async def _send(sink: KafkaSink, trade: Trade) -> None:
    headers = make_headers(trade, "json", "demo", trade.seq)
    await sink.publish(TRADES, trade.key.encode(), encode(trade), headers)


async def _consume(bootstrap: str, seen: Seen, kept: Path | None) -> None:
    source = KafkaSource("demo-answers", bootstrap, [ANSWERS], None)
    await source.start()
    try:
        async for batch in source.batches():
            for message in batch:
                answer = decode_message(message.payload)
                if isinstance(answer, Answer):
                    seen.answers[answer.session, answer.question] = answer
                    seen.count += 1
                    seen.truth.judge(answer)
            if kept is not None:
                with kept.open("ab") as file:
                    file.write(b"".join(message.payload + b"\n" for message in batch))
            seen.arrived.set()
    finally:
        await source.stop()


async def _read_back(gateway: Gateway, seen: Seen) -> None:
    """Give the consumer a moment to read the last acknowledged answers."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while seen.count < _total(gateway, "foretick_answers_total"):
                seen.arrived.clear()
                await seen.arrived.wait()


def _total(gateway: Gateway, counter: str) -> int:
    """A counter's sum over the sessions."""
    return int(sum(gateway.store.value(counter, session=session.name) for session in gateway.config.sessions))


async def _watch(
    console: Console, gateway: Gateway, seen: Seen, seconds: int | None, stop: asyncio.Event
) -> AskReply | None:
    """Show the answers as they arrive; halfway, ask one question over the query socket."""
    began = time.monotonic()
    ask_at = (seconds or 30) / 2
    asking: asyncio.Task[AskReply] | None = None
    reply: AskReply | None = None
    failed = gateway.failed
    with Live(_table(seen), console=console, auto_refresh=False, transient=False) as live:
        while not stop.is_set() and not failed.done():
            elapsed = time.monotonic() - began
            if seconds is not None and elapsed > seconds:
                break
            if asking is None and elapsed > ask_at and gateway.query is not None:
                asking = asyncio.create_task(asyncio.to_thread(_ask, gateway.query.endpoint))
            if asking is not None and reply is None and asking.done():
                reply = asking.result()
            if console.is_terminal:
                live.update(_table(seen), refresh=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await stop.wait()
        live.update(_table(seen), refresh=True)
    if failed.done():
        failed.result()
    return reply


def _ask(endpoint: str) -> AskReply:
    with QueryClient(endpoint) as client:
        return client.ask(INSTRUMENTS[0].symbol.lower(), ASKED.text, choices=ASKED.choices)


def _columns(title: str, left: Sequence[str], right: Sequence[str], **options: Any) -> Table:
    """An empty table: columns of text, then of numbers."""
    table = Table(title=title, **options)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def _table(seen: Seen) -> Table:
    title = f"standing answers from topic {ANSWERS}: {seen.count} so far"
    numbers = ("probability", "logit gap", "version", "staleness ms")
    table = _columns(title, ("symbol", "question", "answer"), numbers)
    table.add_column("flags")
    previous = ""
    order = {question.name: i for i, question in enumerate(PAPER_SIX)}
    for (session, question), answer in sorted(
        seen.answers.items(), key=lambda i: (i[0][0], order.get(i[0][1], len(order)))
    ):
        table.add_row(
            _symbol(answer) if session != previous else "",
            question,
            answer.text,
            "" if answer.probability is None else f"{answer.probability:.2f}",
            f"{answer.logit_gap:.2f}",
            str(answer.data_version),
            f"{answer.staleness_ns / 1e6:.1f}",
            " ".join(answer.flags),
        )
        previous = session
    return table


def _symbol(answer: Answer) -> str:
    """With the name of the model that --model added."""
    added = answer.session.endswith(f"-{WORDS}")
    return f"{answer.symbol}, {answer.model}" if added else answer.symbol


def _close(console: Console, gateway: Gateway, seen: Seen, reply: AskReply | None) -> None:
    if reply is not None:
        console.print(
            f"\n[bold]asked over the query socket:[/bold] {ASKED.text}\n  [bold]{reply.text}[/bold], "
            f"version {reply.data_version}, logit gap {reply.logit_gap:.2f}, "
            f"{reply.latency_ns / 1e6:.1f} ms\n"
        )
    store = gateway.store
    counts = _columns("counts", ("",), ("",))
    rows = {
        "records read": store.value("foretick_records_total", source="kafka"),
        "bars": _total(gateway, "foretick_bars_total"),
        "data versions": _total(gateway, "foretick_versions_total"),
        "answers acknowledged": _total(gateway, "foretick_answers_total"),
        "answers read back": seen.count,
        "updates coalesced": _total(gateway, "foretick_flash_coalesced_total"),
        "records late": _total(gateway, "foretick_records_late_total"),
        "forward passes": store.value("foretick_batches_total"),
    }
    for name, value in rows.items():
        counts.add_row(name, f"{value:,.0f}")
    console.print(counts)
    stages = _columns("latency by stage, ms", ("stage",), ("count", "p50", "p99"))
    for labels in store.series(BY_NAME["foretick_stage_seconds"]):
        count = store.count("foretick_stage_seconds", **labels)
        if count:
            p50, p99 = (store.quantile("foretick_stage_seconds", q, **labels) * 1e3 for q in (0.5, 0.99))
            stages.add_row(labels["stage"], f"{count:,}", f"{p50:.3f}", f"{p99:.3f}")
    console.print(stages)
    console.print(right_table(seen.truth))


def right_table(truth: Truth) -> Table:
    """How many answers were right, by question, against the labels computed from the trades."""
    table = _columns(
        "answers against the labels of docs/questions.md, computed from the trades",
        ("question", "model"),
        ("answers", "undefined", "right", "share", "mean probability"),
        caption="undefined: the rule has no right answer there, such as too few bars",
    )
    models = sorted({model for _, model in truth.tallies})
    for question, model in product((each.name for each in PAPER_SIX), models):
        tally = truth.tallies.get((question, model), Tally())
        table.add_row(
            question,
            model,
            f"{tally.judged + tally.undefined:,}",
            f"{tally.undefined:,}",
            f"{tally.right:,}",
            f"{tally.right / tally.judged:.1%}" if tally.judged else "",
            f"{tally.probability / tally.calibrated:.1%}" if tally.calibrated else "",
        )
    return table


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a background coroutine for the duration of a block; its failure ends the block."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()  # no effect on a finished task
        (result,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(result, Exception):
        raise result
