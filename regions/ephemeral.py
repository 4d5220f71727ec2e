"""The ephemeral region: a question and its answer after an immutable context (snapshot isolation).

A fork's context never changes, so the tape may append, evict and be forked again meanwhile. Forks replace the
in-place strip/extend/clear/restore of *Attention Once* section 3.9.3.
"""

from collections.abc import Sequence

from regions.allocator import Run
from regions.block_table import BlockTable
from regions.extents import Extent, Placement, blocks_of, keep_oldest
from regions.frozen import Context, SharedBlocks
from regions.offload.kv_store import Store
from regions.pool_metadata import BlockPool


class Fork:
    """Private tokens after a shared, immutable context, which it retains; a stateless prompt has no context.

    ``grows``: expect many more tokens (a window that is prefilled again), and look for room to grow.
    """

    def __init__(
        self, pool: BlockPool, *, frame_limit: int, context: Context | None = None, grows: bool = False
    ) -> None:
        self.tokens: list[int] = []
        self._pool = pool
        self._context = (context or Context()).retain()
        self._origin = self._context.origin
        self._frame_limit = frame_limit
        self._table = BlockTable(pool, grows=grows)
        # the oldest private tokens, shared with others; the table has the rest
        self._shared: list[Extent] = []
        self._shared_blocks: list[SharedBlocks] = []
        self._released = False

    @property
    def version(self) -> int:
        """Data version it reads; 0 without a tape."""
        return self._context.version

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens of the frozen prefix that it reads, if they are known."""
        return self._context.prefix

    @property
    def cached_tokens(self) -> int:
        """Tokens of its context."""
        return self._context.tokens

    @property
    def length(self) -> int:
        """Private tokens in KV."""
        return len(self.tokens)

    @property
    def context_tokens(self) -> int:
        """Tokens that the next token sees."""
        return self.cached_tokens + len(self.tokens)

    @property
    def begins_at(self) -> int:
        """Stream coordinate of its first private token."""
        return self._context.coord

    @property
    def exclusive_tokens(self) -> int:
        """Private tokens in blocks that only it refers to: those that a swap moves."""
        return self._table.length

    @property
    def blocks(self) -> int:
        """Blocks of its private tokens, with shared blocks and those taken ahead; 0 while swapped."""
        if self.swapped:
            return 0
        total = self._table.blocks
        for part in self._shared_blocks:
            total += sum(stop - start for start, stop in part.blocks)
        return total

    def blocks_needed(self, n: int) -> int:
        """Blocks to acquire before ``n`` more private tokens fit."""
        return self._table.blocks_needed(n)

    def acquire(self, n: int) -> bool:
        """See `BlockTable.acquire`."""
        return self._table.acquire(n)

    def next_slots(self, n: int) -> Placement:
        """The placement of the next ``n`` tokens. Raises RuntimeError if their blocks were not acquired."""
        coord = self._context.coord + len(self.tokens)
        if coord + n - self._origin > self._frame_limit:
            self._origin = self._context.base
        slots = self._table.next_slots(n)
        return Placement(self.extents, slots, coord, self._origin, own=self._context.coord)

    def wrote(self, placement: Placement, tokens: Sequence[int]) -> None:
        """Record that the ``tokens`` of ``placement`` are in KV."""
        self._table.wrote(placement, len(tokens))
        self.tokens.extend(tokens)

    @property
    def swapped(self) -> bool:
        """Its private tokens are outside the pool."""
        return self._table.stored is not None

    def swap_out(self, host: Store) -> bool:
        """Preempt by swapping, see `BlockTable.swap_out`; the context and shared blocks stay."""
        return self._table.swap_out(host)

    def swap_in(self) -> bool:
        """Bring the private tokens back; False, with nothing changed, when the pool is full."""
        return self._table.swap_in()

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Extents that the next token sees, oldest first. Raises RuntimeError while swapped."""
        return (*self._context.extents, *self.private_extents)

    @property
    def private_extents(self) -> tuple[Extent, ...]:
        """Extents of its private tokens, oldest first. Raises RuntimeError while swapped."""
        return (*self._shared, *self._table.extents)

    @property
    def private_blocks(self) -> list[Run]:
        """The blocks of the private tokens."""
        return [run for shared in self._shared_blocks for run in shared.blocks] + self._table.live_runs()

    def keep(self, n: int) -> None:
        """Keep only the first ``n`` private tokens in KV, after rejected drafts or a changed prompt.

        Blocks that others read are never written again: the next token then goes to a new block. While
        swapped, the rest is freed on the host (*Stream2LLM* section 4.2). Raises ValueError when there are
        fewer than ``n``.
        """
        if n > len(self.tokens):
            raise ValueError(f"{n} tokens cannot be kept of {len(self.tokens)}")
        shared = len(self.tokens) - self._table.length
        del self.tokens[n:]
        self._table.keep(max(0, n - shared))
        if n < shared:
            self._share_only(n)
        elif self._table.tail_is_shared:
            self._shared_blocks.append(SharedBlocks(self._pool, self._table.live_runs()))
            self._shared += self._table.extents
            self._table.release()
        newest = self._table.stretches or self._shared
        self._origin = newest[-1].origin if newest else self._context.origin

    def reset(self) -> None:
        """Preempt by recomputation: drop the private KV, keep the context."""
        self.keep(0)

    def release(self) -> None:
        """Release everything, including the context. Idempotent."""
        if self._released:
            return
        self.reset()
        self._released = True
        self._context.release()
        self._context = Context()

    def detach(self) -> tuple[BlockTable, int]:
        """Hand the private KV's block table and its origin to the caller, and release the rest.

        Raises RuntimeError when others refer to some of the KV, or it is swapped out.
        """
        if self._shared or self.swapped:
            raise RuntimeError("KV that is swapped out or that others refer to cannot be detached")
        table, self._table = self._table, BlockTable(self._pool, grows=False)
        origin = self._origin
        self.tokens = []
        self.release()
        return table, origin

    def as_context(self) -> Context:
        """All it sees as a context with its own references. Raises ValueError for a fork of a tape."""
        if self._context.version or self._context.base:
            raise ValueError("only a prompt, not a fork of a tape, can become a context")
        extents = self.extents
        shared = SharedBlocks(self._pool, self.private_blocks)
        self._context.retain()
        return Context(
            extents,
            (*self._context.blocks, shared),
            self._context.coord + len(self.tokens),
            self._origin,
            self._context.base,
        )

    def _rebase(self, context: Context) -> None:
        """Replace the context, taking over the caller's reference; drop all private KV."""
        Fork.keep(self, 0)
        self._context.release()
        self._context, self._origin = context, context.origin

    def _share_only(self, n: int) -> None:
        """Keep only the first ``n`` of the shared private tokens, and nothing else."""
        before = self._shared_blocks
        keep_oldest(self._shared, n)
        runs = blocks_of(self._shared, self._pool.block_size)
        self._shared_blocks = [SharedBlocks(self._pool, runs)] if n else []
        for shared in before:
            shared.release()
