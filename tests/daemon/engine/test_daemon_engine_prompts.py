"""Text to requests on the engine's side: what the model gets, and what never reaches the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from daemon import protocol
from daemon.api import messages
from daemon.api.messages import Append, Close, Complete, Finish, FinishReply, Open, PromptReply, Update
from daemon.engine.prompts import EnginePrompts
from engine.model.chat_format import PromptFormat
from engine.model.embedded import build_tokenizer
from engine.step import SampledToken
from feeds.decoding import Undecodable
from regions.cache_priority import DEFAULT, HIGHEST, LONGEST_NS, PrefixRetention
from scheduler.interfaces import PriorityClass
from scheduler.request import Failure, LifecycleEvent, Request, State

FORMAT = PromptFormat.of(build_tokenizer())
BEGIN = FORMAT.tokenizer.bos_token_id
POSITIONS = 100


class Rig:
    """Prompts over a scheduler that only records its calls."""

    def __init__(self) -> None:
        self.events: list[protocol.EngineEvent] = []
        self.requests: list[Request] = []
        self.calls: list[tuple[Any, ...]] = []
        self.prompts = EnginePrompts(FORMAT, self, lambda salt: None, POSITIONS, True, self.events.append)  # type: ignore[arg-type]  # see class

    def submit(self, request: Request) -> None:
        request.id = 70 + len(self.requests)
        self.requests.append(request)

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        self.calls.append(("extend", request_id, list(tokens)))

    def replace(self, request_id: int, tokens: Sequence[int]) -> None:
        self.calls.append(("replace", request_id, list(tokens)))

    def finish(self, request_id: int) -> None:
        self.calls.append(("finish", request_id))

    def cancel(self, request_id: int) -> None:
        self.calls.append(("cancel", request_id))

    def open(self, text: str = "", **how: Any) -> None:
        kind = Complete if how.pop("complete", False) else Open
        asked = kind(1, text, **({"max_tokens": 8} | how))
        self.prompts.handle(protocol.OpenPrompt("p", asked))

    def input(self, text: str, *, replaces: bool = False) -> None:
        self.prompts.handle(Update(1, "p", text) if replaces else Append(1, "p", text))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_prompt_is_its_text_behind_the_begin_of_text_once(rig):
    rig.open("One two")
    (request,) = rig.requests
    assert request.prompt == [BEGIN, *FORMAT.encode("One two")]
    assert (request.cls, request.spec.salt, request.complete) == (PriorityClass.POOL, "", False)
    assert request.spec.stop_ids == FORMAT.stop_ids
    rig.input(" three")
    rig.input("Again", replaces=True)
    rig.input("")
    assert rig.calls == [
        ("extend", 70, FORMAT.encode(" three")),
        ("replace", 70, [BEGIN, *FORMAT.encode("Again")]),
        ("extend", 70, []),
    ]
    lengths = [len(request.prompt), len(request.prompt) + len(FORMAT.encode(" three"))]
    replaced = 1 + len(FORMAT.encode("Again"))
    assert rig.events == [PromptReply(1, "p", n) for n in [*lengths, replaced, replaced]]


def test_a_prompt_says_whose_it_is_and_how_long_it_is_kept(rig):
    asked = Complete(1, "Up?", retention_priority=80, retention_seconds=2.5)
    rig.prompts.handle(protocol.OpenPrompt("p", asked, tenant="desk", weight=3.0))
    rig.open("Down?", complete=True)
    spec, ordinary = (request.spec for request in rig.requests)
    assert (spec.tenant, spec.weight) == ("desk", 3.0)
    assert spec.retention == PrefixRetention(80, 2_500_000_000, "desk")
    assert (ordinary.tenant, ordinary.weight, ordinary.retention.priority) == ("", 1.0, DEFAULT)
    assert messages.ORDINARY == DEFAULT
    kept = {"retention_priority": HIGHEST, "retention_seconds": LONGEST_NS / 1e9}
    assert messages.decode_request(messages.encode(Complete(1, "Up?", **kept))) == Complete(1, "Up?", **kept)
    for past in ({"retention_priority": HIGHEST + 1}, {"retention_seconds": LONGEST_NS / 1e9 + 1}):
        with pytest.raises(Undecodable, match="retention"):
            messages.decode_request(messages.encode(Complete(1, "Up?", **(kept | past))))


def test_the_first_piece_of_an_empty_prompt_begins_the_text(rig):
    rig.open()
    assert rig.requests[0].prompt == []
    rig.input("One")
    rig.input("", replaces=True)
    rig.input("Two")
    begun = [[BEGIN, *FORMAT.encode(text)] for text in ("One", "Two")]
    assert rig.calls == [("replace", 70, begun[0]), ("replace", 70, []), ("replace", 70, begun[1])]


def test_choices_are_their_first_tokens_as_they_are_written(rig):
    rig.open("Up? ", complete=True, choices=(" YES", "NO"), temperature=0.5)
    (request,) = rig.requests
    assert request.spec.choices == (FORMAT.encode(" YES")[0], FORMAT.encode("NO")[0])
    assert (request.spec.max_tokens, request.complete, request.spec.temperature) == (1, True, 0.5)


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ({"choices": ("YES",)}, "at least two choices"),
        ({"choices": ("YES", "YES")}, "repeat"),
        ({"choices": ("YES", "")}, "an empty choice"),
        ({"choices": ("YES", "YES!")}, "same token"),
        ({"complete": True, "text": ""}, "at least one prompt token"),
        ({"temperature": float("nan")}, "temperature"),
    ],
    ids=str,
)
def test_what_can_be_no_request_is_refused(rig, how, part):
    rig.open(**{"text": "Up?"} | how)
    (refused,) = rig.events
    assert isinstance(refused, protocol.PromptFailed)
    assert refused.code == "bad_request"
    assert part in refused.message
    assert rig.requests == []
    rig.input("more")
    assert rig.calls == []


def test_more_than_the_positions_is_refused_before_it_is_computed(rig):
    rig.open("x " * POSITIONS)
    assert [(e.code, e.prompt) for e in rig.events] == [("too_long", "p")]
    assert rig.requests == []
    rig.events.clear()
    rig.open("x", max_tokens=8)
    while isinstance(rig.events[-1], PromptReply):
        taken = rig.events[-1].prompt_tokens
        rig.input("y")
    assert taken + 8 == POSITIONS
    assert rig.calls[-1] == ("cancel", 70)
    assert rig.events[-1].code == "too_long"
    before = list(rig.events)
    rig.requests[0].spec.on_done(rig.requests[0])  # cancelled: already reported
    rig.input("z")
    assert (rig.events, rig.calls[-1]) == (before, ("cancel", 70))


def test_a_text_that_cannot_fit_is_not_tokenised(rig, monkeypatch):
    rig.open("x")
    rig.events.clear()
    monkeypatch.setattr(PromptFormat, "plain", None)
    monkeypatch.setattr(PromptFormat, "encode", None)
    rig.input("y" * 100_000)
    assert [(e.code, e.prompt) for e in rig.events] == [("too_long", "p")]
    assert rig.calls[-1] == ("cancel", 70)
    rig.open("y" * 100_000)
    assert rig.events[-1].code == "too_long"


def test_the_end_of_a_prompt_is_reported_once_with_its_history(rig):
    rig.open("Up?", choices=("YES", "NO"))
    (request,) = rig.requests
    rig.prompts.handle(Finish(1, "p"))
    assert rig.calls == [("finish", 70)]
    assert request.spec.choices is not None
    request.complete, request.state, request.last_chunk_ns = True, State.FINISHED, 1000
    request.events = [
        (LifecycleEvent.KV_ON_GPU, 1500),
        (LifecycleEvent.PREEMPTED_SWAP, 1600),
        (LifecycleEvent.KV_ON_GPU, 1800),
    ]
    request.accept(SampledToken(request.spec.choices[1], 3.0, 2.5))
    request.cached_tokens, request.recomputed_tokens, request.swapped_tokens = 2, 3, 4
    request.total_tokens_invalidated, request.waits = 5, {"cells": 6}
    request.spec.on_done(request)
    assert rig.events[1:] == [
        FinishReply(1, "p", "NO", "NO", 0.5, True, len(request.prompt), 1, 2, 3, 4, 5, 500, {"cells": 6})
    ]
    for command in (Finish(1, "p"), Close(1, "p"), Append(1, "p", "x")):
        rig.prompts.handle(command)
    assert len(rig.calls) == 1


def test_a_failure_keeps_its_reason_and_a_cancelled_prompt_has_one(rig):
    rig.open("Up?")
    rig.requests[0].error = Failure("abandoned", "nothing came")
    rig.requests[0].spec.on_done(rig.requests[0])
    rig.open("Up?")
    rig.prompts.handle(Close(1, "p"))
    assert rig.calls == [("cancel", 71)]
    rig.requests[1].spec.on_done(rig.requests[1])
    failed = [e for e in rig.events if isinstance(e, protocol.PromptFailed)]
    assert [e.code for e in failed] == ["abandoned", "cancelled"]
    assert failed[0].message == "nothing came"
