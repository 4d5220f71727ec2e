"""From what a request says to the tokens before its answer, and what the answer may be.

A chat without a session is rendered by the model's chat template. Special tokens spelled out in a message
count as such. A chat with a session asks its newest data version: the last message is the question, and the
earlier ones stand before it as text, in the ephemeral region. A plain text is the tokenizer's begin-of-text
token, if it has one, then the text. Each piece that is appended to it is encoded separately: the concatenated
tokens may differ from those of the whole text.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import msgspec

from daemon.api.generation import Generate, Turn
from daemon.engine.build import Built
from daemon.engine.label_tree import LabelTree
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
from engine.model.vocabulary import Vocabulary, token_bytes
from flash.question import Grammar, PreparedQuestion, Question
from flash.registry import check_choices
from metrics.store import MetricStore
from scheduler.interfaces import Limits

LONG = 256
"""Characters of a message from which on it is tokenised by itself."""
KEPT_TOKENS = 1024
"""Longest question about a session that is kept as tokens: one behind a long chat does not come again."""
ROLES = {"system": "Instructions", "user": "User", "assistant": "Assistant"}
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_Asked = tuple[str, bool, bool, Question]
"""A question: its salt, whether it is scored and stands, and itself."""


class PromptCaches(NamedTuple):
    """How many are kept of rendered chats, tokenised texts, schemas, and questions of sessions as tokens
    (*Attention Once* section 3.10.3).
    """

    chats: int = 256
    texts: int = 64
    schemas: int = 16
    questions: int = 256


class TooLong(ValueError):
    """A prompt that is longer than a limit, or has more characters than its tokens could have."""


@dataclass(frozen=True)
class Prompt:
    """The tokens before an answer, and what is known of it."""

    tokens: Sequence[int]
    stop_ids: frozenset[int]
    choices: tuple[str, ...] | None = None
    """The answer is one of these, told by its first token (`choice_tokens`)."""
    choice_tokens: tuple[int, ...] | None = None
    max_tokens: int | None = None
    """Longest answer; None: no limit."""
    prepared: PreparedQuestion | None = None
    """Of a session: the question."""
    question: Question | None = None
    whole: bool = False
    """The text comes in one piece: of an ask or a prompt, a standing question, a choice, a terse model."""
    cuttable: bool = True
    """It is free text, so a stop sequence and the client's own limit may cut it. A part of a choice or of a
    number would be another answer.
    """
    written: Mapping[str, str] = field(default_factory=dict)
    """JSON for each choice, where the answer is a choice and is to come as JSON."""
    labels: LabelTree | None = None
    """The choices as wholes, where they are scored."""

    @property
    def grammar(self) -> Grammar | None:
        """What the answer to the question may consist of; None: anything."""
        return None if self.prepared is None else self.prepared.grammar


class PromptBuilder:
    """Makes prompts and grammars of requests. Any thread."""

    def __init__(
        self, built: Built, limits: Limits, store: MetricStore, kept: PromptCaches | None = None
    ) -> None:
        kept = kept or PromptCaches()
        self._built, self._format, self._limits = built, built.prompt, limits

        def counted(cache: str) -> Callable[[str], None]:
            return lambda outcome: store.inc("foretick_api_cache_total", cache=cache, outcome=outcome)

        self._rendered: Lru[tuple[str, tuple[Turn, ...]], str] = Lru(kept.chats, counted("render"))
        self._tokenised: Lru[tuple[str, bool, str], list[int]] = Lru(kept.texts, counted("tokenise"))
        self._schemas: Lru[tuple[str, bytes], tuple[Part, ...]] = Lru(kept.schemas)
        self._asked: Lru[_Asked, tuple[PreparedQuestion, LabelTree | None]] = Lru(
            kept.questions, counted("question")
        )

    def prompt(self, asked: Generate) -> Prompt:
        """The prompt of a request. Raises ValueError for what cannot be asked."""
        if asked.scored:
            asked = self._without_special(asked)
        if asked.session:
            return self._question(asked)
        if asked.scored:
            return self._scored(asked)
        tokens = asked.tokens or self._tokens(asked)
        if not tokens and asked.complete:
            raise ValueError("the prompt is empty")
        size = len(self._format.tokenizer)
        if any(not 0 <= token < size for token in asked.tokens):
            raise ValueError(f"the prompt has a token that is not of the model's {size}")
        if not asked.exact:
            cuttable = not asked.choices and asked.schema is None
            return Prompt(tokens, self._format.stop_ids, cuttable=cuttable)
        return Prompt(
            tokens,
            self._format.stop_ids,
            choices=asked.choices or None,
            choice_tokens=self._choice_tokens(asked.choices),
            max_tokens=1 if asked.choices else asked.max_tokens,
            whole=True,
        )

    def extended(self, asked: Generate, text: str, length: int) -> tuple[list[int], int]:
        """Tokens of a piece of text that goes behind ``length`` tokens of a prompt, and its length then.

        Raises TooLong.
        """
        self._check_characters(asked, len(text))
        tokens = self._format.encode(text) if length else self._format.plain(text)
        self._check_length(asked, length + len(tokens))
        return tokens, length + len(tokens)

    def longest(self, asked: Generate, prompt: Prompt) -> int:
        """The longest answer. Raises TooLong for a prompt without a session that leaves no room for it."""
        most = prompt.max_tokens
        if not asked.session:
            self._check_length(asked, len(prompt.tokens))
        if most is not None and (asked.exact or not prompt.cuttable):
            return most
        longest = min(asked.max_tokens or self._limits.max_new_tokens, self._limits.max_new_tokens)
        if not asked.session:
            longest = min(longest, self._built.engine.frame_limit - len(prompt.tokens))
        return max(1, longest if most is None else min(longest, most))

    def grammar(self, asked: Generate, prompt: Prompt) -> TextGrammar | None:
        """What the text must be: JSON of a schema, or one of several choices. Raises ValueError."""
        # a choice of `choice_tokens` is known by its first token
        if prompt.written or prompt.choice_tokens or (asked.schema is None and not asked.choices):
            return None
        parts = self._schema_parts(asked) if asked.schema is not None else choice_parts(asked.choices)
        return TextGrammar(parts, self._vocabulary, self._format.stop_ids)

    # Of a session.

    def _question(self, asked: Generate) -> Prompt:
        """The last turn as a question of the session, after the earlier ones.

        A standing question stands alone, and so does a terse model's, which reads nothing else.
        """
        if not asked.turns or asked.turns[-1].role != "user":
            raise ValueError("a session is asked by the last message, which must be the user's")
        question, written = self._worded(asked)
        self._check_characters(asked, len(question.text))
        prepared, labels = self._prepared(asked, question)
        if asked.penalty and not question.choices:
            raise ValueError(f"{asked.penalty} is not supported, unless the answer is one of choices")
        terse, is_json = self._format.terse is not None, asked.schema is not None and not written
        free = not (terse or question.choices or question.answer == "number" or asked.schema is not None)
        whole = asked.exact or not free or (asked.question is not None and not is_json)
        return Prompt(
            prepared.prompt_tokens,
            prepared.stop_ids,
            choices=question.choices,
            choice_tokens=labels.nodes[()] if labels is not None else prepared.choice_tokens,
            max_tokens=prepared.answer_tokens(question) if whole else None,
            prepared=prepared,
            question=question,
            whole=whole,
            cuttable=free,
            written=written,
            labels=labels,
        )

    def _prepared(self, asked: Generate, question: Question) -> tuple[PreparedQuestion, LabelTree | None]:
        """The question as tokens and, if it is scored, its labels: clients ask the same of each version.

        They are kept up to `KEPT_TOKENS`. Raises ValueError.
        """
        key = asked.salt, asked.scored, asked.question is not None, question
        found = self._asked.get(key, asked.tenant)
        if found is None:
            prepared = self._built.prepare(question)
            if asked.scored:
                found = prepared, self._labels(asked, prepared)
            else:
                check_choices(question, prepared)
                found = prepared, None
            if len(prepared.prompt_tokens) <= KEPT_TOKENS:
                self._asked.put(key, found, asked.tenant)
        return found

    def _labels(self, asked: Generate, prepared: PreparedQuestion) -> LabelTree:
        """Those of a standing question, and of a terse model, are first tokens; others are scored whole."""
        if asked.question is None and self._format.terse is None:
            return self._whole(asked.choices)
        return LabelTree.of([(token,) for token in prepared.choice_tokens or ()])

    def _worded(self, asked: Generate) -> tuple[Question, Mapping[str, str]]:
        """The question that is asked; if its choice is to come as JSON, the JSON for each."""
        standing, terse = asked.question, self._format.terse is not None
        if standing is not None and asked.schema is None:
            return standing, {}
        text = (asked.meant or asked.turns[-1].text) if terse else transcript(asked.turns)
        most = asked.max_tokens or self._limits.max_new_tokens
        pack = standing.pack if standing else ""
        asks = standing.text if standing else text
        question = Question("ask", asks, asked.choices or None, most, pack=pack)
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

    # Without one.

    def _scored(self, asked: Generate) -> Prompt:
        """Of choices that are scored; a terse model spells words, of which it knows none."""
        if self._format.terse is not None:
            text = "\n".join(each.text for each in asked.turns) + "\n"
            asked = msgspec.structs.replace(asked, turns=(), text=text)
        labels = self._whole(asked.choices)
        return Prompt(
            self._tokens(asked),
            self._format.stop_ids,
            choices=asked.choices,
            choice_tokens=labels.nodes[()],
            max_tokens=1,
            whole=True,
            cuttable=False,
            labels=labels,
        )

    def _whole(self, choices: Sequence[str]) -> LabelTree:
        """Raises ValueError for an empty choice, and for two that are one for this model."""
        texts = [self._format.without_special(each) for each in choices]
        if not all(map(str.strip, texts)):
            raise ValueError("an empty choice")
        before = self._format.answer_prefix
        return LabelTree.of([tuple(self._format.encode(before + text)) for text in texts])

    def _without_special(self, asked: Generate) -> Generate:
        """What is asked is about somebody else's text: its special tokens are blanks."""
        turns = (Turn(each.role, self._format.without_special(each.text)) for each in asked.turns)
        return msgspec.structs.replace(asked, turns=tuple(turns))

    def _tokens(self, asked: Generate) -> list[int]:
        """Of a text, or of a chat, whose long messages come again with others.

        What is made for a prompt is kept, unless the prompt has too many tokens.
        """
        self._check_characters(asked, len(asked.text) + sum(len(each.text) for each in asked.turns))
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
            turns = [(each.role, each.text) for each in asked.turns]
            text = made(self._rendered, (asked.salt, asked.turns), partial(self._format.chat, turns))
            encode, parts = self._format.encode, self._format.parts(text, LONG)
        tokens: list[int] = []
        for part in parts:
            found = made(self._tokenised, (asked.salt, is_chat, part), partial(encode, part))
            tokens += found
        if len(tokens) <= self._most_tokens:
            for put in keep:
                put()
        return tokens

    def _choice_tokens(self, choices: tuple[str, ...]) -> tuple[int, ...] | None:
        """First token of each choice as written, since it directly follows the prompt. Raises ValueError."""
        if not choices:
            return None
        if not all(choices):
            raise ValueError("an empty choice")
        tokens = tuple(self._format.encode(choice)[0] for choice in choices)
        check_choices(Question("prompt", "prompt", choices), PreparedQuestion((), tokens, frozenset()))
        return tokens

    @cached_property
    def _most_tokens(self) -> int:
        """Of a prompt without a session."""
        return min(self._built.engine.frame_limit - 1, self._limits.max_prompt_tokens)

    def _check_characters(self, asked: Generate, characters: int) -> None:
        """Before a text is tokenised: raise TooLong for one that has too many tokens however it is cut."""
        limit = self._built.engine.frame_limit if asked.exact else self._limits.max_prompt_tokens
        if characters > limit * self._format.longest_token:
            raise TooLong(f"the prompt has {characters} characters; the limit is {limit} tokens")

    def _check_length(self, asked: Generate, tokens: int) -> None:
        """Raise TooLong for a prompt without a session of that many tokens.

        Of an exact one the positions count; the scheduler holds it to the other limits.
        """
        limit = self._built.engine.frame_limit
        needed = tokens + (1 if asked.choices else asked.max_tokens or 0)
        if asked.exact and needed > limit:
            raise TooLong(f"prompt and answer take up to {needed} positions, but the limit is {limit}")
        if not asked.exact and tokens > self._most_tokens:
            raise TooLong(f"the prompt has {tokens} tokens, the limit is {self._most_tokens}")

    def _schema_parts(self, asked: Generate) -> tuple[Part, ...]:
        """Made once for all answers to one request."""
        key = asked.salt, schema_json(asked.schema)
        return self._schemas.made(key, lambda: schema_parts(asked.schema), asked.tenant)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(token_bytes(self._format.tokenizer))


def transcript(turns: Sequence[Turn]) -> str:
    """The question of the last turn, after the turns before it, as text."""
    earlier = [f"{ROLES[each.role]}: {each.text}\n" for each in turns[:-1]]
    return "".join(["Earlier in this conversation:\n", *earlier, "\n"] if earlier else []) + turns[-1].text
