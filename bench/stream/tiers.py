"""What an ask costs by the tier that answers it, and on average for a mix (*Attention Once* equation 18)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import uvloop
from msgspec.structs import replace

from bench.engine.contenders import embedded
from bench.figures import Figure, Setting, latency, quantiles
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import FloodSource, instruments, payloads
from bench.stream.processes import TierSamples, asks_by_tier, child
from bench.stream.serving import config, rest, serving, session_of
from daemon.config import schema
from engine.model.chat_format import PromptFormat

_RECORDS = 400
MIXES = ((0.0, 0.0), (0.6, 0.0), (0.8, 0.0), (0.6, 0.2))
"""Shares of flash hits and of early exits; 60 to 80 % are what the paper calls predictable."""


def measure(run: SuiteRun) -> Iterator[Figure]:
    """One idle session of the untrained model with `flash.early_exit` on, asked by a client in a process of
    its own, a millisecond apart and in turn: a standing question (a flash hit), another that exits early
    from the ready position, and the same one computed. An untrained model favours no choice, so a choice is
    its favourite token. The averages are equation 18 of the medians.
    """
    prompt = PromptFormat.of(embedded(run).tokenizer)
    return figures(prompt, run.threads, 60 if run.quick else 1000)


def figures(prompt: PromptFormat, threads: int, asks: int) -> Iterator[Figure]:
    """``asks`` of each tier, and their averages."""
    seen = uvloop.run(_measure(single_tokens(prompt), threads, asks))
    setting: Setting = {"engine threads": threads}
    computed = quantiles(seen.computed, 0.5)[0]
    for name, ns in (("flash hit", seen.hits), ("early exit", seen.early), ("computed ask", seen.computed)):
        yield from latency(name, ns, setting)
    hit, early = (quantiles(ns, 0.5)[0] for ns in (seen.hits, seen.early))
    for hits, exits in MIXES:
        mean = hits * hit + exits * early + (1 - hits - exits) * computed
        shares: Setting = {**setting, "hits": hits, "early exits": exits}
        yield Figure(
            "average ask", mean / 1e6, "ms", setting=shares, against="all computed", reference=computed / 1e6
        )


def single_tokens(prompt: PromptFormat) -> tuple[str, ...]:
    """Texts that are one token as an answer; no two begin alike."""
    texts = (prompt.decode([token]) for token in range(len(prompt.tokenizer)))
    found = {prompt.choice(text): text for text in texts if text.strip()}
    return tuple(text for token, text in found.items() if prompt.decode([token]) == text)


async def _measure(choices: tuple[str, ...], threads: int, asks: int) -> TierSamples:
    markets = instruments(1, 4)
    settings = config(schema.ModelConfig(path=schema.UNTRAINED, threads=threads), map(session_of, markets))
    settings = replace(settings, flash=schema.FlashConfig(early_exit=2.0))
    source = FloodSource(payloads(markets, _RECORDS), [], 1)
    async with serving(settings, source) as gateway:
        await rest(gateway)
        assert gateway.query is not None  # configured
        name = settings.sessions[0].name
        return await asyncio.to_thread(_client, gateway.query.endpoint, name, choices, asks)


def _client(*arguments: object) -> TierSamples:
    with child(asks_by_tier, *arguments) as pipe:
        found: TierSamples | None = pipe.recv()
    if found is None:
        raise MeasurementFailed("no ask exited early")
    return found
