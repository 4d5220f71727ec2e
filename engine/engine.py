"""The engine: one pool, one model, and forward passes over mixed batches of tapes, forks and prompts."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TypeVar

import torch

from engine.attention.base import Attention
from engine.attention.cpu_kernel.choice import cpu_attention
from engine.attention.last_layer import LastLayer
from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.device import guarded, to_device
from engine.graphs.runner import Capture, CapturePlan, GraphRunner, runner_for
from engine.model.architectures import ModelError
from engine.model.loaded import ForwardContext, LoadedModel
from engine.model.question_pack import MAX_TOKENS
from engine.pass_end import PassEnd
from engine.sampling import accept, choose
from engine.seeding import Sampling
from engine.step import Chunk, SampledToken
from regions.ephemeral import Fork
from regions.extents import Placement
from regions.frozen import Context
from regions.kv_tensors import KVPool
from regions.radix import RadixCache
from regions.streaming_kv import StreamingPrompt
from regions.tape import Retention, Tape

FREEZE_CHUNK = 1024
"""Tokens per pass when a frozen prefix is prefilled."""

Read = TypeVar("Read")


class Engine:
    """Runs a loaded model over regions of one pool. Not thread-safe: one worker thread owns it.

    ``blocks``: the most that `resize` may ask for. ``attention``: by default Triton kernels on a GPU, the CPU
    backend elsewhere. ``cache_tokens``: most tokens of the prefix cache, by default the pool's size.
    ``retained_share``: see `RadixCache`. ``capture``: how to capture small passes, by default as CUDA graphs
    on a GPU; ``captures``: which, and when. ``eager``: never capture.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        blocks: int,
        block_size: int = 16,
        frame_limit: int = 8192,
        attention: Attention | None = None,
        cache_tokens: int | None = None,
        retained_share: float = 0.25,
        capture: Capture | None = None,
        captures: CapturePlan | None = None,
        eager: bool = False,
    ) -> None:
        self.model = model
        self.between_passes = threading.Event()
        """Set while no pass runs; any thread may wait for it."""
        self.between_passes.set()
        self.frame_limit = min(frame_limit, model.max_positions)
        self.pool = KVPool(
            list(model.layers), blocks, block_size=block_size, dtype=model.kv_dtype, device=model.device
        )
        self.attention = attention or default_attention(model)
        self._adapted: tuple[LoadedModel, ...] = ()
        self._end = PassEnd(model.device)
        budget = blocks * block_size if cache_tokens is None else cache_tokens
        self.cache = RadixCache(self.pool, budget, retained_share=retained_share)
        self.graphs: GraphRunner | None = None
        if not eager:
            self.graphs = runner_for(model, self.pool, self.attention, capture, captures)

    def install(self, adapted: LoadedModel) -> int:
        """Run the rows of a question pack's tokens by the weights of ``adapted``; returns its first token.

        Its tokens follow those of the vocabulary. Any thread may call it, one at a time.
        """
        self._adapted = (*self._adapted, adapted)
        return self.model.sizes.vocabulary + MAX_TOKENS * (len(self._adapted) - 1)

    @property
    def took_ns(self) -> int | None:
        """See `Timed`; on a CPU its callers time it."""
        return self._end.took_ns

    def resize(self, blocks: int, cache_tokens: int) -> None:
        """Use at most ``blocks`` of the pool, and ``cache_tokens`` of them for cached prefixes."""
        self.pool.resize(blocks)
        self.cache.resize(cache_tokens)

    def open_tape(self, name: str, frozen: Sequence[int], retention: Retention) -> Tape:
        """Open a session. Its frozen prefix is prefilled once for all sessions with the same tokens.

        Raises ValueError when prefix and retention leave no room below the frame limit, ModelError when the
        pool is too small for the prefix, and OutOfMemory when the prefill runs out of memory.
        """
        context = self._freeze(frozen)
        try:
            return Tape(name, self.pool, context, retention, frame_limit=self.frame_limit)
        except ValueError:
            context.release()
            raise

    def open_prompt(self, salt: str = "") -> StreamingPrompt:
        """Open a stateless prompt. It finds prefixes in the cache that were saved under the same salt only.

        ``salt``: from the authenticated identity.
        """
        return StreamingPrompt(self.pool, self.cache, frame_limit=self.frame_limit, salt=salt)

    def open_prefix(self, tokens: Sequence[int]) -> Fork:
        """A reader of what the cache has of a frozen prefix; the caller prefills the rest into it."""
        context = self.cache.match(tokens) or Context()
        prompt = Fork(self.pool, frame_limit=self.frame_limit, context=context)
        context.release()
        return prompt

    def close_prefix(self, tokens: Sequence[int], prompt: Fork) -> Context:
        """The frozen prefix of ``tokens``, all in ``prompt``'s KV, as a context that the caller owns."""
        self.cache.save(tokens, prompt)
        context = prompt.as_context()
        prompt.release()
        return replace(context, prefix=tuple(tokens))

    def append(self, tape: Tape, records: Sequence[Sequence[int]]) -> None:
        """Append ``records`` of tokens to a session in one pass, as its next data version.

        The oldest records leave the window as its retention says. Raises ModelError when the pool is full.
        """
        lengths = [len(record) for record in records]
        tape.make_room(lengths)
        if not tape.acquire(sum(lengths)):
            raise ModelError(f"the pool has no room for {sum(lengths)} tokens of session {tape.name}")
        self.execute([Chunk(tape, list(chain.from_iterable(records)), sample=False)])
        tape.commit(lengths)

    def answer(
        self,
        tape: Tape,
        question: Sequence[int],
        *,
        max_tokens: int = 1,
        choices: tuple[int, ...] | None = None,
    ) -> list[int]:
        """The likeliest answer to a question of a session, in tokens; the session stays as it is.

        ``choices``: the first token is one of them. Raises ModelError when the pool is full.
        """
        fork, appended = tape.fork(), question
        answer: list[int] = []
        try:
            while len(answer) < max_tokens:
                if not fork.acquire(len(appended)):
                    raise ModelError(f"the pool has no room for a question of {len(question)} tokens")
                (chosen,) = self.execute([Chunk(fork, appended, choices=None if answer else choices)])
                if chosen is None or chosen.token in self.model.end_ids:
                    break
                answer.append(chosen.token)
                appended = answer[-1:]
            return answer
        finally:
            fork.release()

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """One forward pass over a mixed batch; afterwards every target's tokens are in KV.

        See `Executor.execute`. Chunks of one session should be adjacent, so that shared extents are read
        once. Of ``d`` drafts ``len(token.accepted)`` were right; the caller drops the others by
        ``fork.keep(fork.length - d + len(token.accepted))``. After an exception no target has changed: what
        the pass wrote lies after the targets' ends and will be overwritten.
        """
        keep: list[int] = []
        choices: list[tuple[int, ...] | None] = []
        sampling: list[Sampling | None] = []
        tops: list[int | None] = []
        end = 0
        for chunk in batch:
            end += len(chunk.tokens)
            keep += range(end - chunk.sampled_rows, end)
            choices += chunk.row_choices
            sampling += [chunk.sampling and chunk.sampling.later(i) for i in range(chunk.sampled_rows)]
            tops += [chunk.top_logprobs] * chunk.sampled_rows
        if not keep:
            # else its time and its faults would be those of a later pass
            self._run(batch, [], lambda logits: self._end.wait())
            return [None] * len(batch)
        read = partial(choose, choices=choices, sampling=sampling, top_logprobs=tops, fetch=self._end.fetch)
        chosen = iter(self._run(batch, keep, read))
        return [
            accept(chunk.tokens[len(chunk.tokens) - chunk.drafts :], list(islice(chosen, chunk.sampled_rows)))
            if chunk.sample
            else None
            for chunk in batch
        ]

    def logits(self, batch: Sequence[Chunk], rows: Sequence[int] | None = None) -> torch.Tensor:
        """As `execute`; returns the logits of ``rows`` (rising, by default all), fp32 [rows, vocabulary]."""
        if rows is None:
            rows = range(sum(len(chunk.tokens) for chunk in batch))
        # a captured graph returns its logits at the same address each time
        return self._run(batch, rows, torch.clone)

    def _run(self, batch: Sequence[Chunk], keep: Sequence[int], read: Callable[[torch.Tensor], Read]) -> Read:
        """Run one pass; returns ``read`` applied to the logits of rows ``keep`` [keep, vocabulary]."""
        placements = [chunk.target.next_slots(len(chunk.tokens)) for chunk in batch]
        self._end.expect()
        self.between_passes.clear()
        try:
            # tokens count as written only after `read`: an error of the device may surface only then
            result = guarded(self.model.device, lambda: read(self._logits(batch, placements, keep)))
        finally:
            self.between_passes.set()
        for chunk, placement in zip(batch, placements, strict=True):
            chunk.target.wrote(placement, chunk.tokens)
        return result

    def _logits(
        self, batch: Sequence[Chunk], placements: Sequence[Placement], keep: Sequence[int]
    ) -> torch.Tensor:
        """Each row by its own weights; the model's own rows as if there were no others."""
        owners = [self._weights_of(chunk) for chunk in batch]
        if not any(owners):
            return self._forward(0, batch, placements, keep)
        owner_of = [owner for owner, chunk in zip(owners, batch, strict=True) for _ in chunk.tokens]
        parts, order = list[torch.Tensor](), list[int]()
        for number in sorted(set(owners)):
            mine = [index for index, owner in enumerate(owners) if owner == number]
            rows = [row for row, owner in enumerate(owner_of) if owner == number]
            place = {row: at for at, row in enumerate(rows)}
            kept = [at for at, row in enumerate(keep) if row in place]
            own = [place[keep[at]] for at in kept]
            found = self._forward(number, [batch[i] for i in mine], [placements[i] for i in mine], own)
            if kept:
                parts.append(found)
                order += kept
        if not parts:
            return torch.empty(0, 0, device=self.model.device)
        (back,) = to_device(self.model.device, sorted(range(len(order)), key=order.__getitem__))
        return torch.cat(parts)[back]

    def _weights_of(self, chunk: Chunk) -> int:
        """By whose weights its rows run: 0 is the model, others are those of question packs."""
        behind = chunk.tokens[0] - self.model.sizes.vocabulary if chunk.tokens else -1
        return 0 if behind < 0 or not self._adapted else 1 + behind // MAX_TOKENS

    def _forward(
        self, number: int, batch: Sequence[Chunk], placements: Sequence[Placement], keep: Sequence[int]
    ) -> torch.Tensor:
        """A pass of rows with the same weights."""
        model, first = self.model, 0
        if number:
            model, first = self._adapted[number - 1], self.model.sizes.vocabulary + MAX_TOKENS * (number - 1)
        device, packed = self.model.device, list[PackedRows]()
        for chunk, placement in zip(batch, placements, strict=True):
            start = packed[-1].stop if packed else 0
            packed.append(PackedRows(start, start + len(chunk.tokens), placement))
        metadata = AttentionMetadata([part for each in packed for part in each.sequences()], device)
        tokens = [token - first for chunk in batch for token in chunk.tokens]
        if not number and self.graphs is not None and self.graphs.takes(metadata):
            return self.graphs.logits(metadata, tokens, keep or [metadata.rows - 1], self._end.begin)
        last = LastLayer(keep, metadata) if model.trims and 2 * len(keep) <= metadata.rows else None
        if last is None:
            keep = keep or [metadata.rows - 1]  # the model needs at least one row
        ranges = [slot for part in packed for slot in part.placement.slots]
        run = slice(ranges[0][0], sum(ranges[0])) if len(ranges) == 1 else None
        scattered = [] if run else [slot for begin, n in ranges for slot in range(begin, begin + n)]
        ids, rows, slots = to_device(device, tokens, keep, scattered)
        context = ForwardContext(metadata, self.pool, run or slots, self.attention, model.rotations, last)
        self._end.begin()
        return model.forward(context, ids, rows)

    def _freeze(self, tokens: Sequence[int]) -> Context:
        """A context of all ``tokens``, owned by the caller; only tokens that are not cached are computed."""
        prompt = self.open_prefix(tokens)
        try:
            if not prompt.acquire(len(tokens) - prompt.cached_tokens):
                raise ModelError(
                    f"a pool of {self.pool.total_blocks} blocks is too small for {len(tokens)} frozen tokens"
                )
            for start in range(prompt.cached_tokens, len(tokens), FREEZE_CHUNK):
                self.execute([Chunk(prompt, tokens[start : start + FREEZE_CHUNK], sample=False)])
            return self.close_prefix(tokens, prompt)
        finally:
            prompt.release()


def default_attention(model: LoadedModel) -> Attention:
    """The default backend for ``model`` on its device."""
    if model.device.type == "cpu":
        return cpu_attention(model.layers, model.kv_dtype)
    # imported here: compiling kernels needs a GPU, and importing Triton is slow
    from engine.attention.triton import TritonAttention

    return TritonAttention()
