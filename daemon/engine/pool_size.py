"""How many blocks the pool needs: by the configuration, and by the sessions that are open."""

from collections.abc import Callable, Collection, Iterable
from functools import partial

from msgspec import structs

from daemon.config.checks import pool_problems, pool_size
from daemon.config.schema import Config, SessionConfig
from engine.engine import Engine
from feeds.connector import SettingError

Window = Callable[[SessionConfig], int]
"""Tokens that the window of a session can hold."""


def kept_tokens(session: SessionConfig) -> int:
    """As many as are kept, where lines may have any length."""
    return session.retention_tokens


def check_pool(
    config: Config, sessions: Iterable[SessionConfig], compact: Collection[str], window: Window
) -> None:
    """`pool_size` again, now that it is known which sessions are ``compact``. Raises SettingError."""
    for problem in pool_size(config, [_known(each, compact, window) for each in sessions]):
        raise SettingError(*problem)


def check_pools(config: Config, compact: Collection[str], window: Window) -> None:
    """The same of all sessions that may be open at once. Raises SettingError."""
    for problem in pool_problems(config, partial(_known, compact=compact, window=window)):
        raise SettingError(*problem)


def _known(session: SessionConfig, compact: Collection[str], window: Window) -> SessionConfig:
    lines = "compact" if session.name in compact else session.lines
    return structs.replace(session, lines=lines, retention_tokens=window(session))


class PoolSizes:
    """Blocks that sessions need for their windows, twice over, and those that all share.

    A tape needs its window and one append. An `exact` tape, one of the ``compact`` sessions, or one with a
    rollup also needs the window that replaces it, and the latter two what they do not share of their prefix.
    The others share room for one window that is only compared or that gets other numbered questions, and for
    prefixes with them. Forks that read old versions keep what was evicted meanwhile, and the cell budget
    reserves its share of the pool for questions.
    """

    def __init__(self, config: Config, frozen_tokens: int, window: Window = kept_tokens) -> None:
        """``frozen_tokens``: of the longest frozen prefix."""
        self._config, self._frozen, self._window = config, frozen_tokens, window
        self._sessions = config.all_sessions

    @property
    def shared(self) -> int:
        """Blocks that are needed without any session."""
        limits, is_frozen = self._config.scheduler, self._config.flash.placement == "frozen"
        window = (
            self._window(s)
            for s in self._sessions
            if not _is_replaced(s) and (s.divergence_every or is_frozen)
        )
        question = limits.max_prompt_tokens + limits.max_new_tokens
        prefixes = (3 if is_frozen else 1) * self._frozen
        return (
            self._blocks(prefixes + 2 * max(window, default=0) + int(2 * question / limits.cell_budget)) + 1
        )

    def of(self, session: SessionConfig, *, compact: bool) -> int:
        """Blocks that a session needs."""
        window = self._window(session)
        tokens = window + min(window, self._config.scheduler.max_batch_tokens) + session.summed_tokens
        tokens += window * (compact or _is_replaced(session))
        tokens += self._frozen * compact
        return self._blocks(2 * tokens) + 2

    def largest(self, compact: Collection[str]) -> int:
        """Blocks that the session needs which needs most."""
        return max((self.of(s, compact=s.name in compact) for s in self._sessions), default=1)

    def all(self, compact: Collection[str]) -> int:
        """Blocks of all sessions, of as many as patterns may open besides, and what they share."""
        config = self._config
        more = sum(
            self.of(each.example, compact=each.match in compact)
            * max(0, each.max_sessions - sum(each.matches(s.symbol) for s in config.sessions))
            for each in config.patterns
        )
        return self.configured(compact) + more

    def configured(self, compact: Collection[str]) -> int:
        """Blocks of the configured sessions, and what they share."""
        return self.shared + sum(self.of(s, compact=s.name in compact) for s in self._config.sessions)

    def fitting(self, blocks: int, compact: Collection[str]) -> int:
        """How many of the configured sessions ``blocks`` are enough for, in the order of the file."""
        left = blocks - self.shared
        for fit, session in enumerate(self._config.sessions):
            left -= self.of(session, compact=session.name in compact)
            if left < 0:
                return fit
        return len(self._config.sessions)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._config.pool.block_size)


def _is_replaced(session: SessionConfig) -> bool:
    """Whether another window is prefilled while the old one is read."""
    return session.semantics == "exact" or bool(session.rollup)


class PoolLimit:
    """Has the engine's pool as large as its open sessions need, of the memory that was set aside for it.

    ``cached(blocks)``: tokens of the prefix cache in a pool of this size. ``follows``: it does so; a pool
    of a size that was asked for stays as it is. ``largest``: blocks of the session that needs most.
    """

    def __init__(
        self,
        engine: Engine,
        sizes: PoolSizes,
        cached: Callable[[int], int],
        *,
        follows: bool,
        largest: int,
    ) -> None:
        self.at_a_time = (engine.pool.capacity - sizes.shared) // largest
        """How many of the largest session there is room for."""
        self._engine, self._sizes, self._cached, self._follows = engine, sizes, cached, follows
        self._needs: dict[str, int] = {}
        self._all = sizes.shared
        self._resize()

    @property
    def capacity(self) -> int:
        """Blocks that there is memory for."""
        return self._engine.pool.capacity

    def has_room(self, session: SessionConfig, *, compact: bool) -> bool:
        """Whether a session can be opened, or changed, with all that it may need."""
        others = self._all - self._needs.get(session.name, 0)
        return others + self._sizes.of(session, compact=compact) <= self.capacity

    def open(self, session: SessionConfig, *, compact: bool) -> None:
        """There is another session."""
        self._set(session.name, self._sizes.of(session, compact=compact))

    def close(self, session: str) -> None:
        """A session is gone."""
        self._set(session, 0)

    def _set(self, session: str, blocks: int) -> None:
        self._all += blocks - self._needs.pop(session, 0)
        if blocks:
            self._needs[session] = blocks
        self._resize()

    def _resize(self) -> None:
        if self._follows:
            blocks = min(self.capacity, self._all)
            self._engine.resize(blocks, self._cached(blocks))
