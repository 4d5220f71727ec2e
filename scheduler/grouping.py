"""Prefix-aware grouped prefill: equal beginnings of POOL prompts are computed once (*Attention Once* 3.7).

FNV-1a over the next tokens finds candidates; comparing the tokens decides. The first request of a group in
policy order is its source and computes its chunk. After the pass the others read the source's KV: only
metadata changes, and they use no token of the budget. Every plan forms new groups, so no request waits
for a source that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.seeding import prompt_seed
from scheduler.request import Request

HEAD = 8
"""Tokens that are hashed."""

Head = tuple[str, int, int]
"""Salt, tokens in KV, next token: most requests differ already in these."""


@dataclass(slots=True)
class _Known:
    """Known facts about a request's prompt, kept between plans until the prompt changes."""

    prompt: Sequence[int]
    head: Head
    hashed: int | None = None
    """Hash of the next tokens, computed on demand."""
    like: Sequence[int] = ()
    """The source's prompt it was last compared with."""
    equal: int = 0
    """Length of their known common prefix, in tokens."""

    def move(self, head: Head) -> None:
        """The request has more of its prompt in KV."""
        self.head, self.hashed = head, None

    def hash(self, hashed: Callable[[Sequence[int]], int]) -> int:
        """The hash of the next tokens, computed once."""
        if self.hashed is None:
            self.hashed = hashed(self.prompt[self.head[1] : self.head[1] + HEAD])
        return self.hashed

    def is_like(self, other: Sequence[int], n: int) -> bool:
        """Whether the first ``n`` tokens are those of ``other``; each token is compared only once."""
        start = self.equal if self.like is other else 0
        if self.prompt[start:n] != other[start:n]:
            return False
        self.like, self.equal = other, max(start, n)
        return True


class Grouping:
    """Finds the sources of each plan by the next tokens of the prompts."""

    def __init__(self, hashed: Callable[[Sequence[int]], int] = prompt_seed) -> None:
        self._hash = hashed
        self._notes: dict[int, _Known] = {}
        self._sources: dict[Head, list[tuple[Request, int]]] = {}

    def begin(self) -> None:
        """Start a new plan, without sources."""
        self._sources.clear()

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that ended."""
        self._notes.pop(request.id, None)

    def source_of(self, request: Request) -> Request | None:
        """The request whose chunk this one can read: equal up to its end, and this one is longer."""
        if not self._sources or not _groupable(request):
            return None
        for source, end in self._sources.get(self._note(request).head, ()):
            shared = min(end, len(request.prompt) - 1)
            if shared <= request.computed or self._hashed(request) != self._hashed(source):
                continue
            if self._note(request).is_like(source.prompt, shared):
                return source
        return None

    def add_source(self, request: Request, n: int) -> None:
        """Register a request as source: it computes its next ``n`` tokens in this plan."""
        if _groupable(request):
            head = self._note(request).head
            self._sources.setdefault(head, []).append((request, request.computed + n))

    def read(self, request: Request, source: Request) -> None:
        """After the pass, read the source's KV up to the request's last prompt token (exclusive)."""
        reader, other = request.prompt_reader, source.prompt_reader
        # either may have changed or ended since the plan was made
        if reader is None or other is None or reader.swapped or other.swapped:
            return
        n = min(other.length, len(source.prompt), len(request.prompt) - 1)
        if n > reader.length and self._note(request).is_like(source.prompt, n):
            request.share(other, n)

    def _note(self, request: Request) -> _Known:
        note, start = self._notes.get(request.id), request.computed
        if note is None or note.prompt is not request.prompt:
            note = self._notes[request.id] = _Known(request.prompt, _head(request, start))
        elif note.head[1] != start:
            note.move(_head(request, start))
        return note

    def _hashed(self, request: Request) -> int:
        return self._note(request).hash(self._hash)


def _groupable(request: Request) -> bool:
    return request.spec.open_prompt is not None and not request.output and request.remaining > 1


def _head(request: Request, start: int) -> Head:
    return request.spec.salt, start, request.prompt[start]
