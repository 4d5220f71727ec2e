"""Radix prefix cache: prompts that share a beginning read one copy of it (*Attention Once* section 3.10.2).

A trie by tokens. An edge is a run of tokens and knows the slots that hold them; slots are addressed one by
one, so an edge may be split anywhere and both halves then refer to the border block. A match hands out the
slots of its path as a `Past` with a hold of its own: metadata only, and later splits and evictions do not
concern the reader. Only prompts that begin at coordinate 0 are kept: one position frame, origin 0.

Nodes are ordered by last use, each before its ancestors, so the oldest node without children is found by
walking that order; this is the logical clock, and no other is needed. Whether anybody else reads a block is
told by its references: those the cache has itself are counted per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol
from weakref import ref

import numpy as np
import numpy.typing as npt

from regions.context import Held, Past
from regions.ephemeral import Fork
from regions.extents import Extent, blocks_of
from regions.pool import KVPool
from regions.prefix import alias, between, prompt_extents
from regions.tokens import TokenArray, Tokens, common_length, token_array


class Node:
    """An edge of the trie and what lies below it; a root has no tokens.

    It does not know its parent: without cycles the pool's memory is free as soon as nobody uses the pool.
    """

    __slots__ = ("children", "extents", "held", "salt", "tokens")

    def __init__(self, salt: str, tokens: TokenArray, extents: list[Extent], held: Held) -> None:
        self.salt = salt
        self.tokens = tokens
        self.extents = extents
        self.held = held
        self.children: dict[int, Node] = {}  # by first token

    @property
    def start(self) -> int:
        """Coordinate of its first token: how many tokens lie above it."""
        return self.extents[0].coord if self.extents else 0

    def has_any(self, marked: npt.NDArray[np.bool_]) -> bool:
        """Whether it refers to one of the ``marked`` blocks, bool [blocks]."""
        return any(bool(marked[start:stop].any()) for start, stop in self.held.blocks)


class Watcher(Protocol):
    """Who must know how the trie changes; a root is told of as any parent."""

    def added(self, node: Node, parent: Node) -> None:
        """``node`` continues ``parent`` with tokens that were not cached."""

    def split(self, upper: Node, node: Node) -> None:
        """``node`` has lost its first tokens to ``upper``, its parent from here on. The same is cached."""

    def dropped(self, node: Node, parent: Node) -> None:
        """``node``, a leaf below ``parent``, is no longer cached."""


class RadixCache:
    """Prefixes of prompts in KV, at most ``budget`` tokens of them, in one trie a salt.

    The salt comes from the caller's authenticated identity: nobody can find out what others have asked.
    It is a reclaimer of ``pool``: its blocks count as free as long as nobody else reads them. Whoever owns
    the pool keeps the cache as long. Not thread-safe: the engine's worker thread owns it.
    """

    def __init__(self, pool: KVPool, budget: int) -> None:
        self.budget = budget
        self.tokens = 0
        """Cached tokens."""
        self.generation = 0
        """Changes whenever a match may have become longer or shorter."""
        self.lookups = self.hits = self.matched_tokens = 0
        self.saved_tokens = self.evicted_tokens = self.refused = 0
        self._pool = pool
        self._roots: dict[str, Node] = {}
        # each node's parent; the least recently used node first, and so each before its ancestors
        self._parents: OrderedDict[Node, Node] = OrderedDict()
        self._claims = pool.blocks.claim()  # the nodes' own references to each block
        self._watchers: list[ref[Watcher]] = []
        pool.add_reclaimer(self)

    def add_watcher(self, watcher: Watcher) -> None:
        """Tell ``watcher`` of every change of the trie, for as long as somebody else keeps it."""
        self._watchers.append(ref(watcher))

    def match(self, tokens: Tokens, salt: str = "") -> Past | None:
        """The longest cached prefix of ``tokens``, held once for the caller; None when nothing is cached.

        Costs one step a node on the path and touches no KV.
        """
        self.lookups += 1
        path, matched = self.walk(token_array(tokens), salt)
        if not matched:
            return None
        self.hits += 1
        self.matched_tokens += matched
        self._touch(path)
        return alias(self._pool, (extent for node in path for extent in node.extents), matched)

    def match_length(self, tokens: Tokens, salt: str = "") -> int:
        """How many tokens `match` would find. Holds and touches nothing; stable while `generation` is."""
        return self.walk(token_array(tokens), salt)[1]

    def walk(self, tokens: TokenArray, salt: str) -> tuple[list[Node], int]:
        """The nodes along ``tokens`` and how many tokens match; the last node may match in part.

        Holds and touches nothing.
        """
        path: list[Node] = []
        at = 0
        node = self._roots.get(salt)
        while node and at < len(tokens):
            node = node.children.get(int(tokens[at]))
            if node:
                path.append(node)
                common = common_length(node.tokens, tokens[at:])
                at += common
                if common < len(node.tokens):
                    break
        return path, at

    def save(self, tokens: Tokens, source: Fork | Past, salt: str = "") -> int:
        """Keep the KV of ``tokens``, the oldest of what ``source`` sees; returns how many were added.

        Those are the ones not cached yet. When they exceed the budget, prefixes that nobody reads make room,
        the leaf that was used longest ago first; when that is not enough, nothing is added and ``refused``
        counts it. Raises ValueError when ``source`` reads a tape or does not hold these tokens.
        """
        if not self.budget:
            return 0
        key = token_array(tokens)
        extents = prompt_extents(source, key)
        path, matched = self.walk(key, salt)
        delta = len(key) - matched
        if delta and path:
            path[-1] = self._split(path[-1], matched)
        if delta and self._fits(delta, path):
            parent = path[-1] if path else self._root(salt)
            node = self._add(parent, key[matched:].copy(), between(extents, matched, len(key)))
            for watcher in self._told():
                watcher.added(node, parent)
            self.saved_tokens += delta
            self.generation += 1
        else:
            delta = 0
        self._touch(path)
        return delta

    @property
    def nodes(self) -> int:
        """Edges of the trie."""
        return len(self._parents)

    @property
    def reclaimable(self) -> int:
        """Blocks that only the cache refers to: `reclaim` can free exactly these."""
        return self._claims.sole

    def reclaim(self, blocks: int) -> None:
        """Free ``blocks`` blocks, or as many as possible.

        Leaves that nobody reads go first, the one used longest ago before the others. Then those in use
        whose ancestors are not: their reader computed the ancestors' tokens for itself.
        """
        target = self._pool.blocks.free_blocks + blocks
        idle = self._claims.idle()

        def enough() -> bool:
            return self._pool.blocks.free_blocks >= target

        def unlocks(node: Node | None) -> bool:
            while node and not node.has_any(idle):
                node = self._parents.get(node)
            return node is not None

        self._evict(enough, lambda node: node.has_any(idle))
        self._evict(enough, unlocks)

    def clear(self) -> None:
        """Forget everything. Readers keep what they hold."""
        self._evict(lambda: False, lambda node: True)

    def check_integrity(self) -> None:
        """Raise AssertionError unless trie, order of use, token count and block counts agree."""
        mine = np.zeros_like(self._claims.own)
        position = {node: i for i, node in enumerate(self._parents)}
        reached = 0
        waiting = list(self._roots.values())
        assert all(root.children for root in waiting), "a salt without prefixes is kept"
        while waiting:
            parent = waiting.pop()
            for first, node in parent.children.items():
                reached += 1
                waiting.append(node)
                assert self._parents[node] is parent, "a child has another parent"
                assert node.tokens[0] == first, "a child is filed under another token"
                assert len(node.tokens) == sum(extent.length for extent in node.extents), "slots are missing"
                assert position[node] < position.get(parent, len(position)), "a parent goes first"
                for start, stop in node.held.blocks:
                    mine[start:stop] += 1
        assert reached == len(self._parents), "the order of use and the trie differ"
        assert self.tokens == sum(len(node.tokens) for node in self._parents), "the token count is wrong"
        assert bool((mine == self._claims.own).all()), "the cache's own references are miscounted"
        self._claims.check_integrity()

    def _told(self) -> list[Watcher]:
        return [watcher for weak in self._watchers if (watcher := weak()) is not None]

    def _touch(self, path: list[Node]) -> None:
        for node in reversed(path):
            self._parents.move_to_end(node)

    def _fits(self, delta: int, path: list[Node]) -> bool:
        """Make room for ``delta`` more tokens below ``path``, whose nodes stay."""
        along = set(path)
        if sum(len(node.tokens) for node in along) + delta <= self.budget:
            idle = self._claims.idle()
            self._evict(
                lambda: self.tokens + delta <= self.budget,
                lambda node: node not in along and node.has_any(idle),
            )
        fits = self.tokens + delta <= self.budget
        self.refused += not fits
        return fits

    def _evict(self, enough: Callable[[], bool], goes: Callable[[Node], bool]) -> None:
        """Drop leaves, least recently used first, until ``enough``; a parent comes after its last child."""
        for node in tuple(self._parents):
            if enough():
                return
            if not node.children and goes(node):
                self._drop(node)

    def _root(self, salt: str) -> Node:
        if salt not in self._roots:
            self._roots[salt] = Node(salt, token_array(()), [], Held(self._pool, ()))
        return self._roots[salt]

    def _add(self, parent: Node, tokens: TokenArray, extents: list[Extent]) -> Node:
        node = Node(parent.salt, tokens, extents, self._hold(extents))
        parent.children[int(tokens[0])] = node
        self._parents[node] = parent
        self.tokens += len(tokens)
        return node

    def _split(self, node: Node, end: int) -> Node:
        """The node that ends at coordinate ``end``: ``node`` itself, or a new parent of what is behind it."""
        start = node.start
        if end == start + len(node.tokens):
            return node
        head, tail = node.tokens[: end - start].copy(), node.tokens[end - start :].copy()
        upper = self._add(self._parents[node], head, between(node.extents, start, end))
        upper.children[int(tail[0])] = node
        self.tokens -= len(head)
        before = node.held
        self._parents[node] = upper
        node.tokens = tail
        node.extents = between(node.extents, end, end + len(tail))
        node.held = self._hold(node.extents)
        self._let_go(before)
        for watcher in self._told():
            watcher.split(upper, node)
        return upper

    def _drop(self, node: Node) -> None:
        self._let_go(node.held)
        parent = self._parents.pop(node)
        del parent.children[int(node.tokens[0])]
        if parent not in self._parents and not parent.children:
            del self._roots[parent.salt]
            parent.held.release()
        self.tokens -= len(node.tokens)
        self.evicted_tokens += len(node.tokens)
        self.generation += 1
        for watcher in self._told():
            watcher.dropped(node, parent)

    def _hold(self, extents: list[Extent]) -> Held:
        held = Held(self._pool, blocks_of(extents, self._pool.block_size))
        self._claims.hold(held.blocks)
        return held

    def _let_go(self, held: Held) -> None:
        self._claims.let_go(held.blocks)
        held.release()
