"""Who sends an HTTP request, and whether it may.

Clients are not authenticated. A request must therefore come from a loopback address, name this machine as its
host, and declare its body as JSON. A web page open in a local browser cannot send such a request.
"""

from __future__ import annotations

from starlette.requests import Request

from daemon.api.guard import is_loopback

FOREIGN = "requests are accepted from this machine only"


def identity_of(request: Request) -> str | None:
    """The client that limits and caches count by; None for one that is not served."""
    if request.client is None or not is_local(request):
        return None
    return f"http {request.client.host}"


def salt_of(identity: str) -> str:
    """The salt of the caches that a client may use: as long as there are no keys, all share one."""
    del identity
    return ""


def is_local(request: Request) -> bool:
    """Whether the request comes from this machine and names it. DNS names that resolve to loopback do not."""
    return request.client is not None and all(
        is_loopback(name) for name in (request.client.host, (request.url.hostname or "").strip("[]"))
    )


def is_json(request: Request) -> bool:
    """Whether the body is declared as JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
