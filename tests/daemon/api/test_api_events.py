"""Events for clients: who gets which, in what order, and what is said to be lost. Against a plain list."""

import asyncio
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from daemon.api.events import EventFilter, Events, Lost, Subscription, sse
from daemon.api.messages import QueryError
from daemon.api.sse import EventsReply
from daemon.tenants import LOCAL, Client, Tenant
from feeds.market_data import DataUpdated, DeadLetter, FlashReady
from metrics.store import MetricStore
from tests.kit import until

EPOCH, KEPT = 0xABC, 4
ME = Client(LOCAL, "me")


def hub(max_clients: int = 10) -> Events:
    return Events(EPOCH, MetricStore.local({}), max_clients=max_clients, kept=KEPT)


def update(n: int, session: str = "a") -> DataUpdated:
    return DataUpdated(session=session, data_version=n, as_of=0, bars=1)


def ready(n: int, session: str = "a") -> FlashReady:
    return FlashReady(session=session, data_version=n, as_of=0, answers=1)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=24),
    st.lists(st.integers(0, 24), max_size=6),
    st.sampled_from(
        [EventFilter(), EventFilter(frozenset("a")), EventFilter(kinds=frozenset(["flash_ready"]))]
    ),
)
def test_each_client_gets_its_events_in_order_or_is_told_how_many_it_lost(
    published: list[tuple[str, bool]], takes: list[int], chosen: EventFilter
) -> None:
    events = hub()
    client = events.subscribe(ME, chosen, "sse")
    waiting: list[str] = []
    dropped = 0
    for n, (session, is_ready) in enumerate(published, 1):
        events.publish(ready(n, session) if is_ready else update(n, session))
        if session in (chosen.sessions or "ab") and (is_ready or not chosen.kinds):
            waiting.append(f"abc.{n}")
            if len(waiting) > KEPT:
                dropped += 1
                waiting.pop(0)
        if n in takes:
            lost, got = client.take()
            assert lost == ([Lost(dropped, True, "slow")] if dropped else [])
            assert [event.id for event in got] == waiting
            assert not client.news.is_set()
            waiting, dropped = [], 0
    assert client.news.is_set() == bool(waiting)


NO_ID = ("x", "1", ".", "abc.", ".1", "abc.-1", "abc.1x", "abc." + "9" * 20, "abc.²", "ABC.1", "9" * 9999)
IDS = st.one_of(
    st.builds("{}.{}".format, st.sampled_from(["abc", "abd", "9"]), st.integers(0, 14)),
    st.sampled_from(NO_ID),
    st.text(min_size=1),
)


def comes_back(published: int, after: str, *, selects: bool) -> tuple[list[Lost], list[int]]:
    """What a client that knows ``after`` is told to have lost, and gets, by the numbers of a plain list."""
    kept = list(range(max(1, published - KEPT + 1), published + 1))
    oldest = (kept[0] if kept else 1) - 1
    epoch, _, number = after.partition(".")
    readable = number.isascii() and number.isdigit() and len(number) < 20
    if epoch in ("abd", "9") and readable:
        return [Lost("unknown", False, "restarted", f"abc.{oldest}")], kept
    if epoch != "abc" or not readable or int(number) > published:
        return [Lost("unknown", False, "unknown_id", f"abc.{published}")], []
    gone = max(0, oldest - int(number))
    lost = [Lost(gone, not selects, "expired", f"abc.{oldest}")] if gone else []
    return lost, [n for n in kept if n > int(number)]


@given(st.integers(0, 12), IDS, st.booleans())
def test_a_client_that_comes_back_gets_what_is_kept_or_what_comes_from_now_on(
    published: int, after: str, filtered: bool
) -> None:
    events = hub()
    for n in range(1, published + 1):
        events.publish(update(n))
    chosen = EventFilter(frozenset("a")) if filtered else EventFilter()
    client = events.subscribe(ME, chosen, "sse", after)
    lost, got = client.take()
    expected, numbers = comes_back(published, after, selects=filtered)
    assert (lost, [event.id for event in got]) == (expected, [f"abc.{n}" for n in numbers])
    # with the id that it is given it goes on there, and is told no more of what it has missed
    if lost:
        again = events.subscribe(ME, chosen, "sse", lost[0].after)
        assert again.take() == ([], got)
    events.publish(update(published + 1))
    assert [event.id for event in client.take()[1]] == [f"abc.{published + 1}"]


def test_only_so_many_clients_listen_and_one_that_leaves_makes_room() -> None:
    events = hub(max_clients=1)
    client = events.subscribe(ME, EventFilter(frozenset(["a", "b"])), "sse")
    with pytest.raises(QueryError, match="1 clients"):
        events.subscribe(ME, EventFilter(), "websocket")
    events.unsubscribe(client)
    events.publish(update(1))
    assert client.take() == ([], [])
    assert events.subscribe(ME, EventFilter(), "websocket")


def test_dead_letters_are_not_for_clients_and_closing_lets_all_go() -> None:
    events = hub()
    client = events.subscribe(ME, EventFilter(), "sse")
    events.publish(DeadLetter(error="", reason="", topic="", partition=0, offset=0, payload=b"secret"))
    assert client.take() == ([], [])
    events.close()
    assert client.closed
    assert client.news.is_set()
    with pytest.raises(QueryError, match="stopping"):
        events.subscribe(ME, EventFilter(), "sse")


def test_an_event_is_written_once_for_all() -> None:
    events = hub()
    clients = [events.subscribe(ME, EventFilter(), "sse") for _ in range(2)]
    events.publish(update(1))
    first, second = (client.take()[1][0] for client in clients)
    assert first.sse is second.sse
    assert first.sse == b"id: abc.1\nevent: data_updated\ndata: " + first.json + b"\n\n"
    assert sse("lost", b"{}") == b"event: lost\ndata: {}\n\n"


async def test_a_quiet_stream_is_pinged_and_its_events_come_between() -> None:
    events, written, gone = hub(), bytearray(), asyncio.Event()

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        written.extend(message.get("body", b""))

    stream = EventsReply(events, events.subscribe(ME, EventFilter(), "sse"), ping_s=0.02)
    serving = asyncio.ensure_future(stream({"type": "http"}, receive, send))
    for number in (1, 2):
        await until(lambda n=number: written.count(b": ping\n\n") >= 2 * n)
        events.publish(ready(number))
        await until(lambda n=number: written.count(b"id: abc.") == n)
    gone.set()
    await serving
    assert events.subscribe(ME, EventFilter(), "sse", after="abc.2").take() == ([], [])


class Line:
    """A connection that lasts."""

    def __init__(self, tenant: Tenant) -> None:
        self.client = Client(tenant, "line")

    def dismiss(self) -> None:
        pass


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["connect", "go", "more", "less"])), max_size=40)
)
def test_a_connection_takes_a_place_and_each_further_subscription_another(
    steps: list[tuple[int, str]],
) -> None:
    events, lines = hub(8), [Line(Tenant(name)) for name in ("a", "a", "b")]
    held: dict[int, list[Subscription]] = {}

    def places(name: str = "") -> int:
        return sum(max(1, len(on)) for n, on in held.items() if name in ("", lines[n].client.tenant.name))

    for n, step in steps:
        line = lines[n]
        full = places() >= 8 or places(line.client.tenant.name) >= 4
        if step == "connect" and n not in held:
            with pytest.raises(QueryError) if full else nullcontext():
                events.connect(line)
                held[n] = []
        elif step == "more" and n in held:
            with pytest.raises(QueryError) if full and held[n] else nullcontext():
                held[n].append(events.subscribe(line.client, EventFilter(), "websocket", "", line))
        elif step == "less" and held.get(n):
            events.unsubscribe(held[n].pop(0))
        elif step == "go" and n in held:
            for subscription in held.pop(n):
                events.unsubscribe(subscription)
            events.disconnect(line)
        assert events._clients["websocket"] == places()
        assert all(events._share._held[name] == places(name) for name in "ab")


def test_a_tenant_has_half_of_all_places_or_as_many_as_it_is_given() -> None:
    events = hub(8)
    few, more = Client(Tenant("few", max_listeners=1), "x"), Client(Tenant("more", max_listeners=6), "x")
    events.subscribe(few, EventFilter(), "sse")
    with pytest.raises(QueryError, match="of this tenant"):
        events.subscribe(few, EventFilter(), "zeromq")
    for _ in range(6):
        events.subscribe(more, EventFilter(), "sse")
    with pytest.raises(QueryError, match="6 clients"):
        events.subscribe(more, EventFilter(), "sse")
    events.subscribe(ME, EventFilter(), "sse")
    with pytest.raises(QueryError, match="8 clients"):
        events.subscribe(ME, EventFilter(), "sse")
