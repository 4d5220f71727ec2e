"""An MCP server for agents: tools to ask sessions, and a resource per session that can be subscribed to.

It knows no transport: `daemon.api.mcp_http` serves it inside the daemon, `foretick mcp` beside it over stdio.
Clients of both revisions are served: those that subscribe by `resources/subscribe`, and those that open a
stream by `subscriptions/listen`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.session import ServerSession
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError

from daemon.api import messages
from daemon.api.limits import Quota
from daemon.api.messages import ErrorReply, QueryError
from daemon.api.operations import UNSAID
from feeds.decoding import Undecodable, decoded, shortened

log = logging.getLogger(__name__)

Context = ServerRequestContext[Any, Any]
Asker = Callable[[messages.ClientRequest, Context], Awaitable[messages.Reply]]
"""``ask(request, context)``: the daemon's reply to the client that ``context`` belongs to."""
Flashes = Callable[[], AsyncIterator[str]]
"""Names of sessions as their newest versions are answered; empty: any may have been."""
PREFIX = "foretick://sessions/"
JSON = "application/json"
NOT_FOUND = -32002
"""JSON-RPC code of a resource that is not there."""
_AGAIN_S = 5.0
"""Until the events are asked for again, after they were refused."""
_TELL_S = 1.0
"""Longest wait for an agent to take a notification; then it is forgotten."""
INSTRUCTIONS = (
    "Foretick keeps a language model's state warm over live market data. A session is a tape of symbols; its "
    "standing questions are answered for every new version of the data. Answers say how old their data is "
    "(staleness_ns), how sure they are (probability, or logit_gap) and what is wrong with them (flags). "
    "Read the latest answers first: they cost nothing. Ask a question of your own only if none fits."
)


@dataclass(frozen=True)
class ToolOf:
    """A tool, which is a request of the query socket."""

    name: str
    request: type[msgspec.Struct]
    about: str

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of its arguments: the request's members, but for those that the protocol needs."""
        made = msgspec.json.schema(self.request)["$defs"][self.request.__name__]
        members = {k: v for k, v in made["properties"].items() if k not in UNSAID}
        required = [name for name in made["required"] if name in members]
        return {
            "type": "object",
            "properties": members,
            "required": required,
            "additionalProperties": False,
        }

    def read(self, arguments: dict[str, Any] | None) -> Any:
        """The request. Raises Undecodable."""
        given = arguments or {}
        if given.keys() & set(UNSAID):
            raise Undecodable(f"{', '.join(UNSAID)} are no arguments", readable=True)
        members = {"type": self.request.__struct_config__.tag, "id": 0, **given}
        return decoded(lambda found: msgspec.convert(found, self.request), members)


TOOLS = {
    tool.name: tool
    for tool in (
        ToolOf(
            "list_sessions", messages.ListSessions,
            "List the sessions: symbols, standing questions, age of their data, whether a feed is silent.",
        ),
        ToolOf(
            "describe_session", messages.Describe,
            "Describe one session: its window, its standing questions with their choices, and their latest "
            "answers.",
        ),
        ToolOf(
            "latest_answers", messages.Answers,
            "The latest answers of a session's standing questions; nothing is computed. `question` is a name "
            "or text; empty is all. With `min_version` it waits up to `timeout_s` for that data version.",
        ),
        ToolOf(
            "ask", messages.Ask,
            "Ask a session. A standing question, asked by its name or text, is answered at once, with one of "
            "its own choices if it has any; another question is computed at the newest data. Give `choices` "
            "of it whenever the answer is one of several.",
        ),
    )
}  # fmt: skip


class McpServer:
    """Serves agents by ``ask``, and tells them of new answers by ``flashes``.

    ``tenant_of(context)``: who asks; "" has no limit of its own. ``max_subscriptions``: to resources,
    of which a tenant has at most half.
    """

    def __init__(
        self,
        ask: Asker,
        flashes: Flashes,
        tenant_of: Callable[[Context], str] = lambda context: "",
        max_subscriptions: int = 1024,
    ) -> None:
        self._ask, self._flashes, self._tenant_of = ask, flashes, tenant_of
        self._bus = InMemorySubscriptionBus()
        self._listen = ListenHandler(self._bus, max_subscriptions=max_subscriptions)
        self._subscribers: dict[str, dict[object, tuple[ServerSession, str]]] = {}
        """Of the earlier revision: sessions and their tenants by resource and connection."""
        self._subscriptions = Quota(max_subscriptions, "subscriptions", "open")
        """Of both revisions, by tenant."""
        self._streamed: Counter[str] = Counter()
        """Of the newer one: how many streams are open for a resource."""
        self._watching: asyncio.Task[None] | None = None
        self.sdk: Server[None] = Server(
            "foretick",
            version=version("foretick"),
            instructions=INSTRUCTIONS,
            lifespan=self._life,
            on_list_tools=self._tools,
            on_call_tool=self._call,
            on_list_resources=self._resources,
            on_list_resource_templates=self._templates,
            on_read_resource=self._read,
            on_subscribe_resource=self._subscribe,
            on_unsubscribe_resource=self._unsubscribe,
            on_subscriptions_listen=self._listened,
        )

    def close(self) -> None:
        """End the streams of events, with a word."""
        self._listen.close()

    @asynccontextmanager
    async def _life(self, _: Server[None]) -> AsyncIterator[None]:
        try:
            yield None
        finally:
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.gather(self._watching, return_exceptions=True)

    # Tools.

    async def _tools(self, _: Context, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        hints = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=each.name, description=each.about, input_schema=each.schema, annotations=hints
                )
                for each in TOOLS.values()
            ]
        )

    async def _call(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        tool = TOOLS.get(params.name)
        if tool is None:
            why = f"there is no tool {params.name!r}; there are: {', '.join(TOOLS)}"
            raise MCPError(types.INVALID_PARAMS, shortened(why))
        try:
            reply = await self._reply(tool.read(params.arguments), context)
        except Undecodable as error:
            return _result({"code": "bad_request", "message": str(error)}, is_error=True)
        except QueryError as error:
            return _result({"code": error.code, "message": error.message}, is_error=True)
        return _result(_members(reply))

    # Resources.

    async def _resources(
        self, context: Context, _: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        try:
            listed = await self._reply(messages.ListSessions(0), context)
        except QueryError as error:
            raise _refused(error) from None
        assert isinstance(listed, messages.SessionsReply)
        return types.ListResourcesResult(
            resources=[
                types.Resource(
                    uri=uri_of(each.name),
                    name=each.name,
                    description=f"{each.symbol}: standing questions {', '.join(each.questions) or 'none'}",
                    mime_type=JSON,
                )
                for each in listed.sessions
            ]
        )

    async def _templates(
        self, _: Context, __: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            uri_template=f"{PREFIX}{{name}}",
            name="session",
            description="A session, its standing questions and their latest answers.",
            mime_type=JSON,
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def _read(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        text = msgspec.json.encode(_members(await self._session(params.uri, context))).decode()
        contents = types.TextResourceContents(uri=params.uri, mime_type=JSON, text=text)
        return types.ReadResourceResult(contents=[contents])

    async def _session(self, uri: str, context: Context) -> messages.Reply:
        """The session of a resource. Raises MCPError, also where it is not the client's to see."""
        if not uri.startswith(PREFIX):
            why = f"there is no resource {uri}; a session is {PREFIX}NAME"
            raise MCPError(NOT_FOUND, shortened(why))
        try:
            request = TOOLS["describe_session"].read({"session": unquote(uri.removeprefix(PREFIX))})
            return await self._reply(request, context)
        except Undecodable as error:
            raise MCPError(NOT_FOUND, shortened(f"there is no resource {uri}: {error}")) from None
        except QueryError as error:
            raise _refused(error) from None

    # Subscriptions.

    async def _subscribe(self, context: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        await self._session(params.uri, context)
        # the SDK offers no other way to a connection's end from a request
        connection = context.session._connection
        subscribers = self._subscribers.get(params.uri, {})
        if connection not in subscribers:
            self._enter(tenant := self._tenant_of(context), 1)
            connection.exit_stack.callback(self._forget, params.uri, connection)
            subscribers = self._subscribers.setdefault(params.uri, {})
            subscribers[connection] = context.session, tenant
        self._watch()
        return types.EmptyResult()

    async def _unsubscribe(
        self, context: Context, params: types.UnsubscribeRequestParams
    ) -> types.EmptyResult:
        self._forget(params.uri, context.session._connection)
        return types.EmptyResult()

    async def _listened(
        self, context: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        uris = set(params.notifications.resource_subscriptions or ())
        tenant, places = self._tenant_of(context), max(1, len(uris))
        self._enter(tenant, places)
        try:
            for uri in uris:
                await self._session(uri, context)
            self._streamed.update(uris)
            self._watch()
            try:
                return await self._listen(context, params)
            finally:
                self._streamed -= Counter(uris)
        finally:
            self._subscriptions.leave(tenant, places)

    def _enter(self, tenant: str, subscriptions: int) -> None:
        """Add to the number. Raises MCPError when there is no room."""
        try:
            self._subscriptions.enter(tenant, subscriptions)
        except QueryError as error:
            raise _refused(error) from None

    def _forget(self, uri: str, connection: object) -> None:
        subscribers = self._subscribers.get(uri, {})
        if connection in subscribers:
            self._subscriptions.leave(subscribers.pop(connection)[1], 1)
            if not subscribers:
                del self._subscribers[uri]

    def _watch(self) -> None:
        """Follow the events from the first subscription on, and again if that ended."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._tell(), name="mcp events")

    async def _tell(self) -> None:
        while self._subscribers or self._streamed:
            try:
                async for session in self._flashes():
                    for uri in [uri_of(session)] if session else {*self._subscribers, *self._streamed}:
                        await self._updated(uri)
                return
            except QueryError as error:
                log.warning("agents are not told of new answers for now: %s", error)
                await asyncio.sleep(_AGAIN_S)

    async def _updated(self, uri: str) -> None:
        await self._bus.publish(ResourceUpdated(uri))
        for connection, (client, _) in list(self._subscribers.get(uri, {}).items()):
            try:
                # one that does not read must not keep the news from others
                async with asyncio.timeout(_TELL_S):
                    await client.send_resource_updated(uri)
            except Exception:  # its connection is gone, whatever the transport raises for that
                self._forget(uri, connection)

    async def _reply(self, request: messages.ClientRequest, context: Context) -> messages.Reply:
        """The reply. Raises QueryError."""
        reply = await self._ask(request, context)
        if isinstance(reply, ErrorReply):
            raise QueryError(reply.code, reply.message)
        return reply


def uri_of(session: str) -> str:
    """The resource of a session."""
    return PREFIX + quote(session, safe="")


def _members(reply: messages.Reply) -> dict[str, Any]:
    members: dict[str, Any] = msgspec.to_builtins(reply)
    return {name: value for name, value in members.items() if name not in ("type", "id")}


def _result(members: dict[str, Any], *, is_error: bool = False) -> types.CallToolResult:
    """Members for programs, and as text for models."""
    text = msgspec.json.encode(members).decode()
    return types.CallToolResult(
        content=[types.TextContent(text=text)], structured_content=members, is_error=is_error
    )


def _refused(error: QueryError) -> MCPError:
    code = NOT_FOUND if error.code == "unknown_session" else types.INTERNAL_ERROR
    return MCPError(code, error.message, {"code": error.code})
