"""Early exits at the ready position beside hits of a standing question's answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.figures import Figure, Goal, Setting, latency
from bench.query.traced import AskSide, ask_side
from bench.run import SuiteRun, Turns
from bench.stream.flood import instruments
from daemon.api.messages import Ask, ReplyMetadata
from daemon.config.schema import UNTRAINED, ModelConfig
from daemon.protocol import ReadyLogits
from daemon.traces.recent_traces import RecentTraces

_GOAL = 1.1
_MODELS = {"tape": ModelConfig(), "of words": ModelConfig(path=UNTRAINED)}


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Asks that exit at the ready position (`flash.early_exit`) beside those that hit a standing question's
    answer, through the gateway's own code, without a socket: in turns, in one process. An ask with another
    question than the standing ones, and with choices of theirs, exits.
    """
    asks, repeats = run.sized((2_000, 50), (100, 3))
    market = instruments(1, 1)[0]
    for name, model in _MODELS.items():
        hit = ask_side(market, RecentTraces(), model)
        turns = Turns(_exiting(ask_side(market, RecentTraces(), model, 2.0)).run, hit.run)
        for _ in range(repeats):
            turns(asks)
        ours, cached = ([ns / asks for ns in each] for each in turns.ns)
        setting: Setting = {"model": name, "asks": asks}
        yield from latency("early exit", ours, setting, "", "cached hit", cached, goals={0.5: Goal(_GOAL)})


def _exiting(side: AskSide) -> AskSide:
    """The same, asked what is no standing question, whose ready position is sure."""
    session = side.ask.session
    times = side.sessions.state(session).times
    assert times is not None
    metadata = ReplyMetadata(session=session, data_version=1, logit_gap=0.0, untrained=True, model="m")
    fast = {"YES": 5, "NO": 6}
    side.generations.exits.on_ready(ReadyLogits(session, 1, 5, 9.0, fast, metadata, times))
    return replace(side, ask=Ask(1, session, "volume_spike", choices=("YES", "NO")), tier="ready")
