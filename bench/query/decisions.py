"""System One: ten typed questions in one request: ready, right after a bar, and on text never seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec
import torch
import uvloop
from msgspec.structs import replace

from bench.data.past import SESSION, bars, config_of, filled, models
from bench.figures import Figure, Goal, Setting, latency, quantiles
from bench.query.bare import bare_server, returning
from bench.query.clients import BARE, decide
from bench.query.fresh import beside_llama, texts
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.processes import child
from bench.stream.serving import config, rest, serving
from daemon.api.systemone import ALIAS, Choice, DecisionRequest, Text, generate
from daemon.config import schema
from daemon.engine.build import Built, limits_of, load
from daemon.engine.prompt_builder import PromptBuilder
from daemon.gateway.gateway import Gateway
from engine.device import use_threads
from engine.step import Chunk
from lab.queued_source import QueuedSource
from metrics.store import MetricStore
from tapes.rules import RULES

_TEN = RULES[:10]
_Asked = tuple[Sequence[int], Sequence[int]]
"""Of a fork: the tokens of a question and of an option's beginning, and those that may follow."""
_WAIT_S = 60.0
_PAUSE_S = 0.003
"""About as long as a request takes to its pass. Threads of a pass sleep after a millisecond."""


@dataclass(frozen=True)
class DecisionsPlan:
    """``requests`` on one version, and one after each of ``later`` bars, behind ``window`` of them.

    ``fresh``: requests, each about another text of ``lines`` lines.
    """

    requests: int = 400
    later: int = 30
    window: int = 80
    fresh: int = 8
    lines: int = 16


def measure(run: SuiteRun) -> Iterator[Figure]:
    """`POST /v1/systemone` with ten questions about a session, from a client in a process of its own, to a
    daemon of two processes. *Ready*: the questions stand, and the version does not change; the reference is a
    route of a bare Starlette application in the same loop that returns the request. *Right after a bar*: no
    question stands, and the request is sent as soon as the gateway knows of the bar's version; the reference
    is one pass of the engine alone at the same window, which asks forks for the same options and their log
    probabilities, behind a pause of a few milliseconds, as a request's pass is: threads and cores sleep by
    then. Its *bound* is that pass and the round trip of a ready request. *On fresh text*, with `--llama` and
    `--model`: a text of bars in words that no request had before; the reference is llama.cpp's server with
    the same GGUF file, which gets the ten prompts in one request of its own and reads the text once. The two
    take turns, while the other one is idle. Behind each pair llama.cpp's server tells the further tokens of
    options that have several, so that probabilities of whole options are compared.
    """
    plan = run.sized(DecisionsPlan(), DecisionsPlan(20, 3, fresh=2, lines=2))
    for name, path in models(run).items():
        model = schema.ModelConfig(path=path, threads=run.threads)
        setting: Setting = {"model": name}
        ready, bare = uvloop.run(_ready(plan, model))
        beside = setting, "", "bare Starlette route", bare
        yield from latency("ready", ready, *beside, paired=False, goals={0.99: Goal(5.0, of="ours")})
        asked, passes = uvloop.run(_after_bars(plan, model)), _passes(plan, model)
        after, goals = "right after a bar", {0.5: Goal(1.3)}
        beside = setting, "", "one pass of the engine", passes
        yield from latency(after, asked, *beside, paired=False, goals=goals)
        (trip,) = quantiles(ready, 0.5)
        bound = setting, "", "that pass and a ready request", [trip + ns for ns in passes]
        yield from latency(f"{after}, bound", asked, *bound, at=(0.5,), paired=False, goals=goals)
    if run.llama is None or run.model is None:
        run.say("fresh text: absent, it needs --llama and --model")
        return
    requests = [request_about(text) for text in texts(plan.fresh + 1, plan.lines)]
    model = schema.ModelConfig(path=str(run.model), threads=run.threads)
    yield from beside_llama(model, run.llama, requests, SESSION)


async def _ready(plan: DecisionsPlan, model: schema.ModelConfig) -> tuple[list[int], list[int]]:
    """ns of requests to the daemon, and to the bare server, in turn."""
    standing = tuple(schema.QuestionConfig(each.name, each.text, each.choices) for each in _TEN)
    source, ready, returned = QueuedSource("bars"), list[int](), list[int]()
    async with serving(_settings(model, standing), source) as gateway, bare_server(_ROUTE) as bare:
        await _filled(gateway, source, plan)
        with child(decide, gateway.http.port, bare, _BODY) as client:
            for _ in range(plan.requests):
                ready.append(await _asked(client, 0, ready=len(_TEN)))
                returned.append(await _asked(client, 1, ready=0))
            client.send(None)
    return ready, returned


async def _after_bars(plan: DecisionsPlan, model: schema.ModelConfig) -> list[int]:
    """ns of a request behind each bar."""
    source, found = QueuedSource("bars"), list[int]()
    later = bars(plan.window + plan.later)[plan.window :]
    async with serving(_settings(model), source) as gateway, bare_server(_ROUTE) as bare:
        await _filled(gateway, source, plan)
        state = gateway.sessions.states[SESSION.name]
        with child(decide, gateway.http.port, bare, _BODY) as client:
            for each in later:
                before, deadline = state.version, time.monotonic() + _WAIT_S
                source.put([each])
                while state.version == before:
                    if time.monotonic() > deadline:
                        raise MeasurementFailed(f"no version came behind {before}")
                    await asyncio.sleep(0.0002)
                found.append(await _asked(client, 0, ready=0))
            client.send(None)
    return found


def _settings(model: schema.ModelConfig, standing: tuple[schema.QuestionConfig, ...] = ()) -> schema.Config:
    """Of a daemon on free ports."""
    lengths = config_of(model.path, model.threads).bars
    return replace(config(model, [SESSION]), bars=lengths, standing="none", questions=standing)


async def _filled(gateway: Gateway, source: QueuedSource, plan: DecisionsPlan) -> None:
    source.put(bars(plan.window))
    await rest(gateway)


async def _asked(client: Connection, which: int, ready: int) -> int:
    """ns of one request. Raises MeasurementFailed where another number of answers was ``ready``."""
    client.send(which)
    ns, cached = await asyncio.to_thread(client.recv)
    if cached != ready:
        raise MeasurementFailed(f"{cached} answers were ready instead of {ready}")
    return int(ns)


def request_about(state: Text) -> DecisionRequest:
    """The ten questions about a state."""
    asked = {r.name: Choice(instructions=r.text, criteria=dict.fromkeys(r.choices)) for r in _TEN}
    return DecisionRequest(ALIAS, state, {**asked})


_BODY = msgspec.json.encode(request_about({"session": SESSION.name}))
_ROUTE = returning(BARE)


def _passes(plan: DecisionsPlan, settings: schema.ModelConfig) -> list[int]:
    """ns of one pass that asks what the daemon asks, for each bar that was asked behind."""
    alone = config_of(settings.path, settings.threads)
    use_threads(settings.threads)
    built, _ = asyncio.run(filled(alone, load(alone), plan.later))
    asked = _asked_of(built, alone)
    return [_pass(built, asked) for _ in range(plan.later + 1)][1:]  # the first one is not measured


def _asked_of(built: Built, settings: schema.Config) -> list[_Asked]:
    prompts = PromptBuilder(built, limits_of(settings), MetricStore.local({}))
    found = list[_Asked]()
    for each in request_about({}).questions.values():
        prompt = prompts.prompt(generate(each, "", SESSION.name))
        assert prompt.labels is not None
        found += [([*prompt.tokens, *path], after) for path, after in prompt.labels.nodes.items()]
    return found


@torch.inference_mode()
def _pass(built: Built, asked: Sequence[_Asked]) -> int:
    time.sleep(_PAUSE_S)
    began = time.perf_counter_ns()
    forks = [built.tapes[SESSION.name].fork() for _ in asked]
    for fork, (tokens, _) in zip(forks, asked, strict=True):
        assert fork.acquire(len(tokens))
    built.engine.execute(
        [
            Chunk(fork, tokens, choices=tuple(after), top_logprobs=0)
            for fork, (tokens, after) in zip(forks, asked, strict=True)
        ]
    )
    for fork in forks:
        fork.release()
    return time.perf_counter_ns() - began
