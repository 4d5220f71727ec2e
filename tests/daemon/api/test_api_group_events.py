"""Events of a group: what a client misses and sees where sessions and clients move between daemons.

The oracle is a list of all that was published, once each.
"""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from daemon.api.events import EventFilter, Events, Lost, Subscription, id_of, positions_of
from daemon.tenants import LOCAL, Client, Tenant
from feeds.market_data import DataUpdated
from metrics.store import MetricStore
from tests.kit.engine_events import ANSWER

ME, PEER = Client(LOCAL, "me"), Client(LOCAL, "peer", forwarded=True)
ALL = EventFilter()


def update(version: int, session: str = "a", epoch: int = 1) -> DataUpdated:
    return DataUpdated(session=session, data_version=version, as_of=version, bars=1, epoch=epoch)


class Hubs:
    """The events of daemons that follow each other; what is passed on arrives when `pass_on` says so."""

    def __init__(self, number: int, kept: int = 64, ended: dict[str, int] | None = None) -> None:
        self.ends = {} if ended is None else ended
        self.stores = [MetricStore.local({}) for _ in range(number)]
        self.all = [
            Events(n + 1, store, max_clients=50, kept=kept, in_group=True, ended=self.ends.get)
            for n, store in enumerate(self.stores)
        ]
        self.links: dict[tuple[int, int], Subscription] = {}

    def follow(self, of: int, by: int) -> None:
        """As `daemon.gateway.peer_events` does."""
        before = self.all[by].reached()
        link = self.links[of, by] = self.all[of].subscribe(PEER, ALL, "zeromq", "0.0")
        for event in link.take()[1]:
            self.all[by].receive(event.start, event.number, event.message, before)

    def pass_on(self, of: int, by: int) -> None:
        for event in self.links[of, by].take()[1]:
            assert event.start == self.all[of].start, "only its own"
            self.all[by].receive(event.start, event.number, event.message)

    def repeated(self, at: int) -> float:
        return self.stores[at].value("foretick_peer_events_total", outcome="repeated")


def versions(client: Subscription) -> list[int]:
    return [event.message.data_version for event in client.take()[1]]


IDS = st.dictionaries(
    st.integers(0, (1 << 64) - 1).map("{:x}".format), st.integers(0, 10**19 - 1), min_size=1, max_size=64
)


@given(IDS)
def test_an_id_says_the_same_everywhere(positions: dict[str, int]) -> None:
    assert positions_of(id_of(positions)) == positions


@given(st.text(alphabet="0123456789abcdefx.,", max_size=50))
def test_what_is_no_id_is_none(text: str) -> None:
    found = positions_of(text)
    assert found is None or all(number >= 0 and int(start, 16) >= 0 for start, number in found.items())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("pass"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("move"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("come"), st.integers(0, 2), st.integers(0, 3)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(STEPS)
def test_a_client_of_any_daemon_gets_every_event_once(steps: list[tuple[str, int, int]]) -> None:
    """Sessions move, and so does the client, which may take a few of what waits before it does."""
    hubs = Hubs(3)
    for of in range(3):
        for by in range(3):
            if of != by:
                hubs.follow(of, by)
    owners, epochs, newest = [0, 1, 2], [1, 1, 1], [0, 0, 0]
    at, last, got = 0, hubs.all[0].newest, list[tuple[str, int]]()
    client = hubs.all[0].subscribe(ME, ALL, "sse")

    def take(most: int | None = None) -> None:
        nonlocal last
        lost, events = client.take()
        assert lost == []
        for event in events[:most]:
            got.append((event.session, event.message.data_version))
            last = event.id

    for step, one, other in steps:
        if step == "publish":
            for _ in range(other):
                newest[one] += 1
                hubs.all[owners[one]].publish(update(newest[one], "abc"[one], epochs[one]))
        elif step == "pass" and one != other:
            hubs.pass_on(one, other)
        elif step == "move":
            owners[one], epochs[one] = other, epochs[one] + 1
        elif step == "come":
            take(other)
            hubs.all[at].unsubscribe(client)
            at = one
            client = hubs.all[at].subscribe(ME, ALL, "sse", last)
            hubs.all[at].settle([each.start for each in hubs.all])
    for of, by in hubs.links:
        hubs.pass_on(of, by)
    take()
    every = [("abc"[n], version) for n in range(3) for version in range(1, newest[n] + 1)]
    assert sorted(got) == every, "each once"


def test_a_client_that_is_further_than_this_daemon_keeps_what_it_has() -> None:
    """An id that it gets says no less than the one that it came with; other clients' ids do."""
    hubs = Hubs(3)
    for of in (1, 2):
        hubs.follow(of, 0)
    hubs.all[2].publish(update(1))
    hubs.pass_on(2, 0)
    hubs.all[2].publish(update(2))
    further, here = (hubs.all[0].subscribe(ME, ALL, "sse", last) for last in ("1.0,3.2", "1.0,3.1"))
    hubs.all[1].publish(update(1, "b"))
    hubs.pass_on(1, 0)
    (last,) = [event.id for event in further.take()[1]]
    assert positions_of(last) == {"1": 0, "2": 1, "3": 2}
    again = hubs.all[0].subscribe(ME, ALL, "sse", last)
    hubs.pass_on(2, 0)
    assert versions(again) == []
    hubs.all[2].publish(update(3))
    hubs.pass_on(2, 0)
    assert (versions(further), versions(again), versions(here)) == ([3], [3], [1, 2, 3])
    assert not further.ahead


def test_what_the_next_owner_publishes_again_is_dropped_whichever_comes_first() -> None:
    one, two = Hubs(2), Hubs(2)
    answers = [
        replace(ANSWER, epoch=epoch, data_version=version, answer_id="a:q:5")
        for epoch, version in ((1, 4), (2, 5))
    ]
    for hubs, first in ((one, 0), (two, 1)):
        client = hubs.all[1].subscribe(ME, ALL, "sse")
        hubs.follow(0, 1)
        for each in (first, 1 - first):
            hubs.all[each].publish(answers[each])
            if each == 0:
                hubs.pass_on(0, 1)
        assert [event.message for event in client.take()[1]] == [answers[first]]
        assert hubs.repeated(1) == 1
    # the same epoch of one daemon is no repetition
    hub = Hubs(1).all[0]
    again = hub.subscribe(ME, ALL, "sse")
    for _ in range(2):
        hub.publish(answers[0])
    assert len(again.take()[1]) == 2


def test_what_the_next_engine_of_a_daemon_publishes_again_leaves_no_gap_in_its_numbers() -> None:
    hubs = Hubs(2)
    hubs.follow(0, 1)
    clients = [each.subscribe(ME, ALL, "sse") for each in hubs.all]
    for version, epoch in ((1, 1), (2, 1), (2, 2), (3, 2)):
        hubs.all[0].publish(update(version, epoch=epoch))
    hubs.pass_on(0, 1)
    for client in clients:
        lost, events = client.take()
        assert (lost, [event.message.data_version for event in events]) == ([], [1, 2, 3])
    assert (hubs.all[0].own, hubs.repeated(0), hubs.repeated(1)) == ("1.3", 1, 0)


def test_a_session_that_moved_to_a_daemon_not_known_before_misses_nothing() -> None:
    """What that one has published earlier, when the session was there before, is not sent again."""
    hubs = Hubs(3)
    hubs.all[2].publish(update(1, epoch=1))
    hubs.all[2].publish(update(1, "b", epoch=1))
    client = hubs.all[0].subscribe(ME, ALL, "sse")
    hubs.follow(1, 0)
    hubs.all[1].publish(update(2, epoch=2))
    hubs.pass_on(1, 0)
    hubs.all[2].publish(update(3, epoch=3))
    hubs.follow(2, 0)
    assert versions(client) == [2, 3]


def test_a_daemon_that_started_after_the_client_came_is_followed_from_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hubs = Hubs(2)
    monkeypatch.setattr("daemon.api.events.time.time_ns", lambda: 1)  # before the second one
    client = hubs.all[0].subscribe(ME, ALL, "sse")
    hubs.all[1].publish(update(1))
    hubs.follow(1, 0)
    assert versions(client) == [1]


def test_a_client_that_comes_back_before_a_daemon_is_followed_gets_what_it_has_missed() -> None:
    hubs = Hubs(2, kept=6)
    for version in range(1, 9):
        hubs.all[1].publish(update(version))
    at_one = hubs.all[0].subscribe(ME, ALL, "sse", "1.0,2.5")
    too_late = hubs.all[0].subscribe(ME, ALL, "sse", "2.1")
    hubs.all[0].publish(update(1, "b"))
    assert [each.take()[1][0].id for each in (at_one, too_late)] == ["1.1,2.5", "1.1,2.1"]
    hubs.follow(1, 0)
    lost, events = at_one.take()
    assert (lost, [event.id for event in events]) == ([], [f"1.1,2.{n}" for n in (6, 7, 8)])
    hubs.all[0].settle({hubs.all[1].start})
    lost, events = too_late.take()
    assert lost == [Lost(1, False, "expired")]
    assert [event.message.data_version for event in events] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("stored", "lost"),
    [(None, [Lost("unknown", False, "restarted")]), (5, []), (4, []), (7, [Lost(2, False, "restarted")])],
)
def test_a_client_of_a_daemon_that_ended_is_told_what_it_missed_there(
    stored: int | None, lost: list[Lost]
) -> None:
    """By what that one had published when it stored its progress; the next owner publishes the rest."""
    hubs = Hubs(1, ended={} if stored is None else {"9": stored})
    hubs.all[0].publish(update(6, epoch=2))
    client = hubs.all[0].subscribe(ME, ALL, "sse", "9.5,1.0")
    assert [event.id for event in client._waiting] == ["1.1,9.5"]
    hubs.all[0].settle(())
    assert (client.take()[0], hubs.all[0]._unsettled) == (lost, {})
    # told once
    hubs.all[0].settle(())
    assert client.take() == ([], [])


def test_daemons_follow_own_events_only_and_no_tenant_sees_what_is_not_its_own() -> None:
    hubs = Hubs(2)
    desk = hubs.all[1].subscribe(Client(Tenant("desk", sessions=("b*",)), "x"), ALL, "websocket")
    hubs.follow(0, 1)
    hubs.follow(1, 0)
    for session in ("a", "b1"):
        hubs.all[0].publish(update(1, session))
    hubs.pass_on(0, 1)
    hubs.pass_on(1, 0)
    assert [event.session for event in desk.take()[1]] == ["b1"]
    assert (hubs.all[0].own, hubs.all[1].own, hubs.all[1].newest) == ("1.2", "2.0", "2.0,1.2")


def test_listening_means_clients_of_this_daemon() -> None:
    events = Hubs(1).all[0]
    peer = events.subscribe(PEER, ALL, "zeromq")
    assert not events.listening.is_set()
    client = events.subscribe(ME, EventFilter(frozenset("ab")), "sse")
    assert events.listening.is_set()
    events.lose(Lost(1, False, "slow"))
    assert (client.take()[0], peer.take()[0]) == ([Lost(1, False, "slow")], [])
    events.unsubscribe(client)
    assert not events.listening.is_set()


def test_ids_do_not_grow_by_daemons_that_are_gone() -> None:
    events = Hubs(1).all[0]

    def parts() -> Iterable[str]:
        return positions_of(events.newest) or ()

    for n in range(2, 40):
        events.subscribe(ME, ALL, "sse", f"{n:x}.{n}")
    events.settle({"2"})
    assert list(parts()) == ["1", "2", "24", "25", "26", "27"]
