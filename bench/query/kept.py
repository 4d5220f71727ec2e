"""Responses that are kept, and prefixes whose KV is: what they cost by the length of the prompt."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import uvloop
from msgspec.structs import replace

from bench.figures import Figure, Goal, latency, quantiles
from bench.query.clients import Keeping, post
from bench.run import MeasurementFailed, SuiteRun, timed
from bench.stream.flood import FloodSource
from bench.stream.processes import child
from bench.stream.serving import config, serving
from daemon.config import schema
from daemon.tenants import hash_of, new_key

_FLAT = Goal(1.5)
_AS_NEW = Goal(0.8, "at least")


@dataclass(frozen=True)
class KeptPlan:
    """Prompts of ``words`` words each, of four tokens, ``rounds`` of each length."""

    words: tuple[int, ...] = (64, 256, 1024)
    rounds: int = 60


QUICK = KeptPlan(words=(16, 64), rounds=3)


class Samples(NamedTuple):
    """ns of prompts of one length: new ones, the same again, other questions behind the same text, and the
    same from another tenant, for the first time and again.
    """

    tokens: int
    new: list[int]
    again: list[int]
    behind: list[int]
    foreign: list[int]
    foreign_again: list[int]


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Chat completions of one token from the untrained model, without a session, over one connection of
    HTTP. *Kept response*: the same request again, which the engine does not see. *Kept prefix*: another
    question behind the same instructions, whose KV is found in the radix tree. Both beside the first request
    with a prompt of this length, and the longest prompt beside the shortest. *Another tenant's*: it sends the
    same request for the first time, which must take as long as a new prompt, and then again.
    """
    plan = run.sized(KeptPlan(), QUICK)
    found = uvloop.run(_measure(plan, run.threads))
    for each in found:
        setting: dict[str, str | int | float] = {"tokens": each.tokens}
        for name, samples, goals in (
            ("kept response", each.again, {}),
            ("kept prefix", each.behind, {}),
            ("another tenant's", each.foreign, {0.5: _AS_NEW}),
            ("another tenant's again", each.foreign_again, {}),
        ):
            yield from latency(
                name, samples, setting, "by length", "a new prompt", each.new, at=(0.5,), goals=goals
            )
    shortest, longest = found[0], found[-1]
    for name, short, long in (
        ("kept response", shortest.again, longest.again),
        ("kept prefix", shortest.behind, longest.behind),
        ("new prompt", shortest.new, longest.new),
    ):
        yield Figure(
            f"{name} P50", quantiles(long, 0.5)[0] / 1e6, "ms", "longest beside shortest",
            {"tokens": longest.tokens}, f"{shortest.tokens} tokens", quantiles(short, 0.5)[0] / 1e6,
            goal=None if name == "new prompt" else _FLAT, n=len(long),
        )  # fmt: skip


async def _measure(plan: KeptPlan, threads: int) -> list[Samples]:
    keys = [new_key(), new_key()]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        for n, key in enumerate(keys):
            file.write(f'[[tenants]]\nname = "tenant-{n}"\napi_keys = ["{hash_of(key)}"]\n')
        file.flush()
        settings = replace(
            config(schema.ModelConfig(path=schema.UNTRAINED, threads=threads), ()),
            standing="none",
            scheduler=schema.SchedulerConfig(max_prompt_tokens=8 * max(plan.words)),
            tenants=schema.TenantsConfig(file.name),
            query=schema.QueryConfig(""),
        )
        async with serving(settings, FloodSource([], [], 1)) as gateway:
            return await asyncio.to_thread(_client, gateway.http.port, gateway.model, plan, keys)


def _client(*arguments: object) -> list[Samples]:
    with child(ask, *arguments) as pipe:
        found: list[Samples] = pipe.recv()
        return found


def ask(port: int, model: str, plan: KeptPlan, keys: list[str], pipe: Connection) -> None:
    """Sends "ready", then `Samples` for each length. ``keys``: of the two tenants."""
    server = Keeping(port)
    own, other_tenants = keys

    def chat(instructions: str, question: str, key: str = own) -> tuple[dict[str, Any], int]:
        members = {
            "model": model,
            "messages": [
                {"role": "system", "content": instructions},
                {"role": "user", "content": question},
            ],
            "max_tokens": 1,
            "temperature": 0,
        }
        request = post("/v1/chat/completions", msgspec.json.encode(members), key)
        body, ns = timed(server.request, request)
        return msgspec.json.decode(body), ns

    pipe.send("ready")
    found = []
    for words in plan.words:
        samples = Samples(0, [], [], [], [], [])
        for round_ in range(plan.rounds + 1):
            text = f"{words} {round_} " + " ".join(f"price {n}" for n in range(100, 100 + words))
            first, new = chat(text, "Is it up?")
            tokens = first["usage"]["prompt_tokens"]
            same, again = chat(text, "Is it up?")
            theirs, foreign = chat(text, "Is it up?", other_tenants)
            same_theirs, foreign_again = chat(text, "Is it up?", other_tenants)
            other, behind = chat(text, "Did it fall?")
            reused = other["usage"]["prompt_tokens_details"]["cached_tokens"]
            if theirs["foretick"]["cached"] or not same_theirs["foretick"]["cached"]:
                raise MeasurementFailed("a response was kept for another tenant, or not for its own")
            if not same["foretick"]["cached"] or reused < tokens // 2:
                raise MeasurementFailed(
                    f"of {tokens} tokens only {reused} were kept, or the response was not"
                )
            taken = new, again, behind, foreign, foreign_again
            if round_:  # the first one warms up
                for into, ns in zip(samples[1:], taken, strict=True):
                    into.append(ns)
            samples = samples._replace(tokens=tokens)
        found.append(samples)
    pipe.send(found)
