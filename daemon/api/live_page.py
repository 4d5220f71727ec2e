"""The live page: one static file without a build step, which needs nothing from outside."""

import base64
import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

FILE = Path(__file__).parent / "live.html"
_BLOCK = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class _Page(NamedTuple):
    html: bytes
    policy: str


async def page(_: Request) -> Response:
    """`GET /`."""
    html, policy = _load()
    headers = {"content-security-policy": policy, "cache-control": "no-cache"}
    return Response(html, headers=headers, media_type="text/html; charset=utf-8")


@lru_cache(maxsize=1)
def _load() -> _Page:
    """The file and its policy: only its own script and style, and only connections to where it came from."""
    text = FILE.read_text(encoding="utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, block in _BLOCK.findall(text):
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    script, style = " ".join(hashes["script"]), " ".join(hashes["style"])
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return _Page(text.encode(), policy)
