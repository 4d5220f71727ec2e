"""A GGUF file's tokenizer by transformers, and what that leaves out: the same text would be other tokens."""

from pathlib import Path
from typing import Any

_WHOLE = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
"""Splits whose words are looked up before any merge. They add a begin token unless the file says not."""
_DIGITS = frozenset({"smollm"})
"""Splits of single digits, which transformers takes for GPT-2's."""
_NORMAL, _CONTROL, _OWN = 1, 3, 4
"""Types of tokens; the last two are read whole."""


def tokenizer_of(file: Path, reader: Any, architecture: str) -> Any:
    """The tokenizer of ``file``, of one of `engine.model.gguf_settings.READ`.

    Raises ValueError for one that would read a text otherwise, in words that go on from the file's name.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS

    def field(name: str) -> Any:
        found = reader.fields.get(f"tokenizer.ggml.{name}")
        return None if found is None else found.contents()

    kind, split = field("model"), field("pre")
    qwen, pieces = architecture.startswith("qwen"), kind == "llama"
    known = split in (name for name in SPLITS if not qwen or SPLITS[name] == SPLITS["qwen2"])
    known |= not qwen and split in _DIGITS | {"gpt-2"}
    # those of Qwen and Gemma have a class of their own, which reads a directory in its own way
    if not (pieces and not qwen) and not (kind == "gpt2" and known and not architecture.startswith("gemma")):
        raise ValueError(f"has the tokenizer {kind!r}, split {split!r}")
    types = field("token_type") or [_NORMAL] * len(field("tokens"))
    scores = {score for score, type_ in zip(field("scores") or (), types, strict=False) if type_ == _NORMAL}
    if pieces and len(scores) < 2 and not architecture.startswith("gemma"):
        raise ValueError("has a tokenizer without scores")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, add_bos_token=split in _WHOLE)
    backend = tokenizer.backend_tokenizer
    if qwen and field("add_bos_token") is False:
        tokenizer.bos_token = None  # a file names one, with which no text of such a model begins
    if split in _WHOLE:
        backend.model.ignore_merges = True
    if split in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pieces and architecture == "llama" and field("add_space_prefix") is False:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    for token, (text, type_) in enumerate(zip(field("tokens"), types, strict=False)):
        whole = type_ in (_CONTROL, _OWN) and text.strip()
        if whole and tokenizer.encode(text, add_special_tokens=False) != [token]:
            raise ValueError(f"has the token {text!r}, cut into pieces")
    return tokenizer
