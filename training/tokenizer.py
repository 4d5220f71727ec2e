"""The tape model's tokenizer: numbers in groups of three digits, one token a question, bytes for the rest."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flash.question import EXACT_VALUE
from tapes.rules import RULES

VOCABULARY = 1472
PAD, BOS, END, ASK = "<|pad|>", "<|bos|>", "<|end|>", "<|ask|>"
NONE = "NONE"
"""The answer where a rule is undefined."""
QUESTIONS = (*(rule.name for rule in RULES), EXACT_VALUE.name)
AUXILIARY = 24
"""Tokens for the questions that only training asks."""
# numbers in groups of three digits from the left, as in Llama 3
_SPLIT = r"\p{N}{1,3}| ?\p{L}+|[^\p{L}\p{N}]"


def question_token(name: str) -> str:
    """The token that asks the question ``name``."""
    return f"<|{name}|>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `VOCABULARY` tokens."""
    questions, auxiliary = map(question_token, QUESTIONS), (f"<|aux{i}|>" for i in range(AUXILIARY))
    special = [PAD, BOS, END, ASK, *questions, *auxiliary]
    answers = dict.fromkeys([choice for rule in RULES for choice in rule.choices] + [NONE])
    words = ["reference", "Ġunit", "Ġvolume", "Ġpercent"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    numbers = [f"{n:0{width}d}" for width in (2, 3) for n in range(10**width)]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *numbers, *answers, *words]
    tokens += [f"<|spare{i}|>" for i in range(VOCABULARY - len(tokens))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != VOCABULARY:
        raise ValueError(f"the tape vocabulary has {len(vocabulary)} tokens instead of {VOCABULARY}")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[token for token in special if token not in (PAD, BOS, END)],
    )
