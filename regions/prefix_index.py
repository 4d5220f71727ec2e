"""Match lengths of waiting prompts, kept current while prompts are cached and evicted (*k-LPM*).

A prompt's match ends at a `MatchEnd`, somewhere along an edge. It grows only when the trie continues there
with the prompt's next token, and shrinks only when that edge is dropped. So prompts are indexed by stop and
next token, and a change of the trie visits only the prompts it affects.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from regions.radix import Node, RadixCache, TokenArray, Tokens, common_length, token_array

END = -1
"""The next token of a completely cached prompt."""

Edge = Node | str
"""An edge; the salt stands for the root, which is dropped with its last child."""


@dataclass(slots=True, eq=False)
class Watched:
    """A watched prompt: the tokens that a match may cover, and where it ends."""

    key: int
    tokens: TokenArray
    stop: MatchEnd
    reported: int
    """The length last returned by `PrefixIndex.changes`."""

    @property
    def next(self) -> int:
        """The first token that is not cached."""
        at = self.stop.length
        return int(self.tokens[at]) if at < len(self.tokens) else END

    def move(self, stop: MatchEnd) -> None:
        """Its match ends elsewhere."""
        self.stop = stop

    def report(self) -> bool:
        """Whether its match has another length than at the last call."""
        before, self.reported = self.reported, self.stop.length
        return self.reported != before


@dataclass(slots=True, eq=False)
class MatchEnd:
    """The point where matches of ``length`` tokens end: on ``edge``, possibly before its last token."""

    edge: Edge
    length: int
    by_next: dict[int, dict[int, None]] = field(default_factory=dict)
    """The keys of the prompts that stop here, in order, by next token (keys: no reference cycle)."""

    def move(self, edge: Edge) -> None:
        """It lies on another edge, which begins at the same length."""
        self.edge = edge


class PrefixIndex:
    """Exact match lengths of watched prompts in ``cache`` (`RadixCache.match_length`).

    A prompt's last token does not count, as in `StreamingPrompt.match`: it must be computed for its row. Not
    thread-safe: it belongs to the thread that owns the cache.
    """

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._prompts: dict[int, Watched] = {}
        self._stops: dict[Edge, dict[int, MatchEnd]] = {}
        self._touched: dict[int, None] = {}
        cache.watchers.add(self)

    def watch(self, key: int, tokens: Tokens, salt: str = "") -> int:
        """Watch a prompt under ``key``, replacing an earlier one; returns its match length.

        An int32 array is not copied and must not change.
        """
        self.forget(key)
        known = token_array(tokens)[:-1]
        path, length = self._cache.walk(known, salt)
        prompt = Watched(key, known, self._stop(path[-1] if path else salt, length), length)
        self._prompts[key] = prompt
        self._file(prompt)
        return length

    def forget(self, key: int) -> None:
        """Stop watching a prompt. Idempotent."""
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return
        self._touched.pop(key, None)
        stop, token = prompt.stop, prompt.next
        del stop.by_next[token][key]
        if not stop.by_next[token]:
            del stop.by_next[token]
            self._tidy(stop)

    def changes(self) -> list[tuple[int, int]]:
        """(key, match length) of each prompt whose length changed since the last call, by key."""
        touched = [self._prompts[key] for key in sorted(self._touched)]
        self._touched.clear()
        return [(prompt.key, prompt.reported) for prompt in touched if prompt.report()]

    def added(self, node: Node, parent: Node) -> None:
        """See `Watcher.added`; prompts that continue with ``node``'s tokens now stop on it."""
        edge, end = _edge(parent), node.start
        stop = self._stops.get(edge, {}).get(end)
        if stop is None:
            return
        follow = stop.by_next.pop(int(node.tokens[0]), {})
        self._tidy(stop)
        for key in follow:
            prompt = self._prompts[key]
            more = common_length(node.tokens, prompt.tokens[end : end + len(node.tokens)])
            self._move(prompt, self._stop(node, end + more))

    def split(self, upper: Node, node: Node) -> None:
        """See `Watcher.split`; stops on the upper half move to its edge, at the same length."""
        stops = self._stops.get(node, {})
        for length in [length for length in stops if length <= node.start]:
            stop = stops.pop(length)
            stop.move(upper)
            self._stops.setdefault(upper, {})[length] = stop
        if not stops:
            self._stops.pop(node, None)

    def dropped(self, node: Node, parent: Node) -> None:
        """See `Watcher.dropped`; stops on it move to the end of its parent."""
        stops = self._stops.pop(node, {}).values()
        keys = [key for stop in stops for waiting in stop.by_next.values() for key in waiting]
        if keys:
            above = self._stop(_edge(parent), node.start)
            for key in keys:
                self._move(self._prompts[key], above)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every prompt is indexed where its match ends, and nothing else is."""
        filed = 0
        for edge, stops in self._stops.items():
            assert stops, "an edge without stops is kept"
            for length, stop in stops.items():
                assert (stop.edge, stop.length) == (edge, length), "a stop is filed under another edge"
                assert stop.by_next, "an empty stop is kept"
                for token, keys in stop.by_next.items():
                    assert keys, "a token without prompts is kept"
                    assert all(self._prompts[key].stop is stop for key in keys), "a prompt stops elsewhere"
                    assert all(self._prompts[key].next == token for key in keys), "another token is next"
                    filed += len(keys)
        assert filed == len(self._prompts), "a prompt is not filed once"
        assert self._touched.keys() <= self._prompts.keys(), "a forgotten prompt is to be reported"

    def _move(self, prompt: Watched, stop: MatchEnd) -> None:
        prompt.move(stop)
        self._touched[prompt.key] = None
        self._file(prompt)

    def _file(self, prompt: Watched) -> None:
        prompt.stop.by_next.setdefault(prompt.next, {})[prompt.key] = None

    def _stop(self, edge: Edge, length: int) -> MatchEnd:
        stops = self._stops.setdefault(edge, {})
        if length not in stops:
            stops[length] = MatchEnd(edge, length)
        return stops[length]

    def _tidy(self, stop: MatchEnd) -> None:
        """Remove a stop without prompts."""
        if not stop.by_next:
            del self._stops[stop.edge][stop.length]
            if not self._stops[stop.edge]:
                del self._stops[stop.edge]


def _edge(node: Node) -> Edge:
    return node if len(node.tokens) else node.salt
