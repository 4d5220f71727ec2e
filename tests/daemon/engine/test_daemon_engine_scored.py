"""Scored requests on the engine's side: the nodes of a tree as requests, and how they end together."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from daemon.api.generation import CancelGeneration, Delta, Failed, Finished, Generate, Turn
from daemon.config.derived_limits import DerivedLimits
from daemon.config.schema import Config
from daemon.engine.request_runner import SESSION_RESET
from engine.step import SampledToken
from regions.offload.kv_store import NotResident
from scheduler.request import Failure, Request, State
from tests.daemon.engine.test_daemon_engine_generations import FORMAT, Rig

CHOICES = ("Refund", "Re", "Bill")
ASKED = Generate(id=1, turns=(Turn("user", "Up?"),), choices=CHOICES, scored=True)


class ScoredRig(Rig):
    """Also carries out what is to run between two batches, unless it is ``closed``."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.awaited: list[tuple[Any, Callable[[], None]]] = []

    def when_resident(self, tape: Any, callback: Callable[[], None]) -> None:
        self.awaited.append((tape, callback))

    def run_between(self, callback: Callable[[], None]) -> bool:
        if not self.closed:
            callback()
        return not self.closed

    def score(self, **members: Any) -> list[Request]:
        """The requests of a node each."""
        self.ask(msgspec.structs.replace(ASKED, **members))
        return [*self.requests]

    def end(self, request: Request, state: State = State.FINISHED, error: Failure | None = None) -> None:
        """A node is done; where it is finished its first choice is the likeliest, by one nat."""
        choices = request.spec.choices or ()
        logits = tuple(-float(n) for n in range(len(choices)))
        request.samples = [SampledToken(choices[0], 0.0, -1.0, logits=logits, logprob=-0.5)]
        request.state, request.error, request.computed_tokens = state, error, 7
        request.spec.on_done(request)


@pytest.fixture
def rig() -> ScoredRig:
    return ScoredRig()


def test_a_question_has_a_request_for_each_node_behind_the_tokens_that_lead_there(rig: ScoredRig) -> None:
    requests = rig.score()
    labels = [tuple(FORMAT.encode(FORMAT.answer_prefix + each)) for each in CHOICES]
    paths = {label[:n] for label in labels for n in range(len(label))}
    prompt = tuple(requests[0].prompt)
    assert {tuple(each.prompt) for each in requests} == {(*prompt, *path) for path in paths}
    for each in requests:
        path = tuple(each.prompt)[len(prompt) :]
        behind = [label[len(path) :] for label in labels if label[: len(path)] == path]
        assert set(each.spec.choices or ()) == {tokens[0] for tokens in behind if tokens}
        assert (each.spec.max_tokens, each.spec.top_logprobs, each.spec.on_token) == (1, 0, None)


def test_the_last_node_gives_the_answer_and_one_before_a_sign_of_life(rig: ScoredRig) -> None:
    requests = rig.score()
    for each in requests[:-1]:
        rig.end(each)
    assert [(type(each), each.text) for each in rig.events] == [(Delta, "")]
    rig.end(requests[-1])
    (done,) = rig.of(Finished)
    assert done.text == CHOICES[done.scores.index(max(done.scores))]
    assert len(done.scores) == len(CHOICES)
    assert done.computed_tokens == len(requests[0].prompt) + 7 * (len(requests) - 1) + len(requests)
    assert not rig.generations._open


def test_a_node_that_fails_ends_the_others_and_what_was_computed_is_told_once(rig: ScoredRig) -> None:
    *others, last = rig.score()
    rig.end(last, State.FAILED, Failure("no_memory", "full"))
    assert rig.calls == [("cancel", each.id) for each in (*others, last)]
    assert rig.failed == []
    for each in others:
        rig.end(each, State.CANCELLED)
    assert rig.failed == ["engine"]
    assert rig.events[-1].tokens == 7 * (len(others) + 1)
    assert not rig.generations._open


def test_a_client_that_leaves_cancels_every_node(rig: ScoredRig) -> None:
    requests = rig.score()
    rig.generations.change(CancelGeneration(1))
    assert rig.calls == [("cancel", each.id) for each in requests]
    for each in requests:
        rig.end(each, State.CANCELLED)
    assert rig.failed == ["cancelled"]


def test_a_client_that_leaves_before_the_forks_are_made_costs_nothing(rig: ScoredRig) -> None:
    waiting: list[Callable[[], None]] = []
    rig.run_between = lambda callback: waiting.append(callback) or True  # type: ignore[method-assign]
    rig.ask(ASKED, msgspec.structs.replace(ASKED, id=2))
    rig.generations.change(CancelGeneration(1))
    assert rig.failed == ["cancelled"]
    waiting[0]()
    assert set(rig.generations._open) == {2}


def test_the_record_of_a_fork_s_version_is_kept_until_it_is_answered(rig: ScoredRig) -> None:
    fork = SimpleNamespace(version=5, context_tokens=1, cached_tokens=1)
    tape = SimpleNamespace(fork=lambda: fork, name="s", version=5, resident=True)
    rig.generations._built.tapes["s"] = tape  # type: ignore[assignment]
    for version in (5, 6, 7):
        rig.generations.on_commit(tape, version, [SimpleNamespace(payload=f"newest of {version}")])  # type: ignore[arg-type, list-item]
        if version == 5:
            rig.generations._unforked.add(1)
            asked = Generate(id=1, session="s", choices=CHOICES, scored=True)
            rig.generations._score([(asked, rig.prompts.prompt(ASKED))])
    assert rig.generations.record("s", 5) == "newest of 5"
    assert rig.generations.record("s", 6) is None


def test_after_a_reset_of_its_session_it_is_asked_again(rig: ScoredRig) -> None:
    requests = rig.score()
    for each in requests:
        rig.end(each, State.FAILED, SESSION_RESET)
    assert (rig.failed, rig.generations._open) == ([], {})
    rig.generations.ask_again()
    assert len(rig.requests) == 2 * len(requests)


def test_a_window_that_is_elsewhere_and_a_scheduler_that_stops_are_said(rig: ScoredRig) -> None:
    def fork() -> None:
        raise NotResident("full")

    tape = SimpleNamespace(fork=fork, name="s", version=3, resident=False)
    rig.generations._built.tapes["s"] = tape  # type: ignore[assignment]
    prompt = rig.prompts.prompt(ASKED)
    rig.generations._unforked |= {1, 2}
    rig.generations._score([(Generate(id=1, session="s", choices=CHOICES, scored=True), prompt)])
    assert [(awaited, len(rig.failed)) for awaited, _ in rig.awaited] == [(tape, 0)]
    rig.awaited.pop()[1]()  # it has no room now
    rig.generations._score([(Generate(id=2, session="gone", choices=CHOICES, scored=True), prompt)])
    rig.closed = True
    rig.score(id=3)
    assert rig.failed == ["rebuilding", "bad_request", "shutting_down"]
    assert (rig.requests, rig.generations._open) == ([], {})


def test_questions_whose_choices_part_in_too_many_places_are_too_long(rig: ScoredRig) -> None:
    long = tuple(f"{n:03d}{chr(97 + n % 26) * 250}" for n in range(10))
    nodes = len(rig.prompts.prompt(msgspec.structs.replace(ASKED, choices=long)).labels.nodes)
    fit = DerivedLimits.of(Config()).choice_nodes // nodes
    assert 0 < fit < 100
    rig.ask(*(msgspec.structs.replace(ASKED, id=n, choices=long) for n in range(fit + 1)))
    assert [(each.id, each.code) for each in rig.of(Failed)] == [(fit, "too_long")]
    assert len(rig.requests) == fit * nodes


@pytest.mark.parametrize("choices", [("Up", " "), ("Up", "<|end|>"), ("<|end|>a", " a")])
def test_choices_that_cannot_be_written_or_distinguished_are_refused(rig: ScoredRig, choices: Any) -> None:
    rig.score(choices=choices)
    assert (rig.failed, rig.requests) == (["bad_request"], [])
