"""RequestRunner on the engine's side: what is made once, and what never reaches the scheduler."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

import engine.model.constrained
from daemon.api import messages
from daemon.api.generation import (
    Begun,
    CancelGeneration,
    CountTokens,
    Delta,
    ExtendPrompt,
    Failed,
    Finished,
    FinishPrompt,
    Generate,
    GenerationEvent,
    PromptStats,
    TokensCounted,
    Turn,
)
from daemon.config.schema import Config, QueryConfig
from daemon.engine.build import prepared
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.prompt_builder import Prompt, PromptBuilder
from daemon.engine.request_runner import RequestRunner, _finish
from engine.model.chat_format import PromptFormat
from engine.model.embedded import build_tokenizer
from engine.step import SampledToken
from feeds.decoding import Undecodable
from feeds.durations import Duration
from flash.question import PreparedQuestion, Question
from metrics.store import MetricStore
from regions.cache_priority import DEFAULT, HIGHEST, LONGEST_NS, PrefixRetention
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import Failure, LifecycleEvent, Request, State

E = TypeVar("E")
FORMAT = PromptFormat.of(build_tokenizer())
BEGIN = FORMAT.tokenizer.bos_token_id
POSITIONS = 100
LIMITS = Limits(max_prompt_tokens=20, max_new_tokens=8)


class Rig:
    """RequestRunner over a scheduler that only records its calls."""

    def __init__(self, config: Config | None = None) -> None:
        self.events: list[GenerationEvent] = []
        self.requests: list[Request] = []
        self.calls: list[tuple[Any, ...]] = []
        built: Any = SimpleNamespace(
            prompt=FORMAT,
            tapes={"s": SimpleNamespace(live_records=1)},
            engine=SimpleNamespace(frame_limit=POSITIONS, open_prompt=lambda salt: None),
            loaded=SimpleNamespace(name="m", untrained=True),
        )
        confidence = Confidence(Config(), FORMAT, None, MetricStore.local({}))
        self.prompts = PromptBuilder(built, LIMITS, MetricStore.local({}))
        self.generations = RequestRunner(
            config or Config(),
            built,
            self,  # type: ignore[arg-type]  # see class
            self.prompts,
            confidence,
            self.events.append,
            lambda session: False,
        )

    def subscribe(self, *listeners: object) -> None:
        """No version comes."""

    def submit_together(self, requests: Sequence[Request]) -> None:
        for request in requests:
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

    def ask(self, *asked: Generate) -> None:
        self.generations.generate(asked)

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind."""
        return [each for each in self.events if isinstance(each, kind)]

    @property
    def failed(self) -> list[str]:
        return [each.code for each in self.of(Failed)]

    @property
    def lengths(self) -> list[int]:
        return [each.tokens for each in self.of(TokensCounted)]

    def open(self, text: str = "", **how: Any) -> None:
        """A prompt of our own API, whose number is 1."""
        self.ask(Generate(id=1, text=text, exact=True, **({"max_tokens": 8, "complete": False} | how)))

    def input(self, text: str, *, replace: bool = False) -> None:
        self.generations.change(ExtendPrompt(1, text, replace))


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
    assert (len(rig.requests), len(read), rig.failed) == (5, 2, ["bad_request"])


def test_a_text_that_is_too_long_is_not_tokenised(rig: Rig, monkeypatch: Any) -> None:
    longest = max(map(len, FORMAT.tokenizer.get_vocab()))
    too_long = "a" * (LIMITS.max_prompt_tokens * longest + 1)
    said = (Turn("user", too_long),)
    monkeypatch.setattr(PromptFormat, "encode", lambda *_: pytest.fail("it is tokenised"))
    rig.ask(
        Generate(id=1, text=too_long), Generate(id=2, turns=said), Generate(id=3, session="s", turns=said)
    )
    for session in ("", "s"):
        rig.generations.count(CountTokens(4, Generate(session=session, turns=said)))
    assert (rig.failed, rig.requests) == (["too_long"] * 5, [])
    assert len(rig.prompts._rendered) == 0
    with pytest.raises(pytest.fail.Exception):
        rig.ask(Generate(id=5, text=too_long[:-1]))


def test_what_is_made_for_prompts_that_are_refused_is_not_kept(rig: Rig) -> None:
    def kept() -> tuple[int, int]:
        return len(rig.prompts._rendered), len(rig.prompts._tokenised)

    long = "price 1 " * 10
    rig.ask(Generate(id=1, text=long), Generate(id=2, turns=(Turn("user", long),)))
    rig.generations.count(CountTokens(3, Generate(turns=(Turn("user", long),))))
    assert (rig.failed, kept()) == (["too_long"] * 2, (0, 0))
    (counted,) = rig.lengths
    assert counted > LIMITS.max_prompt_tokens
    rig.ask(Generate(id=4, text="Up?"), Generate(id=5, turns=(Turn("user", "Up?"),)))
    assert (len(rig.requests), kept()) == (2, (1, 2))


def test_a_text_has_its_own_tokens_though_a_chat_is_rendered_as_the_same(rig: Rig) -> None:
    turns = (Turn("user", "Up?"),)
    rendered = FORMAT.chat([("user", "Up?")])
    rig.ask(Generate(id=1, turns=turns), Generate(id=2, text=rendered))
    assert [list(each.prompt) for each in rig.requests] == [FORMAT.encode(rendered), FORMAT.plain(rendered)]


class Prepared:
    """A model that counts which questions it is asked to prepare."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        built: Any = SimpleNamespace(
            prompt=FORMAT, prepare=self.prepare, engine=SimpleNamespace(frame_limit=POSITIONS)
        )
        self.prompts = PromptBuilder(built, LIMITS, MetricStore.local({}))

    def prepare(self, question: Question) -> PreparedQuestion:
        self.texts.append(question.text)
        return prepared(FORMAT, question)

    def prompt(self, text: str = "Up?", *choices: str, **how: Any) -> Prompt:
        return self.prompts.prompt(Generate(session="s", turns=(Turn("user", text),), choices=choices, **how))


def test_a_question_is_prepared_once_for_each_who_asks_it() -> None:
    model = Prepared()
    hows: list[dict[str, Any]] = [{}, {"scored": True}, {"tenant": "a"}, {"salt": "s"}, {"max_tokens": 3}]
    for how in hows:
        first = model.prompt("Up?", "YES", "NO", **how)
        again = model.prompt("Up?", "YES", "NO", id=7, weight=2.0, trace_id="t", **how)
        assert again == first == Prepared().prompt("Up?", "YES", "NO", **how)
    assert model.texts == ["Up?"] * len(hows)
    assert model.prompt("Up?", "NO", "YES").choices == ("NO", "YES")
    assert len(model.texts) == len(hows) + 1


def test_a_standing_question_is_scored_by_first_tokens_though_the_same_was_asked_ad_hoc() -> None:
    model, choices = Prepared(), ("YES it is", "NO")
    standing = Question("ask", "Up?", choices, LIMITS.max_new_tokens)
    whole = model.prompt("Up?", *choices, scored=True)
    first = model.prompt("Up?", *choices, scored=True, question=standing)
    assert whole.labels is not None
    assert first.labels is not None
    assert (whole.labels.is_flat, first.labels.is_flat) == (False, True)


def test_a_question_that_is_refused_or_long_is_not_kept(monkeypatch: Any) -> None:
    model = Prepared()
    for _ in range(2):
        with pytest.raises(ValueError, match="same token"):
            model.prompt("Up?", "YES", "YES!")
    monkeypatch.setattr("daemon.engine.prompt_builder.KEPT_TOKENS", 20)
    long = "price 1 " * 10
    assert len(model.prompt(long).tokens) == len(model.prompt(long).tokens) > 20
    assert (len(model.texts), len(model.prompts._asked)) == (4, 0)


def run(rig: Rig, text: str) -> None:
    """Have the only request generate ``text``, token by token."""
    (request,) = rig.requests
    assert request.spec.on_token is not None
    for token in FORMAT.encode(text):
        request.output.append(token)
        request.samples.append(SampledToken(token, 0.5, 0.0, logprob=-0.5))
        assert not request.spec.on_token(request)


def test_a_stream_tells_each_piece_of_text_with_its_tokens() -> None:
    rig = Rig()
    rig.ask(Generate(id=1, text="Up?", stream=True, top_logprobs=0, stop=("no such text",)))
    run(rig, "no news")
    tokens = len(FORMAT.encode("no news"))
    assert [(each.tokens, len(each.logprobs)) for each in rig.of(Delta)] == [(1, 1)] * tokens
    assert "".join(each.text for each in rig.of(Delta))


def test_text_that_is_not_streamed_is_no_event_unless_nothing_was_told_for_long() -> None:
    rig = Rig()
    rig.ask(Generate(id=1, text="Up?", top_logprobs=0))
    run(rig, "no news")
    assert [type(each) for each in rig.events] == [Begun]
    often = Rig(Config(query=QueryConfig(max_wait=Duration(0))))
    often.ask(Generate(id=1, text="Up?", top_logprobs=0))
    run(often, "no news")
    assert [(each.text, each.logprobs, each.tokens) for each in often.of(Delta)] == [("", (), 1)] * len(
        FORMAT.encode("no news")
    )


@pytest.mark.parametrize("output", [[], [5]])
def test_what_was_computed_of_a_prompt_is_told_when_it_is_given_up(rig: Rig, output: list[int]) -> None:
    rig.ask(Generate(id=1, text="Up?"))
    (request,) = rig.requests
    request.state, request.output, request.computed_tokens = State.CANCELLED, output, 7
    request.spec.on_done(request)
    (failed,) = rig.of(Failed)
    assert (failed.code, failed.tokens) == ("cancelled", 7)


def test_text_that_a_schema_forces_is_there_to_be_drafted(rig: Rig) -> None:
    rig.ask(Generate(id=1, text="Up?", schema={"type": "object", "properties": {"up": {"const": True}}}))
    spec = rig.requests[0].spec
    assert spec.forced is not None
    written: list[int] = []
    while (token := spec.forced(written)) is not None:
        written.append(token)
    assert FORMAT.text(written) == '{"up": true}'


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


# Prompts of our own API, which may be opened before they are complete.


def test_a_prompt_is_its_text_behind_the_begin_of_text_once(rig: Rig) -> None:
    rig.open("One two")
    (request,) = rig.requests
    assert request.prompt == [BEGIN, *FORMAT.encode("One two")]
    assert (request.cls, request.spec.salt, request.complete) == (PriorityClass.POOL, "", False)
    assert (request.spec.stop_ids, request.spec.on_token) == (FORMAT.stop_ids, None)
    rig.input(" three")
    rig.input("Again", replace=True)
    rig.input("")
    assert rig.calls == [
        ("extend", 70, FORMAT.encode(" three")),
        ("replace", 70, [BEGIN, *FORMAT.encode("Again")]),
        ("extend", 70, []),
    ]
    first, replaced = len(request.prompt), 1 + len(FORMAT.encode("Again"))
    assert rig.lengths == [first, first + len(FORMAT.encode(" three")), replaced, replaced]


def test_a_prompt_says_whose_it_is_and_how_long_it_is_kept(rig: Rig) -> None:
    kept = {"retention_priority": 80, "retention_seconds": 2.5}
    rig.open("Up?", complete=True, tenant="desk", weight=3.0, **kept)
    rig.open("Down?", complete=True)
    spec, ordinary = (request.spec for request in rig.requests)
    assert (spec.tenant, spec.weight) == ("desk", 3.0)
    assert spec.retention == PrefixRetention(80, 2_500_000_000, "desk")
    assert (ordinary.tenant, ordinary.weight, ordinary.retention.priority) == ("", 1.0, DEFAULT)
    assert messages.ORDINARY == DEFAULT
    kept = {"retention_priority": HIGHEST, "retention_seconds": LONGEST_NS / 1e9}
    whole = messages.Complete(1, "Up?", **kept)
    assert messages.decode_request(messages.encode(whole)) == whole
    for past in ({"retention_priority": HIGHEST + 1}, {"retention_seconds": LONGEST_NS / 1e9 + 1}):
        with pytest.raises(Undecodable, match="retention"):
            messages.decode_request(messages.encode(messages.Complete(1, "Up?", **(kept | past))))


def test_the_first_piece_of_an_empty_prompt_begins_the_text(rig: Rig) -> None:
    rig.open()
    assert rig.requests[0].prompt == []
    rig.input("One")
    rig.input("", replace=True)
    rig.input("Two")
    begun = [[BEGIN, *FORMAT.encode(text)] for text in ("One", "Two")]
    assert rig.calls == [("replace", 70, begun[0]), ("replace", 70, []), ("replace", 70, begun[1])]


def test_choices_are_their_first_tokens_as_they_are_written(rig: Rig) -> None:
    rig.open("Up? ", complete=True, choices=(" YES", "NO"), temperature=0.5)
    (request,) = rig.requests
    assert request.spec.choices == (FORMAT.encode(" YES")[0], FORMAT.encode("NO")[0])
    assert (request.spec.max_tokens, request.complete, request.spec.temperature) == (1, True, 0.5)
    assert rig.lengths == []


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ({"choices": ("YES",)}, "at least two choices"),
        ({"choices": ("YES", "YES")}, "repeat"),
        ({"choices": ("YES", "")}, "an empty choice"),
        ({"choices": ("YES", "YES!")}, "same token"),
        ({"complete": True, "text": ""}, "the prompt is empty"),
        ({"temperature": float("nan")}, "temperature"),
    ],
    ids=str,
)
def test_what_can_be_no_request_is_refused(rig: Rig, how: dict[str, Any], part: str) -> None:
    rig.open(**{"text": "Up?"} | how)
    (refused,) = rig.events
    assert isinstance(refused, Failed)
    assert refused.code == "bad_request"
    assert part in refused.message
    assert rig.requests == []
    rig.input("more")
    assert rig.calls == []


def test_more_than_the_positions_is_refused_before_it_is_computed(rig: Rig) -> None:
    rig.open("x " * POSITIONS)
    assert (rig.failed, rig.requests) == (["too_long"], [])
    rig.open("x", max_tokens=POSITIONS)
    assert (rig.failed, rig.requests) == (["too_long"] * 2, [])
    rig.events.clear()
    rig.open("x")
    for _ in range(POSITIONS):
        rig.input("y")
    assert rig.lengths[-1] + 8 == POSITIONS
    assert rig.calls[-1] == ("cancel", 70)
    calls = len(rig.calls)
    rig.input("z")
    assert (rig.failed, len(rig.calls)) == ([], calls), "it ends once the scheduler has given it up"
    rig.requests[0].state = State.CANCELLED
    rig.requests[0].spec.on_done(rig.requests[0])
    rig.input("z")
    assert (rig.failed, len(rig.calls)) == (["too_long"], calls)


def test_a_piece_that_cannot_fit_is_not_tokenised(rig: Rig, monkeypatch: Any) -> None:
    rig.open("x")
    monkeypatch.setattr(PromptFormat, "plain", None)
    monkeypatch.setattr(PromptFormat, "encode", None)
    rig.input("y" * 100_000)
    assert rig.calls == [("cancel", 70)]
    rig.open("y" * 100_000)
    assert rig.failed == ["too_long"]


def test_the_end_of_a_prompt_is_told_once_with_its_history(rig: Rig) -> None:
    rig.open("Up?", choices=("YES", "NO"))
    (request,) = rig.requests
    rig.generations.change(FinishPrompt(1))
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
    done = rig.events[-1]
    assert isinstance(done, Finished)
    assert (done.id, done.text, done.prompt_tokens) == (1, "NO", len(request.prompt))
    assert (done.metadata.choice, done.metadata.logit_gap, done.metadata.untrained) == ("NO", 0.5, True)
    assert (done.answer_tokens, done.reused_tokens) == (1, 2)
    assert done.stats == PromptStats(3, 4, 5, 500, {"cells": 6})
    for command in (FinishPrompt(1), CancelGeneration(1), ExtendPrompt(1, "x")):
        rig.generations.change(command)
    assert len(rig.calls) == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("too_long", "too_long"),
        ("bad_prompt", "bad_request"),
        ("stopping", "shutting_down"),
        ("no_memory", "engine"),
        ("nan_logits", "engine"),
        ("abandoned", "abandoned"),
        (None, "cancelled"),
    ],
)
def test_clients_get_codes_that_are_theirs(rig: Rig, code: str | None, expected: str) -> None:
    """A request without a reason was cancelled."""
    rig.open("Up?")
    rig.generations.change(CancelGeneration(1))
    assert rig.calls == [("cancel", 70)]
    (request,) = rig.requests
    request.error = Failure(code, "because") if code else None
    request.spec.on_done(request)
    (failed,) = rig.of(Failed)
    reason = "because" if code else "the request was cancelled"
    assert (failed.code, failed.message) == (expected, reason)
