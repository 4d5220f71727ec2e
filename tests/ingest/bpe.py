"""Byte-level BPE tokenizers trained here, with the three ways of splitting numbers."""

import random
from functools import cache

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from ingest.tokens import Encode

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama3": _LLAMA3,
    "qwen": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


def _corpus() -> list[str]:
    source = random.Random(0)
    lines = [
        f"{source.uniform(1, 99999):.{source.randint(0, 5)}f},{source.uniform(1, 99999):.2f}"
        f",{source.randint(0, 10**9)}\n the market close: {source.uniform(1, 99):.2f} up.\n"
        for _ in range(1500)
    ]
    return lines + [f"{i:03d} {i:02d} {i} " for i in range(1000)] * 2


@cache
def make_encode(style: str, vocabulary: int) -> Encode:
    """The `encode` of a tokenizer trained with this style of number splitting."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERNS[style]), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode
