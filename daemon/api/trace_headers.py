"""W3C Trace Context over HTTP: a request goes on its caller's trace, and the response names its span."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.traces.trace_context import TRACEPARENT, Tracer, current

_NAME = TRACEPARENT.encode()


class Traced:
    """Puts each request into a trace, and the header `traceparent` on each response under `/v1/`."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, in a task of its own."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == _NAME]
        context = self._tracer.begin(given[0] if len(given) == 1 else "")

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (_NAME, context.traceparent.encode())]
            await send(message)

        token = current.set(context)
        try:
            await self._app(scope, receive, send_named)
        finally:
            current.reset(token)
