"""The engine's side of every request, from its begin to its end: questions to sessions, prompts, chats.

A request with a session asks its newest data version in class SESSION; one without is computed in class POOL.
`daemon.engine.prompt_builder` makes tokens of it; here it runs, and its tokens become text.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from msgspec import structs

from daemon.api.generation import (
    Begun,
    CancelGeneration,
    CountTokens,
    Delta,
    ExtendPrompt,
    Failed,
    Finish,
    Finished,
    FinishPrompt,
    Generate,
    GenerationEvent,
    Logprob,
    PromptStats,
    TokensCounted,
    TopLogprob,
)
from daemon.api.messages import ReplyMetadata, code_of
from daemon.config.derived_limits import DerivedLimits
from daemon.config.schema import Config
from daemon.engine.answers import decoder, lacking, passes_of, times_of
from daemon.engine.build import Built
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.label_tree import Tokens
from daemon.engine.prompt_builder import Prompt, PromptBuilder, TooLong
from engine.model.constrained import TextGrammar
from engine.model.detokenise import Detokeniser, StopText
from engine.model.vocabulary import token_bytes
from engine.step import SampledToken
from feeds.market_data import Flag
from flash.confidence import Judged
from ingest.plane import TapeRecord
from regions.cache_priority import PrefixRetention
from regions.offload.kv_store import NotResident
from regions.tape import Tape
from scheduler.interfaces import PriorityClass
from scheduler.lifecycle import STOPPING
from scheduler.request import Failure, LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem

log = logging.getLogger(__name__)

NAME = "generation"
"""Name of a request without a session in messages."""
SIGN_OF_LIFE_NS = 1_000_000_000
"""A request without an event for so long, whose tokens come, gets one."""
CANCELLED = Failure("cancelled", "the request was cancelled")
SESSION_RESET = Failure("rebuilding", "the session was reset to what another daemon has answered: ask again")
"""A request that ends so is made again, unless a part of its answer was sent."""
REBUILDING = Failure(
    "rebuilding", "its newest data is read again after a restart: ask later (recovery.while_rebuilding)"
)
NOT_RESIDENT = Failure(
    "rebuilding", "its window is outside the pool, which has no room for it now: ask later"
)
UNREAD = "unread"
"""Flag of an answer about words, by a model that reads none: it says nothing."""
Emit = Callable[[GenerationEvent], None]


@dataclass(eq=False)
class Running:
    """A request in the scheduler: its text so far, and what of it was not sent yet."""

    asked: Generate
    prompt: Prompt
    text: Detokeniser
    stop: StopText
    grammar: TextGrammar | None
    length: int
    """Tokens of the prompt as of the newest input."""
    failure: Failure | None = None
    """Why it is given up, where that is known before the scheduler has ended it."""
    shown: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    sent_tokens: int = 0
    sent_ns: int = 0
    left: int = 1
    """Requests that have not ended: of choices that are scored, as many as their tree has nodes."""

    def end_one(self) -> int:
        """A request has ended; returns how many are left."""
        self.left -= 1
        return self.left

    def extend(self, length: int) -> None:
        """The prompt has that many tokens now."""
        self.length = length

    def give_up(self, failure: Failure) -> None:
        """It ends with ``failure`` once the scheduler has ended it."""
        self.failure = failure

    def send(self, tokens: int) -> int:
        """An event goes out after that many tokens of the answer; returns how many are new since the last."""
        new, self.sent_tokens, self.sent_ns = tokens - self.sent_tokens, tokens, time.monotonic_ns()
        return new


class RequestRunner:
    """All requests. Commands come from one thread, events go out on the scheduler's as well.

    ``rebuilding`` says whether a session's bars are still read again after a restart; its answers have the
    flag `warm_up` then, or it answers none (`recovery.while_rebuilding`).
    """

    def __init__(
        self,
        config: Config,
        built: Built,
        scheduler: Scheduler,
        prompts: PromptBuilder,
        confidence: Confidence,
        emit: Emit,
        rebuilding: Callable[[str], bool],
    ) -> None:
        self._built, self._format, self._scheduler, self._prompts = built, built.prompt, scheduler, prompts
        self._confidence, self._emit, self._rebuilding = confidence, emit, rebuilding
        self._refuses = config.recovery.while_rebuilding == "refuse"
        self._sign_of_life_ns = min(SIGN_OF_LIFE_NS, config.query.max_wait // 4)
        self._max_nodes = DerivedLimits.of(config).choice_nodes
        self._open: dict[int, tuple[Running, Sequence[Request]]] = {}
        self._again: list[Generate] = []
        self._unforked: set[int] = set()
        """Scored requests whose forks are not made yet. Whoever takes one out decides what becomes of it."""
        self._records: dict[str, dict[int, TapeRecord]] = {}
        """By session and version, the newest record of the versions that may still be answered."""
        scheduler.subscribe(self.on_commit)

    def on_commit(self, tape: Tape, version: int, records: Sequence[TapeItem[TapeRecord]]) -> None:
        """Note the newest record of the new version, and forget those of versions that no request reads."""
        first = [
            requests[0] for _, requests in list(self._open.values())
        ]  # the nodes of a tree read one version
        read = {_version(each) for each in first if each.session == tape.name}
        kept = {v: each for v, each in self._records.get(tape.name, {}).items() if v in read}
        self._records[tape.name] = kept | {version: records[-1].payload}

    def record(self, session: str, version: int) -> TapeRecord | None:
        """The newest record of ``version``; None for a session without input since the engine's start."""
        return self._records.get(session, {}).get(version)

    def restore(self, session: str, version: int, record: TapeRecord) -> None:
        """A session goes on from ``version``, whose ``record`` another process received."""
        ring = time.monotonic_ns() - max(0, time.time_ns() - record.ts_source)
        self._records[session] = {version: structs.replace(record, ts_ring=ring, ts_closed=0)}

    def refuses(self, session: str) -> bool:
        """Whether questions about a session are refused while its bars are read again."""
        return self._refuses and self._rebuilding(session)

    def metadata(self, session: str, version: int) -> ReplyMetadata:
        """What is known of an answer read from the newest ``version``, whatever it is; the gap is 0."""
        return self._metadata(session, version, self.record(session, version), None, 0.0, "ready_exit")

    def remove(self, session: str) -> None:
        """A session is removed."""
        self._records.pop(session, None)

    def ask_again(self) -> None:
        """Make the requests that ended with `SESSION_RESET` once more. Between two batches."""
        again, self._again = self._again, []
        self.generate(again)

    def generate(self, asked: Sequence[Generate]) -> None:
        """Have ``asked`` computed together, except for those that are answered or fail at once."""
        made: dict[int, tuple[Running, Sequence[Request]]] = {}
        scored: list[tuple[Generate, Prompt]] = []
        for each in asked:
            tape = self._built.tapes.get(each.session)
            if each.session and tape is None:
                self._fail(each.id, Failure("unknown_session", f"there is no session {each.session!r}"))
            elif tape is not None and self.refuses(each.session):
                self._fail(each.id, REBUILDING)
            elif tape is not None and not tape.live_records:
                self._fail(each.id, no_data(each.session))
            else:
                try:
                    prompt = self._prompts.prompt(each)
                    if each.scored:
                        check_nodes([*(earlier for _, earlier in scored), prompt], self._max_nodes)
                        scored.append((each, prompt))
                    else:
                        running, request = self._request(each, prompt, tape)
                        made[each.id] = running, (request,)
                except ValueError as error:
                    self._fail(each.id, failure_of(error))
        self._submit(made)
        self._unforked |= {each.id for each, _ in scored}
        # on the scheduler's thread: all forks of a session are then of one version
        if scored and not self._scheduler.run_between(partial(self._score, scored)):
            for each, _ in scored:
                if self._takes(each.id):
                    self._fail(each.id, STOPPING)
        for running, _ in made.values():
            if not running.asked.complete:
                self._emit(TokensCounted(running.asked.id, running.length))

    def _submit(self, made: Mapping[int, tuple[Running, Sequence[Request]]]) -> None:
        self._open |= made  # before submitting: the worker may finish first
        self._scheduler.submit_together([each for _, requests in made.values() for each in requests])

    def _request(self, asked: Generate, prompt: Prompt, tape: Tape | None) -> tuple[Running, Request]:
        """Raises ValueError for what cannot be asked or kept."""
        grammar = self._prompts.grammar(asked, prompt)
        stop = StopText(asked.stop if prompt.cuttable else ())
        nodes = 1 if prompt.labels is None else len(prompt.labels.nodes)
        text = Detokeniser(self._format.text)
        running = Running(asked, prompt, text, stop, grammar, len(prompt.tokens), left=nodes)
        return running, Request(
            RequestSpec(
                cls=PriorityClass.POOL if tape is None else PriorityClass.SESSION,
                session=asked.session or NAME,
                prompt=prompt.tokens,
                max_tokens=self._prompts.longest(asked, prompt),
                on_done=partial(self._done, running),
                tape=tape,
                open_prompt=None if tape else partial(self._built.engine.open_prompt, asked.salt),
                stop_ids=prompt.stop_ids,
                choices=prompt.choice_tokens,
                grammar=grammar.allowed if grammar else prompt.grammar,
                forced=grammar.forced if grammar else None,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                seed=None if asked.exact else (asked.seed or 0, asked.index),
                top_logprobs=asked.top_logprobs,
                complete=asked.complete,
                salt=asked.salt,
                tenant=asked.tenant,
                weight=asked.weight,
                trace_id=asked.trace_id,
                retention=PrefixRetention(
                    asked.retention_priority, round(asked.retention_seconds * 1e9), asked.tenant
                ),
                on_token=None if asked.exact else partial(self._on_token, running),
            )
        )

    def change(self, command: CancelGeneration | FinishPrompt | ExtendPrompt) -> None:
        """Carry out a command about a request; one that has ended is left alone."""
        if isinstance(command, CancelGeneration) and self._takes(command.id):
            self._fail(command.id, CANCELLED)
        if (found := self._open.get(command.id)) is None:
            return
        running, requests = found
        if isinstance(command, CancelGeneration):
            self._cancel(requests)
            return
        (request,) = requests
        if isinstance(command, FinishPrompt):
            self._scheduler.finish(request.id)
            return
        if running.failure is not None:  # it is being given up
            return
        whole = command.replace or not running.length
        before = 0 if whole else running.length
        try:
            tokens, length = self._prompts.extended(running.asked, command.text, before)
        except ValueError as error:
            running.give_up(failure_of(error))
            self._scheduler.cancel(request.id)
            return
        running.extend(length)
        (self._scheduler.replace if whole else self._scheduler.extend)(request.id, tokens)
        self._emit(TokensCounted(command.id, length))

    def count(self, command: CountTokens) -> None:
        """Emit how many tokens a prompt has."""
        number, asked = command.id, command.request
        try:
            tokens = len(self._prompts.prompt(asked).tokens)
        except ValueError as error:
            self._fail(number, failure_of(error))
            return
        tape = self._built.tapes.get(asked.session)
        if tape is not None:
            tokens += len(self._built.prefixes.newest(asked.session)) + tape.live_tokens
        self._emit(TokensCounted(number, tokens))

    # On the scheduler's thread.

    def _score(self, scored: Sequence[tuple[Generate, Prompt]]) -> None:
        """Have the choices of ``scored`` scored, once their sessions are in the pool."""
        ready = list[tuple[Generate, Prompt]]()
        for each in scored:
            tape = self._built.tapes.get(each[0].session)
            if tape is None or tape.resident:
                ready.append(each)
            else:
                self._scheduler.when_resident(tape, partial(self._fork, [each]))
        self._fork(ready)

    def _fork(self, scored: Sequence[tuple[Generate, Prompt]]) -> None:
        """Submit the choices of ``scored``, each node of their trees on a fork of its own."""
        made = {}
        for asked, prompt in scored:
            if not self._takes(asked.id):
                continue
            try:
                made[asked.id] = self._forked(asked, prompt)
            except NotResident:
                self._fail(asked.id, NOT_RESIDENT)
            except ValueError as error:
                self._fail(asked.id, failure_of(error))
        self._submit(made)

    def _takes(self, number: int) -> bool:
        """Whether the request waited for its forks, and the caller has it now. Any thread."""
        try:
            self._unforked.remove(number)
        except KeyError:
            return False
        return True

    def _forked(self, asked: Generate, prompt: Prompt) -> tuple[Running, Sequence[Request]]:
        """Raises ValueError for what cannot be asked, and NotResident."""
        tape = self._built.tapes.get(asked.session)
        if asked.session and tape is None:
            raise ValueError(f"session {asked.session!r} was removed meanwhile")
        assert prompt.labels is not None
        running, whole = self._request(asked, prompt, tape)

        def request(path: Tokens, choices: Tokens) -> Request:
            return Request(
                replace(
                    whole.spec,
                    prompt=[*prompt.tokens, *path],
                    choices=choices,
                    top_logprobs=0,
                    tape=None,
                    reader=None if tape is None else tape.fork(),
                    on_token=None,
                    on_done=partial(self._scored, running),
                )
            )

        return running, [request(*each) for each in prompt.labels.nodes.items()]

    def _scored(self, running: Running, request: Request) -> None:
        """One node of a tree is done: the answer, if it was the last. A node that fails ends the others."""
        asked, requests = running.asked, self._open[running.asked.id][1]
        if request.state is not State.FINISHED and running.failure is None:
            running.give_up(request.error or CANCELLED)
            self._cancel(requests)
        if running.end_one():
            if running.failure is None:
                self._send(running, request, "", ())
            return
        del self._open[asked.id]
        if running.failure is None:
            self._emit(self._scores(running, requests))
        elif running.failure is SESSION_RESET:
            self._again.append(asked)
        else:
            self._fail(asked.id, running.failure, *_spent(requests))

    def _scores(self, running: Running, requests: Sequence[Request]) -> Finished:
        asked, prompt, first = running.asked, running.prompt, requests[0]
        assert prompt.labels is not None
        assert prompt.choices is not None
        samples = [each.samples[0] for each in requests]
        logprobs = [
            [logit - sample.top1 + (sample.logprob or 0.0) for logit in sample.logits] for sample in samples
        ]
        scores = prompt.labels.scores(dict(zip(prompt.labels.nodes, logprobs, strict=True)))
        best, second = sorted(scores, reverse=True)[:2]
        choice = prompt.choices[scores.index(best)]
        record = self.record(asked.session, first.version) if asked.session else None
        judged = None
        if prompt.question is not None and prompt.labels.is_flat:
            judged = self._confidence.of(asked.session, prompt.question, samples[0].logits, choice)
        known = judged or self._confidence.uncalibrated(prompt.question)
        flag = UNREAD if self._format.terse is not None and not asked.session else ""
        gap = best - second
        return Finished(
            id=asked.id,
            text=choice,
            finish="stop",
            stop=None,
            prompt_tokens=_prompt_tokens(first),
            reused_tokens=first.cached_tokens,
            answer_tokens=sum(each.computed_tokens for each in requests[1:]) + len(requests),
            metadata=self._metadata(asked.session, first.version, record, choice, gap, known, flag),
            times=times_of(record) if record else None,
            scores=tuple(scores),
            passes=passes_of(first),
            engine_ns=_spent(requests)[1],
        )

    def _cancel(self, requests: Sequence[Request]) -> None:
        for each in requests:
            self._scheduler.cancel(each.id)

    def _on_token(self, running: Running, request: Request) -> bool:
        """As `_next`; a defect ends this answer and no other work of the batch."""
        try:
            return self._next(running, request)
        except Exception as error:
            trace = {"trace_id": running.asked.trace_id}
            log.exception("the text of a generation failed", extra=trace)
            running.give_up(Failure("engine", f"{type(error).__name__}: {error}"))
            return True

    def _next(self, running: Running, request: Request) -> bool:
        """The next token: send what it completes; true at a stop sequence and at the end of a grammar."""
        asked, sample = running.asked, request.samples[-1]
        if len(request.output) == 1:
            self._emit(Begun(asked.id, _prompt_tokens(request), request.cached_tokens))
            running.send(0)
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
        self._send(running, request, piece, logprobs)
        if running.stop.found is not None:
            return True
        return running.grammar is not None and running.grammar.complete(request.output)

    def _send(self, running: Running, request: Request, text: str, logprobs: tuple[Logprob, ...]) -> None:
        """Send what a stream shows, and a sign of life where nothing was sent for long."""
        asked = running.asked
        shows = asked.stream and bool(text or logprobs)
        if not shows and time.monotonic_ns() - running.sent_ns < self._sign_of_life_ns:
            return
        tokens = running.send(len(request.output))
        self._emit(Delta(asked.id, text, logprobs, tokens) if shows else Delta(asked.id, "", (), tokens))

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

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return token_bytes(self._format.tokenizer)

    def _done(self, running: Running, request: Request) -> None:
        asked = running.asked
        self._open.pop(asked.id, None)
        if request.error is SESSION_RESET and not (asked.stream and request.output):
            self._again.append(asked)
            return
        if request.state is not State.FINISHED or running.failure is not None:
            failure = running.failure or request.error or CANCELLED
            self._fail(asked.id, failure, *_spent([request]))
            return
        record = self.record(asked.session, request.version) if asked.session else None
        choice = request.chosen(running.prompt.choices)
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
                metadata=self._judged(running, request, choice, record),
                logprobs=tuple(running.logprobs),
                times=times_of(record) if record else None,
                passes=passes_of(request),
                engine_ns=request.engine_ns,
                stats=_stats(request) if asked.exact and not asked.session else None,
            )
        )

    def _show_rest(
        self, running: Running, request: Request, choice: str | None, record: TapeRecord | None
    ) -> None:
        """What was held back, or a text that comes in one piece."""
        prompt = running.prompt
        if prompt.whole:
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
            self._emit(Delta(running.asked.id, rest, tokens=running.send(len(request.output))))

    def _judged(
        self, running: Running, request: Request, choice: str | None, record: TapeRecord | None
    ) -> ReplyMetadata:
        session, question, judged = running.asked.session, running.prompt.question, None
        sample = request.samples[0]
        if question is not None:
            judged = self._confidence.of(session, question, sample.logits, choice)
        known = judged or self._confidence.uncalibrated(question)
        return self._metadata(session, request.version, record, choice, sample.gap, known)

    def _metadata(
        self,
        session: str,
        version: int,
        record: TapeRecord | None,
        choice: str | None,
        gap: float,
        known: Judged | str,
        flag: str = "",
    ) -> ReplyMetadata:
        """What is known of an answer read from ``version``, with one more ``flag``; the gateway adds ages.

        ``known``: its confidence, or why there is none.
        """
        judged = None if isinstance(known, str) else known
        flags: dict[Flag, bool] = {
            "warm_up": bool(session) and self._rebuilding(session),
            "untrained": self._built.loaded.untrained,
            "replay": record is not None and times_of(record).replay,
            "rounded": record is not None and record.rounded,
            **lacking(record),
            "abstained": judged is not None and judged.abstained,
        }
        return ReplyMetadata(
            session=session or None,
            data_version=version if session else None,
            choice=choice,
            probability=judged.probability if judged else None,
            choice_set=judged.choice_set if judged else None,
            uncalibrated=known if isinstance(known, str) else None,
            act=judged.act if judged else None,
            abstain_reason=judged.abstain_reason if judged else None,
            logit_gap=gap,
            untrained=self._built.loaded.untrained,
            model=self._built.loaded.name,
            flags=(*(name for name, is_set in flags.items() if is_set), *([flag] if flag else [])),
        )

    def _fail(self, number: int, failure: Failure, tokens: int = 0, engine_ns: int = 0) -> None:
        self._emit(failed(number, failure, tokens, engine_ns))


def check_nodes(prompts: Sequence[Prompt], most: int) -> None:
    """Raise TooLong where the choices of ``prompts`` part in more than ``most`` places.

    Each is a fork or a prompt of its own.
    """
    nodes = sum(len(each.labels.nodes) for each in prompts if each.labels is not None)
    if nodes > most:
        raise TooLong(f"the choices of all questions part in {nodes} places, at most {most}")


def no_data(session: str) -> Failure:
    """Why a session whose window is empty is not asked: the model would answer from its prefix alone."""
    return Failure("no_data", f"session {session} has read no bar yet: ask when its first one has closed")


def failed(number: int, failure: Failure, tokens: int = 0, engine_ns: int = 0) -> Failed:
    """The event that ends the command of this number; ``tokens``: computed for it, in ``engine_ns``."""
    return Failed(number, code_of(failure.code), failure.message, tokens, engine_ns)


def _spent(requests: Sequence[Request]) -> tuple[int, int]:
    """Tokens that were computed for requests, and their part of the passes, ns."""
    return sum(each.computed_tokens for each in requests), sum(each.engine_ns for each in requests)


def failure_of(error: ValueError) -> Failure:
    """Why a prompt cannot be made."""
    return Failure("too_long" if isinstance(error, TooLong) else "bad_request", str(error))


def _version(request: Request) -> int:
    """The data version that a request reads; 0 before it is known."""
    return request.version or (0 if request.reader is None else request.reader.version)


def _prompt_tokens(request: Request) -> int:
    """The prompt as a client counts it: of a session with the tape before the question."""
    return len(request.prompt) + (request.cached_tokens if request.spec.open_prompt is None else 0)


def _stats(request: Request) -> PromptStats:
    first = request.first(LifecycleEvent.KV_ON_GPU)
    assert first is not None  # already answered
    return PromptStats(
        recomputed_tokens=request.recomputed_tokens,
        swapped_tokens=request.swapped_tokens,
        invalidated_tokens=request.total_tokens_invalidated,
        ttft_ns=first - request.last_chunk_ns,
        waits=dict(request.waits),
    )


def _finish(running: Running, request: Request) -> Finish:
    if running.stop.found is not None:
        return "stop_sequence"
    grammar, output = running.grammar, request.output
    if output[-1] in running.prompt.stop_ids:
        return "stop"
    if grammar is not None:
        return "stop" if grammar.complete(output) else "length"
    return "stop" if running.prompt.max_tokens == len(output) else "length"
