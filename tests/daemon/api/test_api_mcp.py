"""The MCP server, without a daemon: the SDK's own client in this process, in both revisions."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp import Client, types
from mcp.shared.exceptions import MCPError

from daemon.api import messages
from daemon.api.mcp_server import NOT_FOUND, TOOLS, Context, McpServer, uri_of
from daemon.api.messages import ErrorReply
from tests.kit import until

SESSION = messages.SessionInfo("a b", "X:A", 7, 100, 5, 1, 2, ("trend",))


class Desk:
    """A daemon of one session; asks of "slow" wait, "gone" finds no engine."""

    def __init__(self) -> None:
        self.asked: list[messages.ClientRequest] = []
        self.given_up = 0
        self.flashes: asyncio.Queue[str] = asyncio.Queue()
        self.server = McpServer(self.answer, self.flashed)

    async def answer(self, request: messages.ClientRequest, _: Context) -> messages.Reply:
        self.asked.append(request)
        session = getattr(request, "session", "a b")
        if session != "a b":
            return ErrorReply(0, "unknown_session", f"there is no session {session!r}; there are: a b")
        match request:
            case messages.ListSessions():
                return messages.SessionsReply(0, (SESSION,))
            case messages.Describe():
                return messages.DescribeReply(0, SESSION, (), ())
            case messages.Ask(question="slow"):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    self.given_up += 1
                    raise
            case messages.Ask(question="gone"):
                return ErrorReply(0, "engine", "the engine is not up")
        return messages.AskReply(id=0, session="a b", data_version=7, text="UP", choice="UP", logit_gap=1.5)

    async def flashed(self) -> AsyncIterator[str]:
        while True:
            yield await self.flashes.get()


def code_of(result: types.CallToolResult) -> str:
    assert result.is_error
    return str(result.structured_content["code"])


@pytest.fixture(params=["legacy", "auto"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_tools_are_listed_with_schemas_and_carry_requests_out(mode):
    desk = Desk()
    async with Client(desk.server.sdk, mode=mode) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert listed.keys() == TOOLS.keys()
        schema = listed["ask"].input_schema
        assert schema["required"] == ["session", "question"]
        assert {"choices", "max_age_s", "deadline_ms"} < schema["properties"].keys()
        assert not {"id", "type"} & schema["properties"].keys()
        arguments = {"session": "a b", "question": "trend", "choices": ["UP", "DOWN"]}
        reply = await client.call_tool("ask", arguments)
        assert reply.structured_content["text"] == "UP"
        assert desk.asked == [messages.Ask(0, "a b", "trend", choices=("UP", "DOWN"))]
        sessions = (await client.call_tool("list_sessions", {})).structured_content["sessions"]
        assert sessions[0]["name"] == "a b"


@pytest.mark.parametrize(
    ("tool", "arguments", "code"),
    [
        ("ask", {"session": "b", "question": "?"}, "unknown_session"),
        ("ask", {"session": "a b", "question": "gone"}, "engine"),
        ("ask", {"session": "a b"}, "bad_request"),
        ("ask", {"session": "a b", "question": "?", "max_tokens": 0}, "bad_request"),
        ("ask", {"session": "a b", "question": "?", "sesion": ""}, "bad_request"),
        ("list_sessions", {"id": 3}, "bad_request"),
    ],
)
async def test_refusals_are_results_that_a_model_can_read(mode, tool, arguments, code):
    async with Client(Desk().server.sdk, mode=mode) as client:
        assert code_of(await client.call_tool(tool, arguments)) == code
        with pytest.raises(MCPError, match="'order'"):
            await client.call_tool("order", {})


async def test_sessions_are_resources(mode):
    async with Client(Desk().server.sdk, mode=mode) as client:
        (resource,) = (await client.list_resources()).resources
        assert (resource.uri, uri_of("a b")) == ("foretick://sessions/a%20b",) * 2
        (contents,) = (await client.read_resource(resource.uri)).contents
        assert '"name":"a b"' in contents.text
        templates = (await client.list_resource_templates()).resource_templates
        assert templates[0].uri_template == "foretick://sessions/{name}"
        for uri in ("foretick://sessions/b", "file:///etc/passwd", "foretick://sessions/"):
            with pytest.raises(MCPError) as refused:
                await client.read_resource(uri)
            assert refused.value.code == NOT_FOUND


async def test_a_cancelled_call_is_given_up_and_others_go_on(mode):
    desk = Desk()
    async with Client(desk.server.sdk, mode=mode) as client:
        slow = [
            asyncio.create_task(client.call_tool("ask", {"session": "a b", "question": "slow"}))
            for _ in range(8)
        ]
        await until(lambda: len(desk.asked) == 8)
        assert not (await client.call_tool("ask", {"session": "a b", "question": "trend"})).is_error
        slow[0].cancel()
        await until(lambda: desk.given_up == 1)
        assert not any(task.done() for task in slow[1:])
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await until(lambda: desk.given_up == 8)


async def test_updates_of_the_newer_revision_come_over_a_stream():
    desk = Desk()
    async with Client(desk.server.sdk) as client:
        async with client.listen(resource_subscriptions=[uri_of("a b")]) as stream:
            for session in ("b", "a b"):
                desk.flashes.put_nowait(session)
            assert (await asyncio.wait_for(anext(aiter(stream)), 5)).uri == uri_of("a b")
            desk.flashes.put_nowait("")  # events were lost: any session may have changed
            assert (await asyncio.wait_for(anext(aiter(stream)), 5)).uri == uri_of("a b")
        await until(lambda: not desk.server._streamed)
        with pytest.raises(MCPError, match="no session 'b'"):
            async with client.listen(resource_subscriptions=[uri_of("b")]):
                pass


@pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed")
async def test_updates_of_the_earlier_revision_are_notifications_until_the_client_goes():
    desk, told = Desk(), []

    async def hear(message: Any) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            told.append(message.params.uri)

    async with Client(desk.server.sdk, mode="legacy", message_handler=hear) as client:
        await client.subscribe_resource(uri_of("a b"))
        with pytest.raises(MCPError, match="no session 'b'"):
            await client.subscribe_resource(uri_of("b"))
        desk.flashes.put_nowait("a b")
        await until(lambda: told == [uri_of("a b")])
        desk.flashes.put_nowait("")  # events were lost: any session may have changed
        await until(lambda: len(told) == 2)
        await client.unsubscribe_resource(uri_of("a b"))
        desk.flashes.put_nowait("a b")
        await client.subscribe_resource(uri_of("a b"))
        assert len(desk.server._subscribers) == 1
    assert len(told) == 2
    assert desk.server._subscribers == {}
