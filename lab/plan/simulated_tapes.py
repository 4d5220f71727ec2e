"""Tapes and frozen prefixes on a simulated device."""

from collections.abc import Sequence
from dataclasses import replace

from daemon.config.schema import SessionConfig
from daemon.engine.build import retention_of
from lab.plan.sources import Sources
from lab.simulation.device import SimDevice
from regions.ephemeral import Fork
from regions.frozen import Context
from regions.tape import Tape


class SimulatedPrefixes:
    """Frozen prefixes in the device's prefix cache: a `scheduler.refresh.Prefixes`."""

    def __init__(self, device: SimDevice, frame_limit: int) -> None:
        self._device, self._frame_limit = device, frame_limit

    def open_prefix(self, tokens: Sequence[int]) -> Fork:
        """See `scheduler.refresh.Prefixes`."""
        context = self._device.cache.match(tokens) or Context()
        prompt = Fork(self._device.pool, frame_limit=self._frame_limit, context=context)
        context.release()
        return prompt

    def close_prefix(self, tokens: Sequence[int], prompt: Fork) -> Context:
        """See `scheduler.refresh.Prefixes`."""
        self._device.cache.save(tokens, prompt)
        context = prompt.as_context()
        prompt.release()
        return replace(context, prefix=tuple(tokens))

    def open_tape(self, session: SessionConfig, sources: Sources) -> Tape:
        """Open a session's empty tape behind its prefix. Raises ValueError if the pool is too small."""
        prefix = sources.prefixes.newest(session.name)
        frozen = self.open_prefix(prefix)
        rest = prefix[frozen.cached_tokens :]
        if not frozen.acquire(len(rest)):
            raise ValueError(
                f"a pool of {sources.blocks} blocks is too small for {len(prefix)} frozen tokens"
            )
        frozen.wrote(frozen.next_slots(len(rest)), rest)
        tape = Tape(
            session.name,
            self._device.pool,
            self.close_prefix(prefix, frozen),
            retention_of(session, sources.prompt),
            frame_limit=min(self._frame_limit, sources.outline.max_positions),
        )
        tape.staleness_ns = sources.config.freshness_objective_ns(session)
        return tape


def fill_window(tape: Tape, interval: int, wall_ns: int) -> None:
    """Write bars of the length of those that are there, until the window is full; nothing takes time.

    ``interval``: of a bar, ns. Raises ValueError if the pool is too small.
    """
    kept, length = tape.retention, round(tape.live_tokens / max(1, tape.live_records))
    while (
        length
        and tape.live_tokens + length <= kept.tokens
        and (not kept.records or tape.live_records < kept.records)
        and (not kept.span_ns or tape.live_records * interval < kept.span_ns)
    ):
        if not tape.acquire(length):
            raise ValueError("the pool is too small for the windows")
        tape.wrote(tape.next_slots(length), [3] * length)
        tape.commit([length], [wall_ns])
