"""Up to where sessions have read, by event time: what is older will be late."""

from collections.abc import Collection, Mapping

from daemon.config.schema import Config
from daemon.gateway.answer_cache import SessionState
from daemon.tenants import Tenant


def closed_until(
    config: Config, states: Mapping[str, SessionState], tenant: Tenant, symbols: Collection[str]
) -> dict[str, int]:
    """The end (ns) of the newest bar that a session of the tenant has read, by symbol.

    Of several sessions the one that has read furthest. More bars may have closed that are not read yet.
    """
    ends: dict[str, int] = {}
    for session in config.sessions:
        state = states.get(session.name)
        if state is None or state.times is None or not tenant.sees(session.name):
            continue
        interval = session.bars(config.bars).interval
        end = (state.times.as_of // interval + 1) * interval
        for symbol in set(symbols).intersection(session.symbols):
            ends[symbol] = max(end, ends.get(symbol, 0))
    return ends
