"""The engine's side of generation for the OpenAI and Anthropic APIs: prompts to requests, tokens to text.

A chat without a session is rendered by the model's chat template and computed in class POOL. Special tokens
spelled out in a message count as such. A chat with a session asks its newest data version in class SESSION:
the last message is the question, and the earlier ones stand before it as text, in the ephemeral region.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeVar

from daemon.api.generation import (
    Begun,
    CancelGeneration,
    CountTokens,
    Delta,
    Finish,
    Finished,
    Generate,
    GenerateAll,
    GenerationCommand,
    GenerationEvent,
    GenerationFailed,
    Logprob,
    TokensCounted,
    TopLogprob,
    Turn,
)
from daemon.api.messages import ReplyMetadata
from daemon.engine.answers import CANCELLED, REBUILDING, decoder, lacking, times_of
from daemon.engine.build import Built
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.prompts import retention_of
from daemon.engine.version_records import VersionRecords
from daemon.lru import Lru
from engine.model.constrained import (
    BadSchema,
    Part,
    TextGrammar,
    choice_parts,
    choice_texts,
    schema_json,
    schema_parts,
)
from engine.model.detokenise import Detokeniser, StopText
from engine.model.vocabulary import Vocabulary, token_bytes
from engine.step import SampledToken
from flash.question import Grammar, PreparedQuestion, Question
from flash.registry import check_choices
from ingest.plane import TapeRecord
from metrics.store import MetricStore
from regions.tape import Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import Failure, Request, RequestSpec, State
from scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

NAME = "generation"
"""Name of a request without a session in messages."""
RENDERED, TOKENISED, SCHEMAS = 256, 64, 16
"""Sizes of the caches of rendered chats, of tokenised texts, and of schemas."""
LONG = 256
"""Characters of a message from which on it is tokenised by itself."""
ROLES = {"system": "Instructions", "user": "User", "assistant": "Assistant"}
Emit = Callable[[GenerationEvent], None]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TooLong(ValueError):
    """A prompt of more characters than its tokens could have."""


@dataclass(frozen=True)
class Prompt:
    """The tokens before an answer, and what is known of it."""

    tokens: Sequence[int]
    stop_ids: frozenset[int]
    max_tokens: int | None = None
    """Longest answer; None: no limit."""
    prepared: PreparedQuestion | None = None
    """Of a session: the question."""
    question: Question | None = None
    whole: bool = False
    """The text comes in one piece, as a ready answer does: a standing question's, a choice, a terse one."""
    cuttable: bool = True
    """It is free text, so a stop sequence and the client's own limit may cut it. A part of a choice or of a
    number would be another answer.
    """
    written: Mapping[str, str] = field(default_factory=dict)
    """JSON for each choice, where the answer is a choice and is to come as JSON."""

    @property
    def grammar(self) -> Grammar | None:
        """What the answer to the question may consist of; None: anything."""
        return None if self.prepared is None else self.prepared.grammar


@dataclass(eq=False)
class Running:
    """A generation in the scheduler: its text so far."""

    asked: Generate
    prompt: Prompt
    text: Detokeniser
    stop: StopText
    grammar: TextGrammar | None
    broken: str = ""
    """What failed when its text was made."""
    shown: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


class EngineGenerations:
    """All generations. Commands come from one thread, events go out on the scheduler's as well.

    ``rebuilding``, ``refuses``: see `EngineAsks`.
    """

    def __init__(
        self,
        built: Built,
        scheduler: Scheduler,
        limits: Limits,
        records: VersionRecords,
        confidence: Confidence,
        store: MetricStore,
        emit: Emit,
        rebuilding: Callable[[str], bool],
        *,
        refuses: bool,
    ) -> None:
        self._rebuilding, self._refuses = rebuilding, refuses
        self._built, self._format, self._scheduler = built, built.prompt, scheduler
        self._limits, self._confidence, self._emit = limits, confidence, emit
        self._requests: dict[int, Request] = {}
        records.readers.append(lambda: list(self._requests.values()))
        self._records = records

        def counted(cache: str) -> Callable[[str], None]:
            return lambda outcome: store.inc("foretick_api_cache_total", cache=cache, outcome=outcome)

        self._rendered: Lru[tuple[str, tuple[Turn, ...]], str] = Lru(RENDERED, counted("render"))
        self._tokenised: Lru[tuple[str, bool, str], list[int]] = Lru(TOKENISED, counted("tokenise"))
        self._schemas: Lru[tuple[str, bytes], tuple[Part, ...]] = Lru(SCHEMAS)

    def handle(self, command: GenerationCommand) -> None:
        """Carry out one command."""
        match command:
            case GenerateAll():
                self._generate(command.requests)
            case CountTokens():
                self._count(command)
            case CancelGeneration():
                request = self._requests.get(command.id)
                if request is not None:
                    self._scheduler.cancel(request.id)

    # Commands.

    def _generate(self, asked: Sequence[Generate]) -> None:
        requests = {each.id: request for each in asked if (request := self._checked(each)) is not None}
        self._requests |= requests  # before submitting: the worker may finish first
        self._scheduler.submit_together(list(requests.values()))

    def _checked(self, asked: Generate) -> Request | None:
        """The request; None for one that fails at once."""
        tape = self._built.tapes.get(asked.session)
        if asked.session and tape is None:
            self._fail(asked.id, Failure("unknown_session", f"there is no session {asked.session!r}"))
            return None
        if tape is not None and self._refuses and self._rebuilding(asked.session):
            self._fail(asked.id, REBUILDING)
            return None
        try:
            request = self._request(asked, tape)
        except ValueError as error:
            self._fail(asked.id, _failure(error))
            return None
        if not asked.session and len(request.prompt) > self._most_tokens:
            message = f"the prompt has {len(request.prompt)} tokens, the limit is {self._most_tokens}"
            self._fail(asked.id, Failure("too_long", message))
            return None
        return request

    def _request(self, asked: Generate, tape: Tape | None) -> Request:
        """Raises ValueError for what cannot be asked or kept."""
        prompt = self._prompt(asked)
        self._check_tokens(asked.tokens)
        grammar = self._grammar(asked, prompt)
        stop = StopText(asked.stop if prompt.cuttable else ())
        running = Running(asked, prompt, Detokeniser(self._format.text), stop, grammar)
        session, most = asked.session, self._most(asked, prompt)
        return Request(
            RequestSpec(
                cls=PriorityClass.SESSION if session else PriorityClass.POOL,
                session=session or NAME,
                prompt=prompt.tokens,
                max_tokens=most,
                on_done=partial(self._done, running),
                tape=tape,
                open_prompt=None if tape else partial(self._built.engine.open_prompt, asked.salt),
                stop_ids=prompt.stop_ids,
                choices=prompt.prepared.choice_tokens if prompt.prepared else None,
                grammar=grammar.allowed if grammar else prompt.grammar,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                seed=(asked.seed or 0, asked.index),
                top_logprobs=asked.top_logprobs,
                salt=asked.salt,
                tenant=asked.tenant,
                weight=asked.weight,
                retention=retention_of(asked, asked.tenant),
                on_token=partial(self._on_token, running),
            )
        )

    def _count(self, asked: CountTokens) -> None:
        counted = Generate(
            session=asked.session,
            turns=asked.turns,
            question=asked.question,
            salt=asked.salt,
            tenant=asked.tenant,
        )
        try:
            tokens = len(self._prompt(counted).tokens)
        except ValueError as error:
            self._fail(asked.id, _failure(error))
            return
        tape = self._built.tapes.get(asked.session)
        if tape is not None:
            tokens += len(self._built.prefixes.newest(asked.session)) + tape.live_tokens
        self._emit(TokensCounted(asked.id, tokens))

    def _prompt(self, asked: Generate) -> Prompt:
        if asked.session:
            return self._question(asked)
        tokens = asked.tokens or self._tokens(asked)
        if not tokens:
            raise ValueError("the prompt is empty")
        return Prompt(tokens, self._format.stop_ids, cuttable=not asked.choices and asked.schema is None)

    def _question(self, asked: Generate) -> Prompt:
        """The last turn as a question of the session, after the earlier ones.

        A standing question stands alone, and so does a terse model's, which reads nothing else.
        """
        if not asked.turns or asked.turns[-1].role != "user":
            raise ValueError("a session is asked by the last message, which must be the user's")
        question, written = self._worded(asked)
        self._check_characters(len(question.text))
        prepared = self._built.prepare(question)
        check_choices(question, prepared)
        if asked.penalty and not question.choices:
            raise ValueError(f"{asked.penalty} is not supported, unless the answer is one of choices")
        terse, is_json = self._format.terse is not None, asked.schema is not None and not written
        free = not (terse or question.choices or question.answer == "number" or asked.schema is not None)
        whole = not free or (asked.question is not None and not is_json)
        longest = prepared.answer_tokens(question) if whole else None
        return Prompt(
            prepared.prompt_tokens, prepared.stop_ids, longest, prepared, question, whole, free, written
        )

    def _worded(self, asked: Generate) -> tuple[Question, Mapping[str, str]]:
        """The question that is asked; if its choice is to come as JSON, the JSON for each."""
        standing, terse = asked.question, self._format.terse is not None
        if standing is not None and asked.schema is None:
            return standing, {}
        said = asked.turns[-1].text if terse else transcript(asked.turns)
        most = asked.max_tokens or self._limits.max_new_tokens
        question = Question("ask", standing.text if standing else said, asked.choices or None, most)
        if asked.schema is None:
            return question, {}
        if terse:
            return self._chosen(question, asked)
        if standing is not None and standing.choices:
            written = self._choice_texts(asked)
            if set(written) == set(standing.choices):
                return standing, written
        return question, {}

    def _choice_texts(self, asked: Generate) -> Mapping[str, str]:
        """The JSON for each text of a schema that is one list of texts; none for another schema."""
        try:
            return choice_texts(self._schema_parts(asked))
        except BadSchema:
            return {}

    def _chosen(self, question: Question, asked: Generate) -> tuple[Question, dict[str, str]]:
        """The question with the schema's texts as choices, and the JSON for each. Raises BadSchema.

        A terse model writes no JSON: it chooses, and the JSON is written around its choice.
        """
        answers = self._built.answers(question)
        if not answers:
            raise BadSchema("this question is answered by a number, which is given as plain text only")
        try:
            written = choice_texts(self._schema_parts(asked))
        except BadSchema as error:
            raise BadSchema(f"{error}; this question is answered by {', '.join(answers)}") from None
        # in the model's order, which a calibration goes by
        choices = sorted(written, key=lambda text: answers.index(text) if text in answers else len(answers))
        return replace(question, choices=tuple(choices)), written

    def _tokens(self, asked: Generate) -> list[int]:
        """Of a text, or of a chat, whose long messages come again with others.

        What is made for a prompt is kept, unless the prompt has too many tokens.
        """
        self._check_characters(len(asked.text) + sum(len(each.text) for each in asked.turns))
        keep: list[Callable[[], None]] = []

        def made(cache: Lru[K, V], key: K, make: Callable[[], V]) -> V:
            value = cache.get(key, asked.tenant)
            if value is None:
                value = make()
                keep.append(partial(cache.put, key, value, asked.tenant))
            return value

        is_chat = bool(asked.turns)
        encode, parts = self._format.plain, [asked.text]
        if is_chat:
            said = [(each.role, each.text) for each in asked.turns]
            text = made(self._rendered, (asked.salt, asked.turns), partial(self._format.chat, said))
            encode, parts = self._format.encode, self._format.parts(text, LONG)
        tokens: list[int] = []
        for part in parts:
            found = made(self._tokenised, (asked.salt, is_chat, part), partial(encode, part))
            tokens += found
        if len(tokens) <= self._most_tokens:
            for put in keep:
                put()
        return tokens

    @cached_property
    def _most_tokens(self) -> int:
        """Of a prompt without a session."""
        return min(self._built.engine.frame_limit - 1, self._limits.max_prompt_tokens)

    @cached_property
    def _most_characters(self) -> int:
        """Of a text that may have few enough tokens."""
        return self._limits.max_prompt_tokens * self._format.longest_token

    def _check_characters(self, characters: int) -> None:
        """Before a text is tokenised. Raises TooLong."""
        if characters > self._most_characters:
            limit = f"the limit is {self._limits.max_prompt_tokens} tokens"
            raise TooLong(f"the prompt has {characters} characters; {limit}")

    def _check_tokens(self, tokens: Iterable[int]) -> None:
        size = len(self._format.tokenizer)
        if any(not 0 <= token < size for token in tokens):
            raise ValueError(f"the prompt has a token that is not of the model's {size}")

    def _most(self, asked: Generate, prompt: Prompt) -> int:
        """The longest answer."""
        if prompt.max_tokens is not None and not prompt.cuttable:
            return prompt.max_tokens
        most = min(asked.max_tokens or self._limits.max_new_tokens, self._limits.max_new_tokens)
        if not asked.session:
            most = min(most, self._built.engine.frame_limit - len(prompt.tokens))
        return max(1, most if prompt.max_tokens is None else min(most, prompt.max_tokens))

    def _grammar(self, asked: Generate, prompt: Prompt) -> TextGrammar | None:
        if prompt.written or (asked.schema is None and (not asked.choices or asked.session)):
            return None  # a session's choices are told apart by their first tokens
        parts = choice_parts(asked.choices) if asked.choices else self._schema_parts(asked)
        return TextGrammar(parts, self._vocabulary, self._format.stop_ids)

    def _schema_parts(self, asked: Generate) -> tuple[Part, ...]:
        """Made once for all answers to one request."""
        key = asked.salt, schema_json(asked.schema)
        return self._schemas.made(key, lambda: schema_parts(asked.schema), asked.tenant)

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return token_bytes(self._format.tokenizer)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._bytes)

    # On the scheduler's thread.

    def _on_token(self, running: Running, request: Request) -> bool:
        """As `_next`; a defect ends this answer and no other work of the batch."""
        try:
            return self._next(running, request)
        except Exception as error:
            log.exception("the text of a generation failed")
            running.broken = f"{type(error).__name__}: {error}"
            return True

    def _next(self, running: Running, request: Request) -> bool:
        """The next token: send what it completes; true at a stop sequence and at the end of a grammar."""
        asked, sample = running.asked, request.samples[-1]
        if len(request.output) == 1:
            self._emit(Begun(asked.id, _prompt_tokens(request), request.cached_tokens))
        if sample.token in running.prompt.stop_ids:
            return False  # it ends by itself
        logprobs: tuple[Logprob, ...] = ()
        if asked.top_logprobs is not None:
            logprobs = (self._logprob(sample),)
            running.logprobs += logprobs
        piece = ""
        if not running.prompt.whole:
            piece = running.stop.add(running.text.add([sample.token]))
            running.shown.append(piece)
        self._emit(Delta(asked.id, piece, logprobs) if asked.stream else Delta(asked.id, ""))
        if running.stop.found is not None:
            return True
        return running.grammar is not None and running.grammar.complete(request.output)

    def _logprob(self, sample: SampledToken) -> Logprob:
        written = self._written(sample.token)
        top = tuple(TopLogprob(text, logprob, data) for token, logprob in sample.top
                    for text, data in [self._written(token)])  # fmt: skip
        return Logprob(written[0], sample.logprob or 0.0, written[1], top)

    def _written(self, token: int) -> tuple[str, tuple[int, ...]]:
        """A token as text and as bytes; a special one by its name."""
        data = self._bytes.get(token)
        if data is None:
            data = str(self._format.tokenizer.convert_ids_to_tokens(token)).encode()
        return data.decode(errors="replace"), tuple(data)

    def _done(self, running: Running, request: Request) -> None:
        asked = running.asked
        self._requests.pop(asked.id, None)
        if request.state is not State.FINISHED or running.broken:
            broken = Failure("engine", running.broken) if running.broken else None
            tokens = 0 if request.output else request.computed_tokens
            self._fail(asked.id, broken or request.error or CANCELLED, tokens)
            return
        record = self._records.of(asked.session, request.version) if asked.session else None
        question = running.prompt.question
        choice = request.chosen(question.choices) if question else None
        self._show_rest(running, request, choice, record)
        self._emit(
            Finished(
                id=asked.id,
                text="".join(running.shown),
                finish=_finish(running, request),
                stop=running.stop.found,
                prompt_tokens=_prompt_tokens(request),
                reused_tokens=request.cached_tokens,
                answer_tokens=len(request.output),
                metadata=self._facts(running, request, choice, record),
                logprobs=tuple(running.logprobs),
                times=times_of(record) if record and record.ts_ring else None,
            )
        )

    def _show_rest(
        self, running: Running, request: Request, choice: str | None, record: TapeRecord | None
    ) -> None:
        """What was held back, or a text that comes in one piece."""
        prompt = running.prompt
        if prompt.whole and prompt.prepared is not None:
            decode = decoder(self._format.decode, prompt.prepared, record)
            whole = decode(list(request.answer)) if choice is None else prompt.written.get(choice, choice)
            rest = running.stop.add(whole) + running.stop.rest()
        elif running.stop.found is None:
            rest = running.stop.add(running.text.rest())
            rest += running.stop.rest()
        else:
            return
        running.shown.append(rest)
        if running.asked.stream and rest:
            self._emit(Delta(running.asked.id, rest, tokens=0))

    def _facts(
        self, running: Running, request: Request, choice: str | None, record: TapeRecord | None
    ) -> ReplyMetadata:
        untrained, session = self._built.loaded.untrained, running.asked.session
        question, judged = running.prompt.question, None
        if question is not None:
            judged = self._confidence.of(session, question, request.samples[0].logits, choice)
        flags = {
            "warm_up": bool(session) and self._rebuilding(session),
            "untrained": untrained,
            "replay": record is not None and times_of(record).replay,
            "rounded": record is not None and record.rounded,
            **lacking(record),
            "abstained": judged is not None and judged.abstained,
        }
        return ReplyMetadata(
            session=session or None,
            data_version=request.version if session else None,
            choice=choice,
            probability=judged.probability if judged else None,
            choice_set=judged.choice_set if judged else None,
            logit_gap=request.samples[0].gap,
            untrained=untrained,
            flags=tuple(name for name, is_set in flags.items() if is_set),
        )

    def _fail(self, number: int, failure: Failure, tokens: int = 0) -> None:
        self._emit(GenerationFailed(number, failure.code, failure.message, tokens))


def _failure(error: ValueError) -> Failure:
    return Failure("too_long" if isinstance(error, TooLong) else "bad_request", str(error))


def transcript(turns: Sequence[Turn]) -> str:
    """The question of the last turn, after what was said before, as text."""
    earlier = [f"{ROLES[each.role]}: {each.text}\n" for each in turns[:-1]]
    return "".join(["Earlier in this conversation:\n", *earlier, "\n"] if earlier else []) + turns[-1].text


def _prompt_tokens(request: Request) -> int:
    """The prompt as a client counts it: of a session with the tape before the question."""
    return len(request.prompt) + (request.cached_tokens if request.spec.tape is not None else 0)


def _finish(running: Running, request: Request) -> Finish:
    if running.stop.found is not None:
        return "stop_sequence"
    grammar, output = running.grammar, request.output
    if output[-1] in running.prompt.stop_ids:
        return "stop"
    if grammar is not None:
        return "stop" if grammar.complete(output) else "length"
    return "stop" if running.prompt.max_tokens == len(output) else "length"
