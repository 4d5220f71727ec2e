"""The prefix cache of the simulated device: a radix tree over segments that counts blocks.

Readers hold the path of a node; what no reader holds is reclaimable and counts as free, and the leaf used
longest ago goes first (as in `regions.radix`). Waiting prompts may be watched: each stands where its match
ends, so a change of the tree concerns those who stand at that place and nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from scheduler.simulation.tokens import EMPTY, Segments, segments


class Node:
    """An edge of the tree; a root has no tokens. `end` counts tokens from the beginning of the prompt."""

    __slots__ = ("blocks", "children", "end", "ends", "inside", "parent", "tokens", "used", "users")

    def __init__(self, parent: Node | None, tokens: Segments, blocks: int) -> None:
        self.parent, self.tokens, self.blocks = parent, tokens, blocks
        self.end: int = len(tokens) + (parent.end if parent else 0)
        self.children: dict[int, Node] = {}
        self.users = 0
        """Readers that hold it or something below it."""
        self.used = 0
        self.ends: dict[int | None, dict[int, None]] = {}
        """Watched prompts whose match ends with this edge, by their next token."""
        self.inside: dict[int, int] = {}
        """Watched prompts whose match ends on this edge: how long it is."""

    @property
    def start(self) -> int:
        """Tokens before this edge."""
        return self.end - len(self.tokens)


class SimCache:
    """Prefixes in blocks of ``block_size`` tokens. Without ``keep`` nothing outlives its last reader.

    It also is the `PrefixIndex` of itself. The blocks of the nodes belong to it: it is given them with
    `insert`, and gives them back in `evict`.
    """

    def __init__(self, block_size: int, *, keep: bool = False) -> None:
        self.keep = keep
        self.blocks = 0
        """Blocks of all nodes."""
        self.reclaimable = 0
        """Blocks of nodes that nobody holds."""
        self._size = block_size
        self._roots: dict[str, Node] = {}
        self._clock = count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # a heap; entries may be out of date
        self._watched: dict[int, tuple[Segments, Node]] = {}
        self._changed: dict[int, int] = {}

    def find(self, tokens: Segments, salt: str, most: int) -> tuple[Node, int]:
        """The node on which the longest cached prefix of at most `most` tokens ends, and its length."""
        node = self._root(salt)
        while node.end < most:
            child = node.children.get(tokens[node.end])
            if child is None:
                break
            common = child.tokens.common(tokens[node.end : most])
            if common < len(child.tokens):
                return child, node.end + common
            node = child
        return node, node.end

    def cut(self, node: Node, at: int) -> Node:
        """The node that ends at `at` on the path to `node`; an edge is split if need be."""
        while at <= node.start and node.parent is not None:
            node = node.parent
        return self._split(node, at) if at < node.end else node

    def insert(self, tokens: Segments, salt: str, blocks: int) -> tuple[Node, int]:
        """The node of exactly `tokens`, and how many of the `blocks` with their KV it had no use for."""
        node, matched = self.find(tokens, salt, len(tokens))
        node = self.cut(node, matched)
        if matched == len(tokens):
            return node, blocks
        added = min(blocks, -(-(len(tokens) - matched) // self._size))
        child = Node(node, tokens[matched:], added)
        node.children[child.tokens[0]] = child
        self.blocks += added
        self.reclaimable += added
        for key in node.ends.pop(child.tokens[0], ()):
            wanted = self._watched[key][0]
            self._stand(key, wanted, child, child.start + child.tokens.common(wanted[child.start :]))
        return child, blocks - added

    def hold(self, node: Node) -> None:
        """A reader reads the path to `node`."""
        at: Node | None = node
        while at is not None:
            if not at.users:
                self.reclaimable -= at.blocks
            at.users += 1
            at = at.parent

    def drop(self, node: Node) -> int:
        """It no longer does; returns how many blocks that freed at once."""
        freed = 0
        at: Node | None = node
        while at is not None:
            above = at.parent
            at.users -= 1
            at.used = next(self._clock)
            if not at.users:
                self.reclaimable += at.blocks
                freed += self._idle(at)
            at = above
        return freed

    def evict(self) -> int:
        """Give up the unused leaf that was used longest ago; its blocks. Raises IndexError without one."""
        while True:
            used, _, node = heappop(self._leaves)
            if used == node.used and not node.users and not node.children and node.parent is not None:
                return self._remove(node)

    # PrefixIndex

    def watch(self, key: int, tokens: Sequence[int], salt: str) -> int:
        """See `scheduler.types.PrefixIndex`; at least one token is left to compute."""
        wanted = segments(tokens)[:-1]
        node, matched = self.find(wanted, salt, len(wanted))
        self._stand(key, wanted, node, matched)
        self._changed.pop(key, None)
        return matched

    def forget(self, key: int) -> None:
        """See `scheduler.types.PrefixIndex`."""
        wanted, node = self._watched.pop(key)
        self._changed.pop(key, None)
        if node.inside.pop(key, None) is None:
            after = wanted[node.end] if node.end < len(wanted) else None
            del node.ends[after][key]
            if not node.ends[after]:
                del node.ends[after]

    def changes(self) -> Sequence[tuple[int, int]]:
        """See `scheduler.types.PrefixIndex`; in the order of the changes."""
        found, self._changed = list(self._changed.items()), {}
        return found

    def _stand(self, key: int, wanted: Segments, node: Node, matched: int) -> None:
        self._watched[key] = wanted, node
        self._changed[key] = matched
        if matched < node.end:
            node.inside[key] = matched
        else:
            after = wanted[matched] if matched < len(wanted) else None
            node.ends.setdefault(after, {})[key] = None

    # The tree.

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, EMPTY, 0)
        return root

    def _split(self, node: Node, at: int) -> Node:
        """A new node for the part of the edge before `at`; the old one keeps the rest and all below."""
        parent, tokens, cut = node.parent, node.tokens, at - node.start
        assert parent is not None  # roots have no tokens to split
        upper = Node(parent, tokens[:cut], min(node.blocks, -(-cut // self._size)))
        upper.users, upper.used = node.users, node.used
        parent.children[tokens[0]] = upper
        node.parent, node.tokens = upper, tokens[cut:]
        node.blocks -= upper.blocks
        upper.children[node.tokens[0]] = node
        for key, matched in [(key, matched) for key, matched in node.inside.items() if matched <= at]:
            del node.inside[key]
            pending = self._changed.get(key)
            self._stand(key, self._watched[key][0], upper, matched)
            if pending is None:
                del self._changed[key]  # it stands elsewhere, its length is the same
        return upper

    def _idle(self, node: Node) -> int:
        """Nobody holds the node: it may go, or goes at once; blocks freed."""
        if node.children or node.parent is None:
            return 0
        if not self.keep:
            return self._remove(node)
        self._offer(node)
        return 0

    def _offer(self, node: Node) -> None:
        """A leaf that nobody holds may be evicted."""
        heappush(self._leaves, (node.used, next(self._clock), node))

    def _remove(self, node: Node) -> int:
        parent, first = node.parent, node.tokens[0]
        assert parent is not None  # roots stay
        del parent.children[first]
        self.blocks -= node.blocks
        self.reclaimable -= node.blocks
        standing = [*node.inside, *(key for keys in node.ends.values() for key in keys)]
        for key in standing:
            self._stand(key, self._watched[key][0], parent, parent.end)
        if not parent.users and parent.parent is not None and not parent.children and self.keep:
            self._offer(parent)
        return node.blocks
