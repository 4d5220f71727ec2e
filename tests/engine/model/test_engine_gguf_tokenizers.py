"""Tokenizers of GGUF files give the tokens of the one that was written, or are refused."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from engine.model.architectures import ModelError
from engine.model.gguf import import_gguf
from engine.model.loading import load_model
from engine.model.vocabulary import check_vocabulary
from tests.engine.oracle import random_weights, tiny_config
from tests.kit.gguf_files import write_model

pytest.importorskip("gguf", reason="pip install gguf")

LEARNT = (
    "The market is calm, the market isn't calm. It's 12345.67 at 09:30;\n\n price  rose to 101 and\tfell.",
    " BTC-USDT é café ñandú naïve Ünïcode 日本語 price priced prices pricing unreachable CALM we'LL 'tis",
) * 3
TEXTS = (
    *("The market isn't calm", "price 1234567 12,345.67  9", "cafe\u0301 nai\u0308ve é", "日本語 🚀 emoji"),
    *(
        "line\n\n\nnext\r\n tab\t",
        "we'LL IT'S x = y+z; // a/b",
        "an unreachable word",
        "<|user|><think>x<|end|>",
    ),
    *("a<|end|>b", ""),
)
SPACES = ("  two  spaces   and    more  ", " lead", "<|end|> a  b")
CONTROL, OWN = ("<|begin|>", "<|user|>", "<|end|>"), ("<think>",)
WIDE = ("<|begin|>", "<｜user｜>", "<|end|>")
TEMPLATE = "{{ messages[0]['content'] }}<|end|>"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{CASED}*{CASED.replace('Lu', 'Ll').replace('Lt}', 'Lm}')}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{CASED}+{CASED.replace('Lu', 'Ll').replace('Lt}', 'Lm}')}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(
    split: str, *, whole: bool = False, nfc: bool = False, control: tuple[str, ...] = CONTROL
) -> Any:
    """A tokenizer as its tokenizer.json has it, with a word that no merge makes."""
    made = Tokenizer(BPE())
    first = pre_tokenizers.Split(Regex(split), "isolated") if split else pre_tokenizers.Digits(True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
    )
    made.normalizer = normalizers.NFC() if nfc else None
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LEARNT, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    state = json.loads(made.to_str())
    model = state["model"]
    model["vocab"].setdefault("Ġunreachable", len(model["vocab"]))
    model |= {
        "merges": [each for each in model["merges"] if "".join(each) != "Ġunreachable"],
        "ignore_merges": whole,
    }
    made = Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    made.add_tokens([AddedToken(text, normalized=False) for text in OWN])
    return made


def byte_fields(made: Any, split: str, control: tuple[str, ...] = CONTROL) -> dict[str, Any]:
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": split,
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if each in control else 4 if each in OWN else 1 for each in tokens],
        "ggml.merges": [" ".join(each) for each in json.loads(made.to_str())["model"]["merges"]],
        "ggml.bos_token_id": made.token_to_id(control[0]),
        "ggml.eos_token_id": made.token_to_id(control[2]),
        "ggml.eot_token_id": made.token_to_id(control[1]),
        "ggml.eom_token_id": made.token_to_id(OWN[0]),
        "ggml.padding_token_id": made.token_to_id(control[0]),
        "chat_template": TEMPLATE,
    }


def pieces(spaces: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fields of a SentencePiece model: control, byte, merged and single pieces, with falling scores."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(LEARNT, BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(made.to_str())["model"]
    learnt = [
        *dict.fromkeys("".join(each) for each in model["merges"]),
        *(c for c in model["vocab"] if len(c) == 1),
    ]
    first = ["<unk>", "<pad>", "<mask>", *CONTROL]
    own = [*OWN, *spaces]
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": [*first, *own, *(f"<0x{n:02X}>" for n in range(256)), *learnt],
        "ggml.token_type": [2, *[3] * (len(first) - 1), *[4] * len(own), *[6] * 256, *[1] * len(learnt)],
        "ggml.scores": [-1000.0] * (len(first) + len(own))
        + [0.0] * 256
        + [-float(n) for n in range(len(learnt))],
        **{
            "ggml.unknown_token_id": 0,
            "ggml.padding_token_id": 1,
            "ggml.bos_token_id": 3,
            "ggml.eos_token_id": 5,
        },
        "chat_template": TEMPLATE,
    }


def encode_pieces(fields: dict[str, Any], prefix: str) -> Callable[[str], list[int]]:
    """By brute force: of all neighbours that make a piece, those of the best score are joined, and so on.

    ``prefix``: a space goes before `none` of the parts between whole tokens, `all`, or the `first`.
    """
    ids = {text: n for n, text in enumerate(fields["ggml.tokens"])}
    scores, types = fields["ggml.scores"], fields["ggml.token_type"]
    whole = [text for text, token in ids.items() if types[token] in (3, 4) and text.strip()]
    cut = re.compile("(" + "|".join(map(re.escape, whole)) + ")")

    def of(text: str) -> list[int]:
        parts = list(text.replace(" ", "▁"))
        while found := [
            (scores[ids[a + b]], -n)
            for n, (a, b) in enumerate(pairwise(parts))
            if types[ids.get(a + b, 0)] == 1
        ]:
            at = -max(found)[1]
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        known = (
            [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()] for part in parts
        )
        return [token for each in known for token in each]

    def encode(text: str) -> list[int]:
        tokens: list[int] = []
        for n, part in enumerate(cut.split(text)):
            space = prefix == "all" or (prefix == "first" and n == 0 and part[:1] != " ")
            tokens += [ids[part]] if part in whole else of(" " * space + part) if part else []
        return tokens

    return encode


def imported(kind: str, fields: dict[str, Any], into: Path) -> Any:
    """The tokenizer of a tiny model's directory, after the file was imported, and what the daemon loads."""
    rope = {
        "rope_type": "default",
        "rope_theta": 5000.0,
        **({"partial_rotary_factor": 1.0} if kind == "phi3" else {}),
    }
    special = {"layer_types": None, "rope_parameters": None if kind.startswith("gemma") else rope}
    config = tiny_config(kind, layers=1, vocab_size=len(fields["ggml.tokens"]), **special)
    write_model(into / "model.gguf", random_weights(config), fields)
    import_gguf(into / "model.gguf", into / "out", "float32")
    found = AutoTokenizer.from_pretrained(into / "out", local_files_only=True)
    assert not check_vocabulary(found, len(fields["ggml.tokens"]))
    return found


@pytest.mark.parametrize(
    ("kind", "split", "written"),
    [
        ("llama", "llama-bpe", lambda: byte_level(LLAMA3, whole=True)),
        ("llama", "tekken", lambda: byte_level(TEKKEN, whole=True)),
        ("llama", "smollm", lambda: byte_level("")),
        ("qwen2", "qwen2", lambda: byte_level(QWEN2, nfc=True)),
        ("qwen3", "qwen2", lambda: byte_level(QWEN2, nfc=True)),
        ("phi3", "dbrx", lambda: byte_level(LLAMA3)),
    ],
)
def test_a_tokenizer_of_bytes_gives_the_same_tokens(
    kind: str, split: str, written: Callable[[], Any], tmp_path: Path
) -> None:
    made = written()
    begins = {"ggml.add_bos_token": False} if kind.startswith("qwen") else {}
    found = imported(kind, byte_fields(made, split) | begins, tmp_path)
    for text in (*TEXTS, *SPACES):
        expected = made.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False) == expected, text
        assert found.decode(expected) == made.decode(expected, skip_special_tokens=False)
    begin = [made.token_to_id(CONTROL[0])] if kind == "llama" and split != "smollm" else []
    assert found.encode("calm") == begin + made.encode("calm", add_special_tokens=False).ids
    assert found.bos_token == (None if kind.startswith("qwen") else CONTROL[0])
    assert found.chat_template == TEMPLATE
    ends = {made.token_to_id(text) for text in (*CONTROL[1:], *OWN)}
    assert load_model(tmp_path / "out", layers="torch").end_ids == ends


@pytest.mark.parametrize(
    ("kind", "more", "prefix"),
    [
        ("llama", {"ggml.add_bos_token": True}, "first"),
        ("llama", {"ggml.add_space_prefix": False}, "none"),
        ("phi3", {"ggml.add_bos_token": False}, "all"),
        ("gemma2", {"ggml.add_space_prefix": False}, "none"),
        ("gemma3_text", {"ggml.add_space_prefix": False}, "none"),
    ],
)
def test_a_tokenizer_of_pieces_gives_the_same_tokens(
    kind: str, more: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    fields = pieces() | more
    found, encode = imported(kind, fields, tmp_path), encode_pieces(fields, prefix)
    for text in (*TEXTS, *SPACES):
        assert found.encode(text, add_special_tokens=False) == encode(text), text
    assert found.encode("calm") == [3] * (kind != "phi3") + encode("calm")
    if prefix == "none":
        assert found.decode(encode(" lead")) == " lead"
    assert load_model(tmp_path / "out", layers="torch").end_ids == {5}


def test_the_spaces_of_gemma_are_pieces(tmp_path: Path) -> None:
    fields = pieces(("  ", "   "))
    found = imported("gemma3_text", fields, tmp_path)
    two, three = (fields["ggml.tokens"].index(" " * n) for n in (2, 3))
    assert found.encode("  ", add_special_tokens=False) == [two]
    assert three in found.encode("calm   9", add_special_tokens=False)


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("llama", lambda: byte_fields(byte_level(LLAMA3), "new"), "the tokenizer 'gpt2', split 'new'"),
        ("qwen2", lambda: byte_fields(byte_level(LLAMA3), "llama-bpe"), "'gpt2', split 'llama-bpe'"),
        ("qwen3", pieces, "tokenizer 'llama', split 'default'"),
        ("gemma2", lambda: byte_fields(byte_level(LLAMA3), "llama-bpe"), "'gpt2', split 'llama-bpe'"),
        (
            "llama",
            lambda: pieces() | {"ggml.scores": [-1000.0] * len(pieces()["ggml.tokens"])},
            "without scores",
        ),
        (
            "llama",
            lambda: byte_fields(byte_level(LLAMA3, control=WIDE), "llama-bpe", WIDE),
            "'<｜user｜>', cut into",
        ),
    ],
)
def test_a_tokenizer_that_would_read_a_text_otherwise_is_refused(
    kind: str, fields: Callable[[], dict[str, Any]], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"gguf has .*{why}.*original directory"):
        imported(kind, fields(), tmp_path)
