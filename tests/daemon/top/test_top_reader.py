"""The reader of `foretick top`: what it asks a daemon, and what it says of one that does not answer."""

from collections.abc import Callable

import httpx2
import pytest
from httpx2 import Request, Response

from daemon.top.reader import HttpReader, Unavailable
from daemon.top.snapshot import FAMILIES

READY = {"/v1/sessions": Response(200, json={"sessions": []}), "/readyz": Response(200, json={"reasons": []})}


def reader(answer: Callable[[Request], Response]) -> HttpReader:
    return HttpReader(httpx2.AsyncClient(base_url="http://d", transport=httpx2.MockTransport(answer)))


def answering(**replies: Response) -> HttpReader:
    """A reader of a daemon that is well, but for the replies by the last part of their paths."""
    known = {path.rpartition("/")[2]: reply for path, reply in READY.items()}
    known |= {"metrics": Response(200, text="foretick_engine_up 1.0\n")} | replies
    return reader(lambda request: known[request.url.path.rpartition("/")[2]])


async def test_only_the_shown_families_are_asked_for() -> None:
    asked: list[tuple[str, list[str]]] = []

    def answer(request: Request) -> Response:
        asked.append((request.url.path, request.url.params.get_list("name[]")))
        return READY.get(
            request.url.path, Response(200, text="foretick_engine_up 1.0\nforetick_bars_total 2.0\n")
        )

    found = await reader(answer).poll()
    assert asked == [("/v1/sessions", []), ("/readyz", []), ("/metrics", list(FAMILIES))]
    assert [name for name, _ in found.scrape.values] == ["foretick_engine_up"]


async def test_a_daemon_that_is_not_ready_is_read_all_the_same() -> None:
    waiting = Response(503, json={"status": "waiting", "reasons": ["the engine is not up"]})
    assert (await answering(readyz=waiting).poll()).reasons == ("the engine is not up",)


async def test_without_the_right_to_metrics_the_sessions_are_read() -> None:
    refused = Response(403, json={"code": "forbidden", "message": "only operators may: metrics"})
    found = await answering(metrics=refused).poll()
    assert (found.scrape.values, "only operators" in found.notice) == ({}, True)


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        (
            {"sessions": Response(401, json={"code": "unauthenticated", "message": "wrong key"})},
            "401, wrong key",
        ),
        ({"sessions": Response(403, json={"code": "forbidden", "message": "not you"})}, "403, not you"),
        ({"sessions": Response(502, html="<p>")}, "502, Bad Gateway"),
        ({"sessions": Response(200, html="<p>")}, "/v1/sessions is not a daemon's"),
        ({"readyz": Response(200, content=b"\xff")}, "/readyz is not a daemon's"),
        ({"metrics": Response(200, text="foretick_engine_up up")}, "/metrics cannot be read"),
    ],
)
async def test_what_cannot_be_read_is_named(replies: dict[str, Response], why: str) -> None:
    with pytest.raises(Unavailable) as failed:
        await answering(**replies).poll()
    assert why in str(failed.value)


@pytest.mark.parametrize("error", [httpx2.ConnectError("refused"), httpx2.ReadTimeout("")])
async def test_a_daemon_that_is_away_is_named(error: httpx2.HTTPError) -> None:
    def answer(request: Request) -> Response:
        raise error

    with pytest.raises(Unavailable) as failed:
        await reader(answer).poll()
    assert str(failed.value) == f"no reply: {error or 'ReadTimeout'}"


async def test_a_session_that_is_gone_has_no_answers() -> None:
    gone = Response(404, json={"code": "unknown_session", "message": "there is no session"})
    assert await answering(answers=gone).answers("a b") == ()
    with pytest.raises(Unavailable):
        await answering(answers=Response(429, json={"code": "busy", "message": "later"})).answers("a")
