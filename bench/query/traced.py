"""What a trace costs where a request costs least: asks for a ready answer, with traces and without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from bench.figures import Figure, Setting, rate
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import instruments
from bench.stream.serving import config, session_of
from daemon.ages import Times
from daemon.api.auth import Access
from daemon.api.messages import Ask, AskReply
from daemon.config.schema import ModelConfig
from daemon.config.standing import questions_of
from daemon.gateway.answer_cache import Sessions, tier_of
from daemon.gateway.generations import Generations
from daemon.gateway.peers import Peers
from daemon.gateway.pending import PendingCommands
from daemon.gateway.prompt_quota import PromptQuota
from daemon.gateway.queries import Queries
from daemon.protocol import Committed, VersionInputs
from daemon.tenants import LOCAL, Client
from daemon.traces.recent_traces import MakeTrace, RecentTraces
from daemon.traces.trace_context import TraceContext, Tracer
from feeds.market_data import Answer, Latency
from feeds.synthetic import Instrument
from metrics.store import MetricStore

_ME = Client(LOCAL, "me")


class _NotKept(RecentTraces):
    """The reference: requests have a trace id, and nothing is kept of them."""

    def requested(self, context: TraceContext, make: MakeTrace) -> None:
        """Forget it."""


@dataclass(frozen=True)
class AskSide:
    """The gateway's part of an ask, without a transport. ``tier``: the one that answers it."""

    queries: Queries
    sessions: Sessions
    generations: Generations
    ask: Ask
    tier: str = "cached"

    def run(self, asks: int) -> float:
        """Seconds for this number of asks."""
        began = time.perf_counter()
        for _ in range(asks):
            found = self.queries.answer(self.ask, _ME, time.monotonic_ns())
        taken = time.perf_counter() - began
        if not isinstance(found, AskReply) or tier_of(found) != self.tier:
            raise MeasurementFailed(f"the answer was not {self.tier}: {found}")
        return taken


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Asks for a ready answer through the gateway's own code, without a socket: *kept* as by default, and
    *exported*, each handed to a queue that is not sent, so that what the exporter's thread does is not in
    it. The reference keeps nothing. All three in turns, in one process.
    """
    asks, repeats = run.sized((20_000, 15), (200, 2))
    market = instruments(1, 1)[0]
    exported: list[MakeTrace] = []
    sides = {
        "reference": ask_side(market, _NotKept()),
        "kept": ask_side(market, RecentTraces()),
        "exported": ask_side(market, RecentTraces(Tracer(1.0), export=exported.append)),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            taken[name].append(side.run(asks))
            exported.clear()
    reference = rate("asks a second", asks, taken["reference"], "").ours
    for name in ("kept", "exported"):
        setting: Setting = {"traces": name, "asks": asks}
        found = rate("asks a second", asks, taken[name], "")
        ratio = median(a / b for a, b in zip(taken["reference"], taken[name], strict=True))
        yield Figure(
            found.name, found.ours, "", "", setting, "nothing kept", reference, ratio, n=repeats,
            low=found.low, high=found.high,
        )  # fmt: skip


def ask_side(
    market: Instrument, traces: RecentTraces, model: ModelConfig | None = None, early_exit: float = 0.0
) -> AskSide:
    """Asks of a session at version 1, whose first standing question is answered."""
    settings = config(model or ModelConfig(), [session_of(market)])
    (session,) = settings.sessions
    store = MetricStore.local({"session": [session.name], "source": [], "sink": []})
    sessions = Sessions(settings, store)
    question = next(each.question for each in questions_of(settings))
    answer = Answer(
        session=session.name, symbol=session.symbol, question=question.name, question_hash=question.hash,
        answer_id=f"{session.name}:{question.hash}:1", text="UP", data_version=1, as_of=time.time_ns(),
        model="m", model_revision="r", latency=Latency(), reused_tokens=400, computed_tokens=30,
    )  # fmt: skip
    times = Times(time.time_ns(), time.time_ns(), time.monotonic_ns())
    sessions.committed(Committed(session.name, 1, 1, 6, 1, times, VersionInputs()))
    sessions.answered(answer, times)
    access = Access()
    pending = PendingCommands(lambda: None)
    generations = Generations(
        sessions, pending, PromptQuota(4, 4), access, traces=traces, early_exit=early_exit
    )
    queries = Queries(
        lambda request, client: generations.ask(request, client),  # type: ignore[arg-type]  # only asks come
        access,
        lambda: sessions.states,
        lambda name: None,
        Peers(1.0),
        1.0,
        tracer=traces.tracer,
    )
    return AskSide(queries, sessions, generations, Ask(1, session.name, question.name))
