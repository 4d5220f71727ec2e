"""Text of generated tokens: incremental decoding, stop sequences, and text that is constrained, against
plain references.
"""

import json
import random
import re
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.model.chat_format import PromptFormat
from engine.model.constrained import (
    MAX_SCHEMA_BYTES,
    BadSchema,
    OneOf,
    TextGrammar,
    choice_parts,
    schema_parts,
)
from engine.model.detokenise import Detokeniser, StopText
from engine.model.embedded import build_tokenizer
from engine.model.vocabulary import Vocabulary, token_bytes

TOKENIZER = build_tokenizer()
FORMAT = PromptFormat.of(TOKENIZER)
BYTES = token_bytes(TOKENIZER)
VOCABULARY = Vocabulary(BYTES)
END = TOKENIZER.eos_token_id
TEXTS = st.text(max_size=40) | st.text("aé€😀 \n", max_size=40)


@given(TEXTS, st.data())
def test_pieces_are_the_text_of_all_tokens_and_no_piece_has_half_a_character(text, data) -> None:
    tokens = FORMAT.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    detokeniser, pieces = Detokeniser(FORMAT.text), []
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        pieces.append(detokeniser.add(tokens[start:stop]))
    assert "".join(pieces) + detokeniser.rest() == FORMAT.text(tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_tokens_at_random_lose_nothing(tokens: list[int]) -> None:
    detokeniser = Detokeniser(FORMAT.text)
    text = "".join([detokeniser.add([token]) for token in tokens]) + detokeniser.rest()
    assert text == FORMAT.text(tokens)


def metaspace(**special: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of words that puts a space before a text, with special tokens of these properties."""
    words = [*"▁abc é\n", "▁a", "ab", "<unk>"]
    ids = {word: n for n, word in enumerate(words)}
    plain = Tokenizer(models.BPE(ids, [("▁", "a"), ("a", "b")], unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    plain.add_special_tokens([AddedToken(name, **special) for name in ("<s>", "<s>x", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")


TOKENIZERS = {
    "bytes": TOKENIZER,
    "spaces before": metaspace(normalized=False),
    "takes spaces": metaspace(normalized=False, lstrip=True),
    "takes spaces behind": metaspace(normalized=False, rstrip=True),
    "whole words": metaspace(normalized=False, single_word=True),
    "normalised": metaspace(normalized=True),
}
MESSAGES = st.text("abcé \n<s>x", max_size=12)
MARKS = st.sampled_from(["<s>", "</s>", "<s>x", "<|user|>", "<|end|>", "<|assistant|>"])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.lists(st.one_of(MARKS, MESSAGES), max_size=12).map("".join), st.integers(1, 12))
def test_parts_of_a_text_have_the_tokens_of_the_text(name: str, text: str, least: int) -> None:
    format_ = PromptFormat(TOKENIZERS[name], "", "", "")
    parts = format_.parts(text, least)
    assert "".join(parts) == text
    assert all(parts)
    assert [token for part in parts for token in format_.encode(part)] == format_.encode(text)


def test_a_long_message_is_the_same_part_whatever_else_is_said() -> None:
    instructions = "rise or fall? " * 30
    chats = ("up?",), ("down?",), ("up?", "no", "why?" * 100)
    roles = ("user", "assistant", "user")
    found = [
        FORMAT.parts(FORMAT.chat([("system", instructions), *zip(roles, said, strict=False)]), 256)
        for said in chats
    ]
    long = [{part for part in parts if len(part) >= 256} for parts in found]
    assert long[0] == long[1] < long[2]
    assert [len(parts) for parts in long] == [1, 1, 2]
    assert instructions.strip() in next(iter(long[0]))


def test_an_unfinished_character_comes_at_the_end() -> None:
    detokeniser = Detokeniser(FORMAT.text)
    begun = FORMAT.encode("😀")[:2]
    assert detokeniser.add(begun) == ""
    assert detokeniser.rest() == FORMAT.text(begun)


@given(st.lists(st.text("abc", max_size=4), max_size=8), st.lists(st.text("abc", max_size=4), max_size=3))
def test_a_text_is_cut_before_the_first_stop_wherever_the_pieces_are_cut(pieces, stops) -> None:
    text, cut = "".join(pieces), StopText(stops)
    shown = ""
    for piece in pieces:
        shown += cut.add(piece)
        # of a sequence that ended inside earlier pieces nothing is shown
        assert not any(stop and stop in shown for stop in stops)
    shown += cut.rest()
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop and stop in text}
    if not ends:
        assert (shown, cut.found) == (text, None)
        return
    assert cut.found in ends
    assert text.startswith(shown + cut.found)


def test_of_two_stops_in_one_piece_the_first_and_longest_counts() -> None:
    cut = StopText(["cd", "b", "bc"])
    assert (cut.add("abcd"), cut.found) == ("a", "bc")
    assert (cut.add("more"), cut.rest()) == ("", "")


def test_the_bytes_of_every_token_are_those_it_writes() -> None:
    for token, written in BYTES.items():
        assert written.decode(errors="replace") == FORMAT.text([token])
    assert TOKENIZER.eos_token_id not in BYTES


def test_bytes_of_a_tokenizer_of_pieces() -> None:
    class Pieces:
        all_special_ids = (0,)
        added_tokens_decoder: ClassVar[dict[int, str]] = {}

        def get_vocab(self) -> dict[str, int]:
            return {"<s>": 0, "▁up": 1, "<0x0A>": 2, "é": 3}

    assert token_bytes(Pieces()) == {1: b" up", 2: b"\n", 3: "é".encode()}


def written_by(grammar: TextGrammar, seed: int, most: int = 80) -> str:
    """A text of random allowed tokens."""
    rng, output = random.Random(seed), []
    while not grammar.complete(output) and len(output) < most:
        output.append(rng.choice(grammar.allowed(output, most - len(output))))
        if output[-1] == END:
            return FORMAT.text(output[:-1])
    return FORMAT.text(output)


SCALARS = st.sampled_from(
    [
        ({"enum": ["UP", "DOWN", "É"]}, lambda value: value in ("UP", "DOWN", "É")),
        ({"enum": [1, "1", None]}, lambda value: value in (1, "1", None)),
        ({"const": "x"}, lambda value: value == "x"),
        ({"type": "boolean"}, lambda value: isinstance(value, bool)),
        ({"type": "null", "title": "none"}, lambda value: value is None),
        ({"type": "number"}, lambda value: isinstance(value, int | float)),
        ({"type": "integer"}, lambda value: isinstance(value, int)),
    ]
)


@given(st.dictionaries(st.text('ab"é ', min_size=1, max_size=4), SCALARS, max_size=4), st.integers(0, 9))
def test_json_of_a_schema_has_its_properties_in_order(properties, seed) -> None:
    schema = {
        "type": "object",
        "properties": {name: each for name, (each, _) in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    grammar = TextGrammar(schema_parts(schema), VOCABULARY, frozenset({END}))
    found = json.loads(written_by(grammar, seed))
    assert list(found) == list(properties)
    assert all(check(found[name]) for name, (_, check) in properties.items())


@given(st.integers(0, 30))
def test_a_number_alone_ends_by_itself(seed: int) -> None:
    grammar = TextGrammar(schema_parts({"type": "number"}), VOCABULARY, frozenset({END}))
    text = written_by(grammar, seed)
    assert re.fullmatch(r"-?(0|[1-9]\d{0,8})(\.\d{1,9})?", text), text


GRAMMARS = st.sampled_from(
    [
        choice_parts(["up", "upwards", "down"]),
        choice_parts(["up and away"]),
        schema_parts({"type": "object", "properties": {"trend": {"enum": ["UP", "DOWN"]}}}),
        schema_parts({"type": "object", "properties": {"a": {"type": "number"}, "b": {"const": "É"}}}),
    ]
)


@given(GRAMMARS, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=9))
def test_a_grammar_that_is_asked_about_drafts_answers_as_if_it_had_not_been(parts, asked) -> None:
    """Walks of random permitted tokens, each cut anywhere, as drafts are. What is forced: by the bytes."""
    grammar = TextGrammar(parts, VOCABULARY, frozenset({END}))
    for seed, cut in asked:
        fresh, rng, output = TextGrammar(parts, VOCABULARY, frozenset({END})), random.Random(seed % 3), []
        while len(output) < cut and not fresh.complete(output):
            output.append(rng.choice(fresh.allowed(output, 99)))
            if output[-1] == END:
                output.pop()
                break
        allowed = fresh.allowed(output, 99)
        assert grammar.allowed(output, 99) == allowed
        texts = sorted((BYTES.get(token, b""), token) for token in allowed)
        chain = END not in allowed and all(texts[-1][0].startswith(text) for text, _ in texts)
        assert grammar.forced(output) == (texts[-1][1] if chain else None)


def test_a_choice_may_begin_another() -> None:
    grammar = TextGrammar(choice_parts(["up", "upwards", "down"]), VOCABULARY, frozenset({END}))
    assert {written_by(grammar, seed) for seed in range(60)} == {"up", "upwards", "down"}
    up = FORMAT.encode("up")
    assert not grammar.complete(up)
    assert END in grammar.allowed(up, 5)
    assert grammar.complete(FORMAT.encode("down"))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("text", "must be an object"),
        ({}, "type None"),
        ({"type": "string"}, "type 'string'"),
        ({"type": "array", "items": {"type": "number"}}, "type 'array'"),
        ({"type": "number", "minimum": 0}, "minimum cannot be kept"),
        ({"type": ["number", "null"]}, "cannot be kept"),
        ({"enum": []}, "1 to 1024 values"),
        ({"enum": ["a"], "pattern": "a"}, "pattern cannot be kept"),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, "schema.properties.a"),
        ({"type": "object", "properties": [], "required": []}, "must be an object"),
        ({"type": "object", "required": ["b"]}, r"\['b'\]"),
        ({"anyOf": [{"type": "number"}]}, "cannot be kept"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused(schema, says) -> None:
    with pytest.raises(BadSchema, match=says):
        schema_parts(schema)


def test_choices_and_schemas_that_are_too_much() -> None:
    for choices in ((), ("a", ""), tuple(map(str, range(1025)))):
        with pytest.raises(BadSchema, match="choices"):
            choice_parts(choices)
    wide = {f"p{n}": {"type": "number"} for n in range(200)}
    with pytest.raises(BadSchema, match="256 parts"):
        schema_parts({"type": "object", "properties": wide})
    deep: dict[str, object] = {"type": "number"}
    for _ in range(2000):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(BadSchema, match="deeply"):
        schema_parts(deep)
    with pytest.raises(BadSchema, match="every byte"):
        TextGrammar(choice_parts(["a"]), Vocabulary({1: b"ab"}), frozenset({END}))


def test_a_schema_of_constants_is_one_text() -> None:
    constants = {f"p{n}": {"const": n} for n in range(300)}
    (one,) = schema_parts({"type": "object", "properties": constants})
    assert isinstance(one, OneOf)
    assert json.loads(one.texts[0]) == {f"p{n}": n for n in range(300)}


def test_a_long_schema_is_refused_before_it_is_read(monkeypatch) -> None:
    monkeypatch.setattr("engine.model.constrained._parts", lambda *_: pytest.fail("it is read"))
    long = "a" * MAX_SCHEMA_BYTES
    for schema in ({"enum": [long]}, {"type": "object", "properties": {long: {"type": "number"}}}):
        with pytest.raises(BadSchema, match="16384"):
            schema_parts(schema)


def test_a_chat_is_rendered_by_the_template_or_as_plain_text() -> None:
    turns = [("system", "Be brief."), ("user", "Up?"), ("assistant", "Yes"), ("user", "Sure?")]
    assert FORMAT.chat(turns) == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Up?<|end|><|assistant|>Yes<|end|>"
        "<|user|>Sure?<|end|><|assistant|>"
    )
    assert FORMAT.chat([("user", "Up?"), ("assistant", "I say")]).endswith("<|assistant|>I say")
    plain = build_tokenizer()
    plain.chat_template = None
    assert PromptFormat.of(plain).chat(turns[:2]) == "<|bos|>Be brief.\n\nUser: Up?\n\nAssistant:"
    strict = build_tokenizer()
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    )
    assert PromptFormat.of(strict).chat(turns[:2]) == "[user]Be brief.\n\nUp?"
    with pytest.raises(ValueError, match="at least one"):
        FORMAT.chat([])
