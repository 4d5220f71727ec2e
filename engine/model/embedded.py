"""The models that need no download: the tape model of this package, and a tiny random Llama.

The random one is **untrained** and takes any question; every output says so. It is built locally in seconds,
always equal. Its tokenizer needs no training: numbers of one to three digits and the words of a list are
single tokens, and everything else falls back to bytes.
"""

import json
from itertools import product
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from support.directories import built_once, cache_home

VOCABULARY = 2048
SHAPE = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "vocabulary": VOCABULARY, "seed": 0}
"""Arguments of `build_model` for the untrained model."""
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# Llama 3's pre-tokenizer: numbers in groups of three digits from the left
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = """
a about above according all an analyst and answer answers any are as at average bar bars been before
below bid block breakout by candle close closed closes column columns comma compared consolidation
current currently data day decimal detected digits direction do does down drawdown each event every exact
exactly exchange fall falling field fields first five flat for from gap given has have high higher
highest hour how if in increasing interval is it its last latest less line lines low lower lowest made
market minute moving more most narrow new newest no number of oldest on one only open or order over context
pattern phase prefix price prices pullback question range reached recent reply rise rising second
sequence session sideways since size tape ten than that the there these this three time to trade trades
trend twenty two type up value volatility volume was what whether which with within word yes you your
HIGH LOW UP DOWN YES NO Is Does Has What The Answer Each Reply You Question Time Open High Low Close
Volume Here Did
"""
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of exactly ``size`` tokens, with three-digit number groups as in Llama 3."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [PAD, BOS, END, *_ROLES, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"{n:0{width}d}" for width in (2, 3) for n in range(10**width)]
    tokens += [form for word in _WORDS.split() for form in (word, f"Ġ{word}") if form not in tokens]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    filler = ("".join(characters) for width in (3, 4) for characters in product("etaoinshrdlu", repeat=width))
    while len(vocabulary) < size:
        vocabulary.setdefault(next(filler), len(vocabulary))
    if len(vocabulary) != size:
        raise ValueError(f"the embedded vocabulary needs {len(vocabulary)} tokens, but size is {size}")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(_ROLES),
        chat_template=_TEMPLATE,
    )


def build_model(
    *, hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int, seed: int
) -> LlamaForCausalLM:
    """A random Llama in fp32. Initial weights are wider than usual, so answers depend on the context."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        foretick_untrained=True,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                std = 1.0 if "embed" in name else 2.0 / parameter.shape[1] ** 0.5
                parameter.normal_(0.0, std, generator=generator)
    return model


def embedded_directory(cache: Path | None = None, **changes: int) -> Path:
    """The directory of the model in ``cache`` (`support.directories`), built on first use.

    ``changes`` to `SHAPE` build another model.
    """
    shape = SHAPE | changes
    name = "untrained-llama-v2-" + "-".join(str(value) for value in shape.values())

    def build(directory: Path) -> None:
        build_model(**shape).save_pretrained(directory)
        build_tokenizer(shape["vocabulary"]).save_pretrained(directory)
        (directory / "README.md").write_text(f"Untrained model, built by Foretick: {json.dumps(shape)}\n")

    return built_once((cache or cache_home()) / name, build)
