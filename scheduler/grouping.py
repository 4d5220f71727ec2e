"""Prefix-aware grouped prefill: equal beginnings of POOL prompts are computed once (*Attention Once* 3.7).

FNV-1a over the next tokens finds candidates, equality of tokens decides. The first of a group in policy order
is its source: it computes its chunk. After the pass the others read the source's KV, metadata only, and take
no token of the budget. Groups are formed at every plan, so nobody ever waits for a source that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.seeding import prompt_seed
from scheduler.request import Request

HEAD = 8
"""Tokens that are hashed."""

Head = tuple[str, int, int]
"""Salt, tokens in KV, and the next token: most requests share not even that."""


@dataclass(slots=True)
class _Note:
    """What was found out about a request's prompt: kept from plan to plan, until the prompt changes."""

    prompt: Sequence[int]
    head: Head
    hashed: int | None = None
    """Hash of the next tokens; most requests are never asked for it."""
    like: Sequence[int] = ()
    """A source's prompt that was compared."""
    equal: int = 0
    """The tokens at its beginning that are known to be this one's."""


class Grouping:
    """The sources of one plan after another, by what comes next in their prompts."""

    def __init__(self, hashed: Callable[[Sequence[int]], int] = prompt_seed) -> None:
        self._hash = hashed
        self._notes: dict[int, _Note] = {}
        self._sources: dict[Head, list[tuple[Request, int]]] = {}

    def begin(self) -> None:
        """A new plan: nobody is a source yet."""
        self._sources.clear()

    def forget(self, request: Request) -> None:
        """It ended."""
        self._notes.pop(request.id, None)

    def source_of(self, request: Request) -> Request | None:
        """Whose chunk the request can read: the same prompt up to its end, and a token more of its own."""
        if not self._sources or not _groupable(request):
            return None
        for source, end in self._sources.get(self._note(request).head, ()):
            shared = min(end, len(request.prompt) - 1)
            if shared <= request.computed or self._hashed(request) != self._hashed(source):
                continue
            if self._alike(request, source, shared):
                return source
        return None

    def add_source(self, request: Request, n: int) -> None:
        """The request computes its next ``n`` tokens in this plan, and others may read them."""
        if _groupable(request):
            head = self._note(request).head
            self._sources.setdefault(head, []).append((request, request.computed + n))

    def read(self, request: Request, source: Request) -> None:
        """After the pass: read what the source has in KV, but for the request's own last prompt token."""
        reader, other = request.prompt_reader, source.prompt_reader
        # either may have changed or gone since the plan was made
        if reader is None or other is None or reader.swapped or other.swapped:
            return
        n = min(other.length, len(source.prompt), len(request.prompt) - 1)
        if n > reader.length and self._alike(request, source, n):
            reader.read_from(other, n)
            request.cached_tokens = reader.cached_tokens

    def _note(self, request: Request) -> _Note:
        note, start = self._notes.get(request.id), request.computed
        if note is None or note.prompt is not request.prompt:
            note = self._notes[request.id] = _Note(request.prompt, _head(request, start))
        elif note.head[1] != start:
            note.head, note.hashed = _head(request, start), None
        return note

    def _hashed(self, request: Request) -> int:
        note = self._note(request)
        if note.hashed is None:
            note.hashed = self._hash(request.prompt[note.head[1] : note.head[1] + HEAD])
        return note.hashed

    def _alike(self, request: Request, source: Request, n: int) -> bool:
        """Whether the first ``n`` tokens are the same; each token is compared once."""
        note = self._note(request)
        start = note.equal if note.like is source.prompt else 0
        if request.prompt[start:n] != source.prompt[start:n]:
            return False
        note.like, note.equal = source.prompt, max(start, n)
        return True


def _groupable(request: Request) -> bool:
    return request.spec.open_prompt is not None and not request.output and request.remaining > 1


def _head(request: Request, start: int) -> Head:
    return request.spec.salt, start, request.prompt[start]
