"""Generations on the engine's side: what is made once, and what never reaches the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import engine.model.constrained
from daemon.api.generation import (
    CountTokens,
    Delta,
    Generate,
    GenerateAll,
    GenerationEvent,
    GenerationFailed,
    TokensCounted,
    Turn,
)
from daemon.engine.generations import EngineGenerations, _finish
from daemon.engine.version_records import VersionRecords
from engine.model.chat_format import PromptFormat
from engine.model.embedded import build_tokenizer
from engine.step import SampledToken
from metrics.store import MetricStore
from scheduler.interfaces import Limits
from scheduler.request import Request, State

FORMAT = PromptFormat.of(build_tokenizer())
LIMITS = Limits(max_prompt_tokens=20, max_new_tokens=8)


class Rig:
    """Generations over a scheduler that only records its calls."""

    def __init__(self) -> None:
        self.events: list[GenerationEvent] = []
        self.requests: list[Request] = []
        built: Any = SimpleNamespace(
            prompt=FORMAT,
            tapes={"s": object()},
            engine=SimpleNamespace(frame_limit=100, open_prompt=lambda salt: None),
        )
        confidence: Any = None
        self.generations = EngineGenerations(
            built,
            self,  # type: ignore[arg-type]  # see class
            LIMITS,
            VersionRecords(),
            confidence,
            MetricStore.local({}),
            self.events.append,
            lambda session: False,
            refuses=False,
        )

    def submit_together(self, requests: Sequence[Request]) -> None:
        self.requests += requests

    def ask(self, *asked: Generate) -> None:
        self.generations.handle(GenerateAll(asked))

    def failed(self) -> list[str]:
        return [each.code for each in self.events if isinstance(each, GenerationFailed)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_schema_is_read_once_for_all_answers_to_a_request(rig: Rig, monkeypatch: Any) -> None:
    read: list[object] = []
    parts = engine.model.constrained._parts
    monkeypatch.setattr(
        "engine.model.constrained._parts", lambda schema, here: (read.append(schema), parts(schema, here))[1]
    )
    rig.ask(*(Generate(id=n, index=n, text="Up?", schema={"enum": [1, 2]}) for n in range(4)))
    assert (len(rig.requests), len(read)) == (4, 1)
    # alike for Python, but not in JSON
    rig.ask(Generate(id=5, text="Up?", schema={"enum": [True, 2]}))
    assert (len(rig.requests), len(read)) == (5, 2)
    rig.ask(Generate(id=6, text="Up?", schema={"enum": ["a" * 2**14]}))
    assert (len(rig.requests), len(read), rig.failed()) == (5, 2, ["bad_request"])


def test_a_text_that_is_too_long_is_not_tokenised(rig: Rig, monkeypatch: Any) -> None:
    longest = max(map(len, FORMAT.tokenizer.get_vocab()))
    too_long = "a" * (LIMITS.max_prompt_tokens * longest + 1)
    said = (Turn("user", too_long),)
    monkeypatch.setattr(PromptFormat, "encode", lambda *_: pytest.fail("it is tokenised"))
    rig.ask(
        Generate(id=1, text=too_long), Generate(id=2, turns=said), Generate(id=3, session="s", turns=said)
    )
    for session in ("", "s"):
        rig.generations.handle(CountTokens(id=4, session=session, turns=said))
    assert (rig.failed(), rig.requests) == (["too_long"] * 5, [])
    assert len(rig.generations._rendered) == 0
    with pytest.raises(pytest.fail.Exception):
        rig.ask(Generate(id=5, text=too_long[:-1]))


def test_what_is_made_for_prompts_that_are_refused_is_not_kept(rig: Rig) -> None:
    def kept() -> tuple[int, int]:
        return len(rig.generations._rendered), len(rig.generations._tokenised)

    long = "price 1 " * 10
    rig.ask(Generate(id=1, text=long), Generate(id=2, turns=(Turn("user", long),)))
    rig.generations.handle(CountTokens(id=3, turns=(Turn("user", long),)))
    assert (rig.failed(), kept()) == (["too_long"] * 2, (0, 0))
    (counted,) = [each.tokens for each in rig.events if isinstance(each, TokensCounted)]
    assert counted > LIMITS.max_prompt_tokens
    rig.ask(Generate(id=4, text="Up?"), Generate(id=5, turns=(Turn("user", "Up?"),)))
    assert (len(rig.requests), kept()) == (2, (1, 2))


def test_a_text_has_its_own_tokens_though_a_chat_is_rendered_as_the_same(rig: Rig) -> None:
    turns = (Turn("user", "Up?"),)
    rendered = FORMAT.chat([("user", "Up?")])
    rig.ask(Generate(id=1, turns=turns), Generate(id=2, text=rendered))
    assert [list(each.prompt) for each in rig.requests] == [FORMAT.encode(rendered), FORMAT.plain(rendered)]


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_is_told_and_its_text_only_where_it_is_streamed(rig: Rig, stream: bool) -> None:
    rig.ask(Generate(id=1, text="Up?", stream=stream, top_logprobs=0, stop=("no such text",)))
    (request,) = rig.requests
    assert request.spec.on_token is not None
    for token in FORMAT.encode("no news"):
        request.output.append(token)
        request.samples.append(SampledToken(token, 0.5, 0.0, logprob=-0.5))
        assert not request.spec.on_token(request)
    told = [each for each in rig.events if isinstance(each, Delta)]
    assert [each.tokens for each in told] == [1] * len(request.output)
    assert [len(each.logprobs) for each in told] == [int(stream)] * len(told)
    assert bool("".join(each.text for each in told)) == stream


@pytest.mark.parametrize(("output", "tokens"), [([], 7), ([5], 0)])
def test_what_was_computed_of_a_prompt_is_told_when_it_is_given_up(
    rig: Rig, output: list[int], tokens: int
) -> None:
    rig.ask(Generate(id=1, text="Up?"))
    (request,) = rig.requests
    request.state, request.output, request.computed_tokens = State.CANCELLED, output, 7
    request.spec.on_done(request)
    (failed,) = [each for each in rig.events if isinstance(each, GenerationFailed)]
    assert (failed.code, failed.tokens) == ("cancelled", tokens)


def test_a_json_that_is_cut_short_is_told_as_such(rig: Rig) -> None:
    """At any length, also at the one that ends all answers of a model."""
    rig.ask(Generate(id=1, text="Up?", schema={"enum": ["UP"]}))
    (request,) = rig.requests
    running = request.spec.on_done.args[0]
    running.prompt = replace(running.prompt, max_tokens=1)
    whole = FORMAT.encode('"UP"')
    assert len(whole) > 1
    for n in range(1, len(whole) + 1):
        request.output[:] = whole[:n]
        assert _finish(running, request) == ("stop" if n == len(whole) else "length")
