"""Checks of what symbols are called: each name is of one symbol at a time, and no bar has two contracts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from daemon.config.schema import AliasConfig, Config, ContinuousConfig, SessionConfig, SymbolsConfig
from daemon.config.symbols import periods_of

MAX_CONTRACTS = 65
"""Of one symbol: the rolls between them are `ingest.feed_rules.ROLLS`."""
KeyProblem = tuple[str, str]


def symbol_problems(config: Config, tables: Iterable[tuple[str, SessionConfig]]) -> Iterator[KeyProblem]:
    """What is wrong with `symbols.alias` and `symbols.continuous`, and with sessions that read them."""
    symbols = config.symbols
    if not symbols.alias and not symbols.continuous:
        return
    for index, alias in enumerate(symbols.alias):
        yield from _alias(f"symbols.alias[{index}]", alias)
    for index, continuous in enumerate(symbols.continuous):
        yield from _contracts(f"symbols.continuous[{index}]", continuous)
    yield from _targets(symbols)
    yield from _overlaps(symbols)
    yield from _readers(config, list(tables))


def _alias(here: str, alias: AliasConfig) -> Iterator[KeyProblem]:
    if alias.from_ is not None and alias.until is not None and alias.from_ >= alias.until:
        yield f"{here}.until", f"{alias.until} is not after from, {alias.from_}"


def _contracts(here: str, continuous: ContinuousConfig) -> Iterator[KeyProblem]:
    contracts = continuous.contracts
    if not contracts:
        yield f"{here}.contracts", "there is none: name the contracts, the oldest first"
    if len(contracts) > MAX_CONTRACTS:
        yield f"{here}.contracts", f"{len(contracts)} are more than {MAX_CONTRACTS}: remove the oldest"
    for at, (one, other) in enumerate(pairwise(contracts), 1):
        if other.from_ <= one.from_:
            why = f"{other.from_} is not after {one.from_}, from which {one.symbol} is active"
            yield f"{here}.contracts[{at}].from", why
    seen: dict[str, int] = {}
    for at, contract in enumerate(contracts):
        if seen.setdefault(contract.symbol, at) != at:
            yield f"{here}.contracts[{at}].symbol", f"{contract.symbol!r} appears twice: remove one"


def _targets(symbols: SymbolsConfig) -> Iterator[KeyProblem]:
    """A symbol is a name or has names, not both, and has one table of contracts."""
    continuous = [each.symbol for each in symbols.continuous]
    for index, symbol in enumerate(continuous):
        if (first := continuous.index(symbol)) != index:
            yield f"symbols.continuous[{index}].symbol", f"{symbol!r} is already symbols.continuous[{first}]"
    targets = {*continuous, *(each.symbol for each in symbols.alias)}
    for name, period, key in periods_of(symbols):
        if set(name) & {"*", "?"} or name.count(":") > 1:
            yield key, f"{name!r} is no VENUE:SYMBOL: write each name out"
        if name == period.symbol:
            yield key, f"{name!r} is the symbol itself: remove it"
        elif name in targets:
            why = f"{name!r} has other names itself: give them to {period.symbol!r}, which sessions read"
            yield key, why


def _overlaps(symbols: SymbolsConfig) -> Iterator[KeyProblem]:
    """A name is of one symbol at a time."""
    found = sorted(periods_of(symbols))
    for (name, one, _), (other, period, key) in pairwise(found):
        if name == other and period.start < one.end:
            yield key, f"{name!r} is of {one.symbol!r} at that time: a name is of one symbol at a time"


def _readers(config: Config, tables: Sequence[tuple[str, SessionConfig]]) -> Iterator[KeyProblem]:
    names = {name: period.symbol for name, period, _ in periods_of(config.symbols)}
    for table, session in tables:
        for symbol in session.symbols:
            if symbol in names:
                yield f"{table}.symbol", f"{symbol!r} is another name of {names[symbol]!r}: read that one"
    for index, pattern in enumerate(config.patterns):
        if pattern.match in names:
            why = f"{pattern.match!r} is another name of {names[pattern.match]!r}: match that one"
            yield f"patterns[{index}].match", why
    for index, continuous in enumerate(config.symbols.continuous):
        here = f"symbols.continuous[{index}]"
        for table, session in _reading(config, continuous.symbol, tables):
            yield from _rolls(here, continuous, table, session, config)


def _reading(
    config: Config, symbol: str, tables: Sequence[tuple[str, SessionConfig]]
) -> Iterator[tuple[str, SessionConfig]]:
    """The sessions that read a symbol, and examples of patterns that may open one."""
    patterns = {f"patterns[{index}]": pattern for index, pattern in enumerate(config.patterns)}
    for table, session in tables:
        pattern = patterns.get(table)
        if symbol in session.symbols if pattern is None else pattern.matches(symbol):
            yield table, session


def _rolls(
    here: str, continuous: ContinuousConfig, table: str, session: SessionConfig, config: Config
) -> Iterator[KeyProblem]:
    lengths = [session.bars(config.bars).interval, *(tier.interval for tier in session.rollup)]
    for at, contract in enumerate(continuous.contracts[1:], 1):
        if odd := next((each for each in lengths if each and contract.from_ % each), None):
            why = f"{contract.from_} is inside a bar of {odd} of {table}: take a multiple of it"
            yield f"{here}.contracts[{at}].from", why
    if continuous.roll == "reset" and session.more_symbols:
        why = f'{table} has the bars of other symbols in the same window: set roll = "line"'
        yield f"{here}.roll", why
    if continuous.roll == "reset" and session.rollup:
        yield f"{here}.roll", f'{table} has a rollup, which goes on: remove it, or set roll = "line"'
