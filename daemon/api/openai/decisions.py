"""`POST /v1/decisions`: System One's questions in OpenAI's shape, a list of them about one input."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from daemon.api import systemone
from daemon.api.compatible import ApiError, Object, ReplyIdentity, Writer, session_of
from daemon.api.generation import MAX_MESSAGES, Finished, Generate, ModelCatalog
from daemon.api.messages import MAX_CHOICE_CHARS, ReplyMetadata
from daemon.api.openai.common import error_body, turn_of
from daemon.api.openai.responses import InputDetails, OutputDetails, ResponseUsage
from daemon.api.systemone import MAX_LEVELS, MAX_OPTIONS, MAX_QUESTIONS, confidence, normalised

Value = Annotated[str, Meta(min_length=1, max_length=MAX_CHOICE_CHARS)] | bool
_PARTS = ("input_text", "output_text", "refusal", "input_json")
_Part = Annotated[Object, Meta(extra_json_schema={"required": ["type"], "properties": {
    "type": {"enum": [*_PARTS]}}})]  # fmt: skip
HARMLESS: dict[str, tuple[Any, ...]] = {}
Parts = str | Annotated[list[_Part], Meta(max_length=MAX_MESSAGES)]


class Message(msgspec.Struct, frozen=True):
    """A message of the input; no other ``type`` is supported."""

    role: str
    content: Parts
    type: str = "message"


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    instructions: Parts
    name: str | None = None


class Predicate(_Question, frozen=True, kw_only=True, tag="predicate"):
    """Is it so?"""


class Option(msgspec.Struct, frozen=True):
    """A choice, with what it means."""

    value: Value
    description: str | None = None


class Choice(_Question, frozen=True, kw_only=True, tag="choice"):
    """Which of these?"""

    choices: Annotated[list[Option], Meta(min_length=2, max_length=MAX_OPTIONS)]


class Level(msgspec.Struct, frozen=True):
    """A level of a score."""

    label: str
    description: str | None = None


class Score(_Question, frozen=True, kw_only=True, tag="score"):
    """Which level?"""

    levels: Annotated[list[Level], Meta(min_length=2, max_length=MAX_LEVELS)]


Question = Predicate | Choice | Score


class DecisionsRequest(msgspec.Struct, frozen=True):
    """The members that this server reads. About a session an empty ``input`` says nothing."""

    model: str
    input: str | Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]
    questions: Annotated[list[Question], Meta(min_length=1, max_length=MAX_QUESTIONS)]

    @property
    def stream(self) -> bool:
        """Numbers do not come piece by piece."""
        return False


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None
    foretick: ReplyMetadata


class PredicateAnswer(_Answer, frozen=True, kw_only=True, tag="predicate"):
    """How probable it is."""

    probability: float


class ValueProbability(msgspec.Struct, frozen=True):
    """Of a choice."""

    value: str | bool
    probability: float


class ChoiceAnswer(_Answer, frozen=True, kw_only=True, tag="choice"):
    """The likeliest choice."""

    choice: str | bool
    probabilities: tuple[ValueProbability, ...]
    confidence: float


class LevelProbability(msgspec.Struct, frozen=True):
    """Of a level."""

    value: int
    label: str
    probability: float


class ScoreAnswer(_Answer, frozen=True, kw_only=True, tag="score"):
    """The expected level."""

    score: float
    probabilities: tuple[LevelProbability, ...]
    confidence: float


class Decision(msgspec.Struct, frozen=True):
    """Answers in the questions' order."""

    model: str
    answers: tuple[PredicateAnswer | ChoiceAnswer | ScoreAnswer, ...]
    usage: ResponseUsage


class Decisions:
    """See `daemon.api.compatible.Api`."""

    name, path, summary = "decisions", "/v1/decisions", "OpenAI: probabilities of answers about an input"
    request, reply, harmless = DecisionsRequest, Decision, HARMLESS
    error = staticmethod(error_body)

    def parse(self, asked: DecisionsRequest, served: ModelCatalog) -> list[Generate]:
        """See `Api`."""
        session, state = session_of(asked.model, served), _input(asked.input)
        return [systemone.generate(_translated(each), state, session) for each in asked.questions]

    def build_response(
        self, asked: DecisionsRequest, made: ReplyIdentity, done: Sequence[Finished]
    ) -> Decision:
        """See `Api`."""
        read, wrote = sum(each.prompt_tokens for each in done), sum(each.answer_tokens for each in done)
        kept = InputDetails(sum(each.reused_tokens for each in done))
        usage = ResponseUsage(read, kept, wrote, OutputDetails(), read + wrote)
        return Decision(made.model, tuple(map(_answer, asked.questions, done)), usage)

    def writer(self, asked: DecisionsRequest, made: ReplyIdentity) -> Writer:
        """There is no stream."""
        raise NotImplementedError


def _translated(question: Question) -> systemone.Question:
    """As System One has it. Raises ApiError for choices with one text."""
    asked = _text(question.instructions, "questions.instructions")
    if isinstance(question, Predicate):
        return systemone.Noul(instructions=asked)
    if isinstance(question, Score):
        levels = [": ".join(filter(None, (each.label, each.description))) for each in question.levels]
        return systemone.Score(instructions=asked, criteria=[*levels])
    texts = [
        each.value if isinstance(each.value, str) else f"{each.value}".lower() for each in question.choices
    ]
    if len(set(texts)) < len(texts):
        why = "questions.choices: two have the same text"
        raise ApiError("bad_request", why, "questions.choices")
    meanings = (each.description for each in question.choices)
    return systemone.Choice(instructions=asked, criteria=dict(zip(texts, meanings, strict=True)))


def _input(given: str | list[Message]) -> str:
    """A lone message is its text. Raises ApiError for items other than messages of text and JSON."""
    if isinstance(given, str):
        return given
    said = []
    for n, item in enumerate(given):
        here = f"input[{n}]"
        if item.type != "message":
            raise ApiError("bad_request", f"{here}: {item.type!r} is not supported", here)
        said.append(turn_of(item.role, _text(item.content, f"{here}.content"), here))
    if len(said) == 1:
        return said[0].text
    return "\n".join(f"{turn.role.capitalize()}: {turn.text}" for turn in said)


def _text(content: Parts, here: str) -> str:
    """Text and JSON parts as text. Raises ApiError for other ones."""
    if isinstance(content, str):
        return content
    texts = []
    for n, part in enumerate(content):
        match part:
            case {"type": "input_text" | "output_text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": "input_json", "data": dict() | list() as data}:
                texts.append(systemone.text_of(data, here))
            case _:
                where = f"{here}[{n}]"
                raise ApiError("bad_request", f"{where}: only text and JSON are supported", where)
    return "\n".join(texts)


def _answer(question: Question, done: Finished) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    found = normalised(done.scores)
    shared: dict[str, Any] = {"name": question.name, "foretick": done.metadata}
    if isinstance(question, Predicate):
        return PredicateAnswer(probability=found[0], **shared)
    shared["confidence"] = confidence(found)
    if isinstance(question, Choice):
        values = [each.value for each in question.choices]
        each_one = tuple(map(ValueProbability, values, found))
        return ChoiceAnswer(choice=values[found.index(max(found))], probabilities=each_one, **shared)
    levels = tuple(LevelProbability(n, question.levels[n].label, p) for n, p in enumerate(found))
    mean = sum(each.value * each.probability for each in levels)
    return ScoreAnswer(score=mean, probabilities=levels, **shared)
