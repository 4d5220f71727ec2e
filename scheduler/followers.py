"""Grouped prefill: equal beginnings of POOL prompts are computed once (*Attention Once* section 3.7).

FNV-1a over the next tokens finds candidates, equality of tokens decides. The first of a group in policy
order leads: it computes its chunk; the others follow: after the pass they read the leader's KV, metadata
only, and take no token of the budget. Groups are formed anew at every plan, so nobody ever waits for a
leader that is gone.
"""

from __future__ import annotations

from engine.seeding import prompt_seed
from scheduler.request import Request, Work

HEAD = 8
"""Tokens that are hashed."""


class Groups:
    """The leaders of one plan, by what comes next in their prompts."""

    def __init__(self) -> None:
        # by salt, tokens in KV and the next token, for most of all requests share not even that
        self._leaders: dict[tuple[str, int, int], list[tuple[Request, int]]] = {}

    def leader_of(self, request: Request) -> Request | None:
        """Whose chunk the request can read: the same prompt up to its end, and a token more of its own."""
        if not self._leaders or not _groups(request):
            return None
        for leader, end in self._leaders.get(_key(request), ()):
            shared = min(end, len(request.prompt) - 1)
            if shared <= request.computed or _hashed(request) != _hashed(leader):
                continue
            if _alike(request, leader, shared):
                return leader
        return None

    def lead(self, request: Request, n: int) -> None:
        """The request computes its next `n` tokens in this plan, and others may follow."""
        if _groups(request):
            self._leaders.setdefault(_key(request), []).append((request, request.computed + n))


def follow(request: Work, leader: Request) -> None:
    """After the pass: read what the leader has in KV, but for the last token of the request's own prompt.

    Nothing happens when one of them changed or went since the plan was made.
    """
    assert isinstance(request, Request)  # tapes lead and follow nobody
    reader, source = request.prompt_reader, leader.prompt_reader
    if reader is None or source is None or reader.swapped or source.swapped:
        return
    n = min(source.length, len(leader.prompt), len(request.prompt) - 1)
    if n > reader.length and _alike(request, leader, n):
        reader.follow(source, n)
        request.cached_tokens = reader.cached_tokens


def _groups(request: Request) -> bool:
    return request.open_prompt is not None and not request.output and request.remaining > 1


def _key(request: Request) -> tuple[str, int, int]:
    """Kept until it has computed some."""
    start = request.computed
    if request.head is None or request.head[1] != start:
        request.head = request.salt, start, request.prompt[start]
    return request.head


def _alike(request: Request, leader: Request, n: int) -> bool:
    """Whether the first `n` tokens are the same. What was found is kept: each token is compared once."""
    twin, known = request.twin or ((), 0)
    start = known if twin is leader.prompt else 0
    if request.prompt[start:n] != leader.prompt[start:n]:
        return False
    request.twin = leader.prompt, max(start, n)
    return True


def _hashed(request: Request) -> int:
    """Kept as well; most requests are never asked for it."""
    start = request.computed
    if request.hashed is None or request.hashed[0] != start:
        request.hashed = start, prompt_seed(request.prompt[start : start + HEAD])
    return request.hashed[1]
