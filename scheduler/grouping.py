"""Prefix-aware grouped prefill: equal beginnings of POOL prompts are computed once (*Attention Once* 3.7).

Equal next tokens give candidates; comparing the prompts decides. The first request of a group in policy order
is its source and computes its chunk. After the pass the others read the source's KV: only metadata changes,
and they use no token of the budget. Every plan forms new groups, so no request waits for a source that has
ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.request import Request

HEAD = 8
"""Next tokens that a source and its readers have in common, fewer at the end of a prompt."""

Head = tuple[str, int, tuple[int, ...]]
"""Salt, tokens in KV, next tokens."""


@dataclass(slots=True)
class _Known:
    """Known facts about a request's prompt, kept between plans until the prompt changes."""

    prompt: Sequence[int]
    head: Head = ("", -1, ())
    like: Sequence[int] = ()
    """The source's prompt it was last compared with."""
    equal: int = 0
    """Length of their known common prefix, in tokens."""

    def is_like(self, other: Sequence[int], n: int) -> bool:
        """Whether the first ``n`` tokens are those of ``other``; each token is compared only once."""
        start = self.equal if self.like is other else 0
        if self.prompt[start:n] != other[start:n]:
            return False
        self.like, self.equal = other, max(start, n)
        return True


class Grouping:
    """Finds the sources of each plan by the next tokens of the prompts."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._sources: dict[Head, list[tuple[Request, int]]] = {}

    def begin(self) -> None:
        """Start a new plan, without sources."""
        self._sources.clear()

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that ended."""
        self._known.pop(request.id, None)

    def source_of(self, request: Request) -> Request | None:
        """The request whose chunk this one can read: equal up to its end, and this one is longer."""
        if not self._sources or not _groupable(request):
            return None
        known = self._of(request)
        for source, end in self._sources.get(known.head, ()):
            shared = min(end, len(request.prompt) - 1)
            if shared > request.computed and known.is_like(source.prompt, shared):
                return source
        return None

    def add_source(self, request: Request, n: int) -> None:
        """Register a request as source: it computes its next ``n`` tokens in this plan."""
        if _groupable(request):
            self._sources.setdefault(self._of(request).head, []).append((request, request.computed + n))

    def read(self, request: Request, source: Request) -> None:
        """After the pass, read the source's KV up to the request's last prompt token (exclusive)."""
        reader, other = request.prompt_reader, source.prompt_reader
        # either may have changed or ended since the plan was made
        if reader is None or other is None or reader.swapped or other.swapped:
            return
        n = min(other.length, len(source.prompt), len(request.prompt) - 1)
        if n > reader.length and self._of(request).is_like(source.prompt, n):
            request.share(other, n)

    def _of(self, request: Request) -> _Known:
        known, prompt, start = self._known.get(request.id), request.prompt, request.computed
        if known is None or known.prompt is not prompt:
            known = _Known(prompt)
        if known.head[1] != start:
            head = request.spec.salt, start, tuple(prompt[start : start + HEAD])
            known = self._known[request.id] = replace(known, head=head)
        return known


def _groupable(request: Request) -> bool:
    return request.spec.open_prompt is not None and not request.output and request.remaining > 1
