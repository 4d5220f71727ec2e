"""The live page: static files of this daemon, which need nothing from outside and no build step.

A page is the same for everyone; what it shows, it asks for by the API, with the key of who looks at it.
"""

import os
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

DIRECTORY = Path(__file__).parent / "live"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Only what came from here, and connections to there."""


class LiveFiles(StaticFiles):
    """With the policy, and asked for again each time: an ETag says whether a file is another one."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """The file, or that it is the one that the client has."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update({"content-security-policy": POLICY, "cache-control": "no-cache"})
        return response


def page_routes() -> list[BaseRoute]:
    """`/`, a page for each question, and their files."""
    files = LiveFiles(directory=DIRECTORY)

    async def sessions(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    async def question(request: Request) -> Response:
        return await files.get_response("question.html", request.scope)

    return [
        Route("/", sessions, methods=["GET"]),
        Route("/live/questions/{question}", question, methods=["GET"]),
        Mount("/live", files),
    ]
