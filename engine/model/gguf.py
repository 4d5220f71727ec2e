"""GGUF files as model directories: transformers reads them, with the gguf package, once.

Weights are expanded to ``dtype``; the codes of quantised ones are kept beside them (`engine.model.kept`), for
layers that read codes. What would be left out of a file is refused by name:
transformers skips a tensor that it does not know. Fields that it skips too are read in
`engine.model.gguf_settings` and `engine.model.gguf_tokenizer`.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from engine.model.architectures import ModelError
from engine.model.gguf_settings import READ, TABLES, settings_of
from engine.model.gguf_tokenizer import tokenizer_of
from engine.model.kept import keep
from engine.model.plain import is_plain
from support.directories import built_once, cache_home

log = logging.getLogger(__name__)

_HEAD_BYTES = 1 << 20
"""Of a file, in the name of its directory."""
_ENDS = ("eos", "eot", "eom")
"""Fields of tokens that end an answer."""
_VERSION = 3
"""Of what is made of a file; another one is another directory."""


def gguf_directory(file: Path, dtype: str = "auto", cache: Path | None = None) -> Path:
    """The directory in ``cache`` (`support.directories`) that ``file`` was expanded into, made on first use.

    ``dtype``: of the weights; ``auto`` is bfloat16. Raises ModelError as `import_gguf`.
    """
    kind = "bfloat16" if dtype == "auto" else dtype
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
        stat = file.stat()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    digest = blake2b(f"{stat.st_size} {stat.st_mtime_ns} ".encode() + head, digest_size=6).hexdigest()
    target = (cache or cache_home()) / f"{file.stem}-{kind}-{digest}-v{_VERSION}"
    return built_once(target, partial(_expand, file, dtype=kind))


def import_gguf(file: Path, directory: Path, dtype: str = "bfloat16") -> str:
    """Write ``file`` as a model directory in ``dtype``; returns what it holds, in words.

    Raises ModelError when the gguf package is not installed, or for a file that is none, is damaged, or has
    what would be lost.
    """
    try:
        # imported here: a daemon without such files does not need it
        import gguf
    except ModuleNotFoundError as error:
        raise ModelError(f"{file} needs gguf: pip install gguf") from error
    try:
        reader = _opened(file, gguf.GGUFReader)
        known, settings, tokenizer = _checked(file, reader)
        model, names = _read(file, reader, getattr(torch, dtype), settings)
        ends = [reader.fields.get(f"tokenizer.ggml.{each}_token_id") for each in _ENDS]
        model.config.eos_token_id = sorted({int(each.contents()) for each in ends if each is not None})
        model.generation_config.eos_token_id = model.config.eos_token_id
    except ModelError:
        raise
    except Exception as error:  # of a damaged file the libraries raise whatever comes up, even a plain one
        raise ModelError(f"{file} cannot be read as GGUF: {error}") from error
    if not model.config.eos_token_id:
        raise ModelError(f"{file} names no token that ends an answer")
    try:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        kept = keep(reader, names, model, directory) if is_plain(model) else ""
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be expanded into {directory}: {error}") from error
    return f"{known}, expanded to {dtype}" + (f"; as codes for a CPU: {kept}" if kept else "")


def _opened(file: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(file)
    except Exception as error:  # whatever the package raises of bytes that are not there
        raise ModelError(
            f"{file} cannot be read as GGUF: it is none, damaged or cut short ({error})"
        ) from error


def _expand(file: Path, directory: Path, *, dtype: str) -> None:
    log.info("%s is expanded once, which takes a minute for a small model", file)
    log.info("%s: %s", file.name, import_gguf(file, directory, dtype))


def _checked(file: Path, reader: Any) -> tuple[str, dict[str, Any], Any]:
    """The architecture and kinds of tensors, what `settings_of` finds, and the tokenizer.

    ModelError for what would be left out.
    """
    named = reader.fields.get("general.architecture")
    architecture = "" if named is None else str(named.contents())

    def field(name: str) -> Any:
        found = reader.fields.get(f"{architecture}.{name}")
        return None if found is None else found.contents()

    if architecture not in READ:
        why = f"the architecture {architecture!r} is not read from GGUF: use the model's original directory"
        raise ModelError(f"{file}: {why}")
    _check_vocabulary(file, reader)
    tables = {each.name: torch.tensor(each.data) for each in reader.tensors if each.name in TABLES}
    names = [key.partition(".")[2] for key in reader.fields if key.startswith(f"{architecture}.")]
    try:
        settings = settings_of(architecture, names, field, tables)
        tokenizer = tokenizer_of(file, reader, architecture)
    except ValueError as error:
        why = f"{error}, which is not read from GGUF: use the model's original directory"
        raise ModelError(f"{file} {why}") from error
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    known = f"{architecture}, " + ", ".join(f"{n} tensors {kind}" for kind, n in sorted(kinds.items()))
    return known, settings, tokenizer


def _check_vocabulary(file: Path, reader: Any) -> None:
    """Raises ModelError for a file whose tokenizer is missing, or is that of another embedding."""
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    rows = [int(each.shape[-1]) for each in reader.tensors if each.name == "token_embd.weight"]
    if tokens is None:
        raise ModelError(f"{file} has no tokenizer")
    if rows and len(tokens.data) != rows[0]:
        why = f"its tokenizer has {len(tokens.data):,} tokens and its embedding {rows[0]:,}"
        raise ModelError(f"{file}: {why}: they are of different models")


def _read(
    file: Path, reader: Any, dtype: torch.dtype, settings: dict[str, Any]
) -> tuple[Any, dict[str, str]]:
    """Model by transformers, and its names of the file's tensors.

    ``settings``: of its config.json that transformers does not read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers import modeling_gguf_pytorch_utils as reading
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    reading.tqdm = partial(reading.tqdm, disable=None)  # draws on a terminal only
    config = AutoConfig.for_model(**reading.load_gguf_checkpoint(file)["config"] | settings)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    read = reading.load_gguf_checkpoint(file, return_tensors=True, model_to_load=outline, torch_dtype=dtype)
    tensors = read["tensors"]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    found = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    stored = [each.name for each in reader.tensors if each.name not in TABLES]
    taken = reading.get_gguf_hf_weights_map(outline, reading.TensorProcessor(config={}))
    if len(tensors) < len(stored):
        left = [name for name in stored if name not in taken]
        raise ValueError(f"{', '.join(left[:3])} would be left out")
    if lacking := set(found.missing_keys) - tied:
        raise ValueError(f"it lacks {', '.join(sorted(lacking)[:3])}")
    if found.unexpected_keys:
        raise ValueError(f"{found.unexpected_keys[0]} belongs to no part of the model")
    model.tie_weights()
    return model, taken
