"""The scheduler's prompts and its host tier over the regions: where the two floors' words meet."""

from __future__ import annotations

from collections.abc import Sequence

from regions.ephemeral import Fork
from regions.offload.host import HostTier
from regions.prompt import StreamingPrompt
from scheduler.types import PromptReader, Reader


class StreamReader:
    """A streaming prompt as the scheduler reads it (`scheduler.types.PromptReader`).

    ``fork`` is what the engine runs; it is another one after the prompt was cut back into, or extended by, a
    prefix, so it is looked up for every pass.
    """

    version = 0

    def __init__(self, prompt: StreamingPrompt) -> None:
        self._prompt = prompt

    @property
    def fork(self) -> Fork:
        """The fork that holds its KV."""
        return self._prompt.fork

    @property
    def cached_tokens(self) -> int:
        """Tokens that were found in the prefix cache or read from a group's leader."""
        return self.fork.cached_tokens

    @property
    def length(self) -> int:
        """Tokens in KV: of the prompt, aliased ones included, and of the answer."""
        return self._prompt.computed

    @property
    def blocks(self) -> int:
        """Private blocks in the pool."""
        return self.fork.blocks

    @property
    def swapped(self) -> bool:
        """Its private KV is on the host."""
        return self.fork.swapped

    def blocks_needed(self, n: int) -> int:
        """Blocks to take before `n` more tokens fit."""
        return self.fork.blocks_needed(n)

    def acquire(self, n: int) -> bool:
        """Take blocks for `n` more tokens, swapping in what was swapped out; False without room."""
        return self.fork.acquire(n)

    def keep(self, n: int) -> None:
        """Only the first `n` tokens stay in KV."""
        self._prompt.keep(n)

    def reset(self) -> None:
        """Drop all KV, the aliased part too: the prefix cache gives it again if it still has it."""
        self._prompt.keep(0)

    def release(self) -> None:
        """Drop everything."""
        self._prompt.release()

    def update(self, tokens: Sequence[int]) -> int:
        """Another prompt; returns how many tokens in KV were invalidated."""
        return self._prompt.update(tokens)

    def match(self) -> int:
        """Read from the prefix cache what it holds beyond the tokens in KV; the tokens gained."""
        return self._prompt.match()

    def follow(self, leader: PromptReader, n: int) -> None:
        """Read the first `n` tokens of `leader`, metadata only."""
        assert isinstance(leader, StreamReader)  # one daemon opens one kind
        self._prompt.follow(leader.fork, n)

    def save(self) -> None:
        """Offer what is in KV to the prefix cache."""
        self._prompt.save()


class HostSwap:
    """The host tier for readers (`scheduler.types.Tier`)."""

    def __init__(self, host: HostTier) -> None:
        self._host = host

    def swap_out(self, reader: Reader) -> bool:
        """Move the reader's private KV to the host; False, and nothing changed, without room there.

        False, too, when none of it is the reader's alone: what others hold stays in the pool, so only
        dropping it gives blocks up.
        """
        fork = fork_of(reader)
        return bool(fork.slots.length) and fork.swap_out(self._host)


def fork_of(reader: Reader) -> Fork:
    """What the engine runs for a reader: a fork of a tape, or a prompt's present one."""
    if isinstance(reader, StreamReader):
        return reader.fork
    assert isinstance(reader, Fork)  # there are no others in a daemon
    return reader
