"""Radix prefix cache: prompts with a common beginning read one copy of it (*Attention Once* section 3.10.2).

The cache is a trie of tokens. An edge is a run of tokens and their slots. Slots are addressed one by one, so
an edge can be split anywhere, and both halves then refer to the block at the split. A match returns the slots
of its path as a `Context` with its own references, which later splits and evictions do not change. Only
prompts that begin at coordinate 0 are cached: one position frame, origin 0.

Nodes are ordered by last use, each before its ancestors, so walking that order finds the least recently used
leaf. Leaves of a lower priority go first (`regions.cache_priority`).
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from regions.cache_priority import ORDINARY, PrefixRetention, Priorities
from regions.ephemeral import Fork
from regions.extents import Extent, between, blocks_of
from regions.frozen import Context, SharedBlocks, alias
from regions.pool_metadata import BlockPool

TokenArray = npt.NDArray[np.int32]
Tokens = Sequence[int] | TokenArray


def token_array(tokens: Tokens) -> TokenArray:
    """``tokens`` as int32 [tokens]; an int32 array is not copied."""
    if hasattr(tokens, "__array__"):
        return np.asarray(tokens, np.int32)
    return np.fromiter(tokens, np.int32, len(tokens))


def common_length(a: TokenArray, b: TokenArray) -> int:
    """Length of the common prefix of ``a`` and ``b``, in tokens."""
    n = min(len(a), len(b))
    if not n:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())  # also 0 when none differs
    return first if differ[first] else n


class Node:
    """An edge of the trie and the subtree below it; a root has no tokens.

    A node does not refer to its parent: without reference cycles, the pool's memory is freed with its last
    user.
    """

    __slots__ = ("blocks", "children", "extents", "salt", "tokens")

    def __init__(self, salt: str, tokens: TokenArray, extents: list[Extent], blocks: SharedBlocks) -> None:
        self.salt = salt
        self.tokens = tokens
        self.extents = extents
        self.blocks = blocks
        self.children: dict[int, Node] = {}  # by first token

    @property
    def start(self) -> int:
        """Coordinate of its first token, the number of tokens above it."""
        return self.extents[0].coord if self.extents else 0

    def shorten(self, tokens: TokenArray, extents: list[Extent], blocks: SharedBlocks) -> None:
        """Keep only its last ``tokens``; its parent has the others."""
        self.tokens, self.extents, self.blocks = tokens, extents, blocks

    def has_any(self, marked: npt.NDArray[np.bool_]) -> bool:
        """Whether it refers to any of the ``marked`` blocks, bool [blocks]."""
        return any(bool(marked[start:stop].any()) for start, stop in self.blocks.blocks)


class Watcher(Protocol):
    """Receives the changes of the trie; a parent may be a root."""

    def added(self, node: Node, parent: Node) -> None:
        """``node`` continues ``parent`` with tokens that were not cached."""

    def split(self, upper: Node, node: Node) -> None:
        """``node`` gave its first tokens to ``upper``, its new parent. The cached tokens do not change."""

    def dropped(self, node: Node, parent: Node) -> None:
        """``node``, a leaf below ``parent``, is no longer cached."""


class RadixCache:
    """Prefixes of prompts in KV, at most ``budget`` tokens, with one trie per salt.

    ``retained_share``: part of the budget that one owner may hold above the default priority, until its time
    by ``clock`` (ns) has passed.

    The salt comes from the caller's authenticated identity, so that no client can find out what others asked.
    The cache is a `Reclaimer` of ``pool``, which keeps only a weak reference to it. Not thread-safe: the
    engine's worker thread owns it.
    """

    def __init__(
        self,
        pool: BlockPool,
        budget: int,
        *,
        retained_share: float = 0.25,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.budget = budget
        self._retained_share = retained_share
        self.priorities: Priorities[Node] = Priorities(int(budget * retained_share), clock)
        self.tokens = 0
        """Cached tokens."""
        self.matched_tokens = self.saved_tokens = self.evicted_tokens = self.refused = 0
        self._pool = pool
        self._roots: dict[str, Node] = {}
        # each node's parent; ordered by last use, the oldest first, so each node comes before its ancestors
        self._parents: OrderedDict[Node, Node] = OrderedDict()
        self._own = pool.blocks.own_references()
        self.watchers: WeakSet[Watcher] = WeakSet()
        """Receive every change of the trie."""
        pool.add_reclaimer(self)

    def match(self, tokens: Tokens, salt: str = "") -> Context | None:
        """The longest cached prefix of ``tokens``, with its own references; None without one."""
        path, matched = self.walk(token_array(tokens), salt)
        if not matched:
            return None
        self.matched_tokens += matched
        self._touch(path)
        return alias(self._pool, (extent for node in path for extent in node.extents), matched)

    def match_length(self, tokens: Tokens, salt: str = "") -> int:
        """Number of tokens that `match` would find. Changes nothing."""
        return self.walk(token_array(tokens), salt)[1]

    def walk(self, tokens: TokenArray, salt: str) -> tuple[list[Node], int]:
        """The nodes along ``tokens``, and the matching tokens; the last node may match in part."""
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

    def save(
        self, tokens: Tokens, source: Fork | Context, salt: str = "", retention: PrefixRetention = ORDINARY
    ) -> int:
        """Cache the KV of ``tokens``, the oldest that ``source`` sees; returns how many were added.

        Only tokens that are not cached yet are added. When they exceed the budget, prefixes without readers
        are evicted, of the lowest priority the least recently used leaf first. If that does not suffice,
        nothing is added and ``refused`` is incremented. All of the prefix gets the priority of ``retention``
        where that is higher. Raises ValueError when ``source`` reads a tape or does not have these tokens.
        """
        if not self.budget:
            self.refused += len(tokens) > 0
            return 0
        key = token_array(tokens)
        extents = _extents_of(source, key)
        path, matched = self.walk(key, salt)
        delta = len(key) - matched
        self.priorities.expire()
        if path and (delta or self.priorities.of(path[-1]) < retention.priority):
            path[-1] = self._split(path[-1], matched)
        used, node = path, None
        if delta and self._fits(delta, path):
            parent = path[-1] if path else self._root(salt)
            node = self._add(parent, key[matched:].copy(), between(extents, matched, len(key)))
            for watcher in self.watchers:
                watcher.added(node, parent)
            self.saved_tokens += delta
            used = [*path, node]
        else:
            delta = 0
        self._touch(path)
        self.priorities.keep([(each, len(each.tokens)) for each in used], retention, new=node)
        return delta

    @property
    def reclaimable(self) -> int:
        """Blocks without other readers, exactly those that `reclaim` can free."""
        return self._own.sole

    def reclaim(self, blocks: int) -> None:
        """Free ``blocks`` blocks, or as many as possible.

        Leaves without readers go first, the least recently used one before the others. Then follow leaves in
        use below ancestors that are not in use: their readers computed the ancestors' tokens themselves.
        """
        target = self._pool.blocks.free_blocks + blocks
        idle = self._own.idle()

        def enough() -> bool:
            return self._pool.blocks.free_blocks >= target

        def unlocks(node: Node | None) -> bool:
            while node and not node.has_any(idle):
                node = self._parents.get(node)
            return node is not None

        self._evict(enough, lambda node: node.has_any(idle))
        self._evict(enough, unlocks)

    def resize(self, budget: int) -> None:
        """Keep at most ``budget`` tokens from now on, and what others read."""
        self.budget = budget
        self.priorities.bound(int(budget * self._retained_share))
        idle = self._own.idle()
        self._evict(lambda: self.tokens <= budget, lambda node: node.has_any(idle))

    def clear(self) -> None:
        """Drop everything. Readers keep their references."""
        self._evict(lambda: False, lambda node: True)

    def check_integrity(self) -> None:
        """Raise AssertionError unless trie, order of use, token count and block counts agree."""
        mine = np.zeros_like(self._own.own)
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
                for start, stop in node.blocks.blocks:
                    mine[start:stop] += 1
        assert reached == len(self._parents), "the order of use and the trie differ"
        assert self.tokens == sum(len(node.tokens) for node in self._parents), "the token count is wrong"
        assert bool((mine == self._own.own).all()), "the cache's own references are miscounted"
        self._own.check_integrity()
        self.priorities.check_integrity()

    def _touch(self, path: list[Node]) -> None:
        for node in reversed(path):
            self._parents.move_to_end(node)

    def _fits(self, delta: int, path: list[Node]) -> bool:
        """Make room for ``delta`` more tokens below ``path``, whose nodes must stay."""
        along = set(path)
        if sum(len(node.tokens) for node in along) + delta <= self.budget:
            idle = self._own.idle()
            self._evict(
                lambda: self.tokens + delta <= self.budget,
                lambda node: node not in along and node.has_any(idle),
            )
        fits = self.tokens + delta <= self.budget
        self.refused += not fits
        return fits

    def _evict(self, enough: Callable[[], bool], goes: Callable[[Node], bool]) -> None:
        """Drop leaves, of the lowest priority the least recently used first, until ``enough``.

        A parent follows its last child.
        """
        priority = self.priorities.of
        self.priorities.expire()
        for level in self.priorities.levels():
            for node in tuple(self._parents):
                if enough():
                    return
                if node.children or priority(node) != level or node not in self._parents or not goes(node):
                    continue
                parent = self._drop(node)
                # with its last child gone, a parent of a lower priority is the first of all
                while parent in self._parents and not parent.children and priority(parent) < level:
                    if enough():
                        return
                    if not goes(parent):
                        break
                    parent = self._drop(parent)

    def _root(self, salt: str) -> Node:
        if salt not in self._roots:
            self._roots[salt] = Node(salt, token_array(()), [], SharedBlocks(self._pool, ()))
        return self._roots[salt]

    def _add(self, parent: Node, tokens: TokenArray, extents: list[Extent]) -> Node:
        node = Node(parent.salt, tokens, extents, self._share(extents))
        parent.children[int(tokens[0])] = node
        self._parents[node] = parent
        self.tokens += len(tokens)
        return node

    def _split(self, node: Node, end: int) -> Node:
        """The node that ends at coordinate ``end``: ``node``, or a new parent of its rest."""
        start = node.start
        if end == start + len(node.tokens):
            return node
        head, tail = node.tokens[: end - start].copy(), node.tokens[end - start :].copy()
        upper = self._add(self._parents[node], head, between(node.extents, start, end))
        upper.children[int(tail[0])] = node
        self.tokens -= len(head)
        before = node.blocks
        self._parents[node] = upper
        self.priorities.split(upper, len(head), node)
        rest = between(node.extents, end, end + len(tail))
        node.shorten(tail, rest, self._share(rest))
        self._release(before)
        for watcher in self.watchers:
            watcher.split(upper, node)
        return upper

    def _drop(self, node: Node) -> Node:
        """Drop a leaf; returns its parent."""
        self._release(node.blocks)
        self.priorities.drop(node)
        parent = self._parents.pop(node)
        del parent.children[int(node.tokens[0])]
        if parent not in self._parents and not parent.children:
            del self._roots[parent.salt]
            parent.blocks.release()
        self.tokens -= len(node.tokens)
        self.evicted_tokens += len(node.tokens)
        for watcher in self.watchers:
            watcher.dropped(node, parent)
        return parent

    def _share(self, extents: list[Extent]) -> SharedBlocks:
        shared = SharedBlocks(self._pool, blocks_of(extents, self._pool.block_size))
        self._own.add(shared.blocks)
        return shared

    def _release(self, shared: SharedBlocks) -> None:
        self._own.remove(shared.blocks)
        shared.release()


def _extents_of(source: Fork | Context, tokens: TokenArray) -> tuple[Extent, ...]:
    """The extents of everything that ``source`` sees, of which ``tokens`` are the oldest.

    Raises ValueError when it reads a tape or does not have these tokens.
    """
    extents = source.extents
    end = 0
    for extent in extents:
        if source.version or extent.origin or extent.coord != end:
            raise ValueError("only a prompt that begins at coordinate 0, not a fork of a tape, can be cached")
        end += extent.length
    if end < len(tokens):
        raise ValueError(f"{len(tokens)} tokens cannot be cached: only {end} are in KV")
    if isinstance(source, Fork):
        own = token_array(source.tokens)
        if not np.array_equal(
            tokens[source.cached_tokens :], own[: max(0, len(tokens) - source.cached_tokens)]
        ):
            raise ValueError("the tokens to cache differ from those in KV")
    return extents
