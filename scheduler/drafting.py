"""Between acquiring and executing: running answers of a batch get drafts, out of what is left over.

Drafts are worth having only where they cost nobody anything: they take tokens that the plan left, and blocks
above the high-water mark that are free. Nobody is preempted, and no prompt gets a smaller chunk, for a guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.planner import Entry, reserve
from scheduler.request import Request
from scheduler.speculation import Lookup, draft_cap
from scheduler.types import Limits, Memory


def with_drafts(entries: Sequence[Entry], memory: Memory, limits: Limits) -> list[Entry]:
    """The entries, those of running answers with drafts where there are any; their blocks are held."""
    if not limits.max_drafts:
        return list(entries)
    decoders = sum(isinstance(entry.work, Request) and entry.work.decoding for entry in entries)
    left = limits.max_batch_tokens - sum(entry.tokens for entry in entries)
    kept_free = reserve(memory, limits)
    out: list[Entry] = []
    for entry in entries:
        request = entry.work
        if isinstance(request, Request) and request.decoding and left > 0:
            drafts = _drafts(request, min(left, _cap(request, decoders, limits)))
            if drafts and _hold(request, 1 + len(drafts), memory, kept_free):
                left -= len(drafts)
                entry = entry._replace(drafts=tuple(drafts))
        out.append(entry)
    return out


def _cap(request: Request, decoders: int, limits: Limits) -> int:
    """The last token of an answer needs no drafts behind it."""
    acceptance = 1.0 if request.lookup is None else request.lookup.acceptance
    cap = draft_cap(limits.max_drafts, limits.max_draft_rows, decoders, acceptance, len(request.output))
    return min(cap, request.max_tokens - len(request.output) - 1)


def _drafts(request: Request, most: int) -> list[int]:
    if most <= 0:
        return []
    lookup = request.lookup
    if lookup is None:
        lookup = request.lookup = Lookup(request.prompt)
    lookup.extend(request.output[len(lookup) - len(request.prompt) :])
    return lookup.propose(most)


def _hold(request: Request, n: int, memory: Memory, kept_free: int) -> bool:
    reader = request.reader
    if reader is None or reader.blocks_needed(n) > max(0, memory.free_blocks - kept_free):
        return False
    return reader.acquire(n)
