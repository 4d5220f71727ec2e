"""System One: typed questions about a state, answered by probabilities. The state is text, JSON or a session.

Each question is a request of its own behind the same text, so no other question changes its answer. Its
options are scored as wholes, and their probabilities are over the options as given.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import exp
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from daemon.api.compatible import ApiError, Reason, session_of
from daemon.api.generation import Finished, Generate, ModelCatalog, Turn
from daemon.api.messages import MAX_CHOICE_CHARS, MAX_QUESTION_CHARS

PATH = "/v1/systemone"
ALIAS = "jev-latest"
"""The model that clients ask for by default: here the daemon's own."""
YES, NO = "YES", "NO"
MAX_QUESTIONS, MAX_OPTIONS, MAX_LEVELS = 64, 255, 10
Text = str | dict[str, Any] | list[Any]
"""Words, or JSON in their place."""
Option = Annotated[str, Meta(min_length=1, max_length=MAX_CHOICE_CHARS)]
_TYPES: dict[Reason, str] = {
    "unauthenticated": "authentication_error",
    "forbidden": "permission_error",
    "unknown_model": "not_found",
    "unknown_url": "not_found",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "engine": "internal_error",
    "rebuilding": "overloaded_error",
    "shutting_down": "overloaded_error",
    "timeout": "timeout_error",
}


_PART = re.compile(r"[^.\[\]]+")
"""A name or an index in the path of a member; names of questions are not in it."""


class NoulCriteria(msgspec.Struct, frozen=True, rename={"yes": "true", "no": "false"}):
    """What counts as yes, and what as no."""

    yes: Text | None = None
    no: Text | None = None


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    instructions: Text | None = None

    @property
    def described(self) -> Mapping[str, Text | None]:
        """Each option with its description."""
        raise NotImplementedError

    @property
    def options(self) -> tuple[str, ...]:
        """What is scored."""
        return tuple(self.described)


class Noul(_Asked, frozen=True, kw_only=True, tag="noul"):
    """How probable is yes? It has ``instructions`` or ``criteria``."""

    criteria: NoulCriteria | None = None

    @property
    def described(self) -> Mapping[str, Text | None]:
        """See `_Asked`."""
        criteria = self.criteria or NoulCriteria()
        return {YES: criteria.yes, NO: criteria.no}


class Choice(_Asked, frozen=True, kw_only=True, tag="choice"):
    """Which of the options? ``criteria``: each with its description, or null."""

    criteria: Annotated[dict[Option, Text | None], Meta(min_length=2, max_length=MAX_OPTIONS)]

    @property
    def described(self) -> Mapping[str, Text | None]:
        """See `_Asked`."""
        return self.criteria


class Score(_Asked, frozen=True, kw_only=True, tag="score"):
    """Which level, from 0 on? ``criteria``: the levels' descriptions."""

    criteria: Annotated[list[Text], Meta(min_length=2, max_length=MAX_LEVELS)]

    @property
    def described(self) -> Mapping[str, Text | None]:
        """See `_Asked`; the options are the levels' numbers."""
        return {str(level): each for level, each in enumerate(self.criteria)}


Question = Noul | Choice | Score


class DecisionRequest(msgspec.Struct, frozen=True):
    """Questions by names of the client's own, about one state; other members are accepted, without effect.

    A ``state`` of just ``{"session": NAME}`` is the session's newest data. With a model ``session:NAME`` the
    state stands beside that data.
    """

    model: str
    state: Text
    questions: Annotated[dict[Option, Question], Meta(min_length=1, max_length=MAX_QUESTIONS)]


class _Read(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer was read from, as in an answer of ours; null, and left out, without a session.

    ``x_probability`` is the calibrated one of the likeliest option, ``x_choice_set`` its conformal set,
    ``x_uncalibrated`` why there is neither, and ``x_act`` whether to act on it: as the question's `max_error`
    says, else whether that set has one option.
    """

    x_session: str | None = None
    x_data_version: int | None = None
    x_as_of: int | None = None
    x_staleness_ns: int | None = None
    x_source_age_ns: int | None = None
    x_daemon_age_ns: int | None = None
    x_probability: float | None = None
    x_choice_set: tuple[str, ...] | None = None
    x_uncalibrated: str | None = None
    x_act: bool | None = None
    x_cached: bool = False
    x_flags: tuple[str, ...] = ()


class NoulAnswer(_Read, frozen=True, kw_only=True, tag="noul"):
    """``noul``: the probability of yes."""

    noul: float


class ChoiceAnswer(_Read, frozen=True, kw_only=True, tag="choice"):
    """``choice``: the likeliest option."""

    choice: str
    probabilities: dict[str, float]
    confidence: float


class ScoreAnswer(_Read, frozen=True, kw_only=True, tag="score"):
    """``score``: the expected level. ``legend``: the levels' descriptions."""

    score: float
    legend: dict[str, Text]
    probabilities: dict[str, float]
    confidence: float


class DecisionUsage(msgspec.Struct, frozen=True):
    """Tokens that were computed for the questions, and for their answers: those that quotas count."""

    input_tokens: int
    output_tokens: int


class DecisionResponse(msgspec.Struct, frozen=True):
    """The answers, by the questions' names."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage


class Invalid(msgspec.Struct, frozen=True):
    """What is wrong with a request, and where."""

    loc: tuple[str | int, ...]
    msg: str
    type: str


class Refused(msgspec.Struct, frozen=True):
    """Why a request that may be right is not answered."""

    error_type: str
    message: str


class DecisionError(msgspec.Struct, frozen=True):
    """An error as this API writes it."""

    detail: tuple[Invalid, ...] | Refused


def error_body(problem: ApiError) -> DecisionError:
    """See `daemon.api.compatible.ErrorBody`."""
    if problem.reason != "invalid":
        return DecisionError(Refused(_TYPES.get(problem.reason, problem.reason), problem.message))
    where = (int(part) if part.isdigit() else part for part in _PART.findall(problem.param or ""))
    kind = "missing" if "missing required" in problem.message else "value_error"
    return DecisionError((Invalid(("body", *where), problem.message, kind),))


def refusal(problem: ApiError) -> ApiError:
    """A failure as this API has it: what is wrong with a body is invalid, and a long prompt is too large."""
    reasons: dict[Reason, Reason] = {"bad_request": "invalid", "too_long": "too_large"}
    reason = reasons.get(problem.reason, problem.reason)
    return ApiError(reason, problem.message, problem.param, problem.retry_after_s)


def parse(asked: DecisionRequest, served: ModelCatalog) -> list[Generate]:
    """A request for each question, in their order. Raises ApiError."""
    model, state = asked.model, asked.state
    session = "" if model == ALIAS else session_of(model, served)
    match state:
        case {"session": str(name), **more} if not more and session in ("", name):
            if name not in served.sessions:
                known = ", ".join(served.sessions) or "none"
                raise ApiError("unknown_model", f"there is no session {name!r}; there are: {known}", "state")
            session, state = name, ""
    for name, each in asked.questions.items():
        if isinstance(each, Noul) and each.instructions is None and not any(each.described.values()):
            raise ApiError("bad_request", f"{name!r} has neither instructions nor criteria", "questions")
    text = text_of(state, "state")
    return [generate(each, text, session) for each in asked.questions.values()]


def generate(question: Question, state: str, session: str) -> Generate:
    """The request that scores a question's options. Raises ApiError for one that is too long."""
    text = worded(question)
    if session and len(text) > MAX_QUESTION_CHARS:
        why = f"a question has {len(text)} characters, at most {MAX_QUESTION_CHARS}"
        raise ApiError("too_long", why, "questions")
    # a standing question is meant by its words alone: what stands beside them makes another one
    alone = isinstance(question.instructions, str) and not state and not any(question.described.values())
    meant = str(question.instructions) if session and alone else ""
    turn = Turn("user", f"{state}\n\n{text}" if state else text)
    return Generate(session=session, turns=(turn,), choices=question.options, scored=True, meant=meant)


def worded(question: Question) -> str:
    """A question in words: what is asked, its options with what they mean, and how to answer."""
    match question:
        case Noul():
            title, rule = "", f"Answer {YES} or {NO}."
        case Choice():
            title, rule = "Options:", "Answer with one of the options, exactly as it is written."
        case Score():
            title, rule = "Levels:", "Answer with the number of a level."
    listed = []
    for option, description in question.described.items():
        if description is not None:
            listed.append(f"{option}: {text_of(description)}")
        elif title:
            listed.append(option)
    asked = "" if question.instructions is None else text_of(question.instructions)
    return "\n".join(filter(None, [asked, title, *listed, rule]))


def text_of(value: Text, here: str = "questions") -> str:
    """Raises ApiError for JSON that cannot be written."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise ApiError("bad_request", f"{here}: nested too deeply, or a number is too long", here) from None


def build_response(
    asked: DecisionRequest, wanted: Sequence[Generate], served: ModelCatalog, done: Sequence[Finished]
) -> DecisionResponse:
    """The reply."""
    pairs = zip(asked.questions.items(), done, strict=True)
    answers = {name: _answer(question, each) for (name, question), each in pairs}
    session, answered = wanted[0].session, done[0].metadata
    usage = DecisionUsage(
        sum(max(0, each.prompt_tokens - each.reused_tokens) for each in done),
        sum(each.answer_tokens for each in done),
    )
    model = f"session:{answered.session or session}" if session else answered.model or served.models[0].name
    return DecisionResponse(model, answers, usage)


def _answer(question: Question, done: Finished) -> NoulAnswer | ChoiceAnswer | ScoreAnswer:
    probabilities = dict(zip(question.options, normalised(done.scores), strict=True))
    read = _read(done)
    sure = confidence([*probabilities.values()])
    match question:
        case Noul():
            return NoulAnswer(noul=probabilities[YES], **read)
        case Choice():
            best = max(probabilities, key=lambda option: probabilities[option])
            return ChoiceAnswer(choice=best, probabilities=probabilities, confidence=sure, **read)
        case Score():
            mean = sum(int(level) * p for level, p in probabilities.items())
            legend = dict(zip(question.options, question.criteria, strict=True))
            return ScoreAnswer(
                score=mean, legend=legend, probabilities=probabilities, confidence=sure, **read
            )


def _read(done: Finished) -> dict[str, Any]:
    """The members of a `_Read`."""
    found = done.metadata
    act = found.act
    if act is None and found.choice_set is not None:
        act = len(found.choice_set) == 1 and "abstained" not in found.flags
    own = {"session", "data_version", "as_of", "staleness_ns", "source_age_ns", "daemon_age_ns",
           "probability", "choice_set", "cached", "flags"}  # fmt: skip
    why = found.uncalibrated if found.session else None
    return {f"x_{name}": getattr(found, name) for name in own} | {"x_act": act, "x_uncalibrated": why}


def normalised(scores: Sequence[float]) -> list[float]:
    """Probabilities of log probabilities that share one constant; of these, one is finite at least."""
    top = max(scores)
    weights = [exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def confidence(probabilities: Sequence[float]) -> float:
    """How far the highest of n is above chance: (m - 1/n) / (1 - 1/n)."""
    chance = 1 / len(probabilities)
    return min(1.0, max(0.0, (max(probabilities) - chance) / (1 - chance)))


class ModelCard(msgspec.Struct, frozen=True):
    """A model as this API lists it."""

    name: str
    description: str
    release_date: str


def cards(served: ModelCatalog) -> tuple[ModelCard, ...]:
    """The daemon's own models, also under the name that clients ask for by default, and each session."""
    day = datetime.fromtimestamp(served.since, UTC).date().isoformat()
    own = dict.fromkeys((*served.own, ALIAS))
    return (
        *(ModelCard(name, "the daemon's model, about the state of a request", day) for name in own),
        *(ModelCard(f"session:{name}", f"about the newest data of {name}", day) for name in served.sessions),
    )
