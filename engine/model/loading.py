"""Loading a causal language model so that its attention runs over regions.

Some architectures would give wrong results without an error (hybrids, learned positions, other rotary
layouts). Known ones are refused by name (`engine.model.architectures`), all are measured
(`engine.model.probe`), and `engine.model.canary` compares logits with the dense forward.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_accelerate_available
from transformers.utils.logging import disable_progress_bar

from engine.attention.last_layer import decoder_layers, install
from engine.compiled.decoder import CompiledDecoder
from engine.compiled.packing import decoder_of, serves
from engine.compiled.pass_selftest import compare, question_of
from engine.compiled.verdict import LayerChoice, Verdict
from engine.device import out_of_memory, resolve_device
from engine.linears.install import Mode, install_linears
from engine.measurement_cache import Memory
from engine.model.architectures import ModelError, check_known
from engine.model.by_torchao import FORMS, config_of, quantise
from engine.model.chat_format import turn_ends
from engine.model.fusion import fuse, fuses
from engine.model.kept import codes_of, held_as
from engine.model.loaded import (
    ATTENTION,
    Decoder,
    Layers,
    LoadedModel,
    ModelSizes,
    Weights,
    region_attention,
    wanted_of_last,
)
from engine.model.lora import read_adapter
from engine.model.plain import is_plain
from engine.model.probe import probe, single_token
from engine.model.quantised import Quantised
from engine.model.revision import name_of, revision_of
from engine.model.tensor_parallel import shard
from engine.model.vocabulary import check_vocabulary

log = logging.getLogger(__name__)

MEMORY = Memory()
"""Of comparisons of compiled layers with transformers'."""
DRAWING = (
    *("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "num_beams"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "guidance_scale"),
)
"""Members of a generation_config.json that decide which tokens are drawn."""
disable_progress_bar()
# opaque to torch.compile, which only a GPU uses: wrapping it imports the compiler, which takes a second
AttentionInterface.register(
    ATTENTION,
    torch.compiler.disable(region_attention) if torch.cuda.is_available() else region_attention,  # type: ignore[no-untyped-call]  # untyped
)


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    tensor_parallel: bool = False,
    layers: Layers = "auto",
    adapter: Path | None = None,
    weights: Weights = "auto",
) -> LoadedModel:
    """Load the causal language model and tokenizer in directory ``path``.

    ``adapter``: the directory of one that is merged into the weights (`engine.model.lora`).
    ``tensor_parallel``: this process keeps its rank's part of the weights, on the device of the
    torch.distributed group, which must be initialised; every rank must load the model and then make the same
    calls. ``layers``: how they run on a CPU. ``weights``: how they are held. Raises ModelError when the
    directory or its architecture cannot be served.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model directory: it has no config.json")
    merged = None if adapter is None else read_adapter(adapter)
    if merged is not None:
        merged.check(path)
    where = "cpu" if tensor_parallel else resolve_device(device)
    held = held_as(path, weights, "torch" if tensor_parallel else layers, dtype, where, adapter)
    by_torchao = held in FORMS and not tensor_parallel
    if by_torchao:
        config_of(held, where)
    elif held != "float" and (where != "cpu" or tensor_parallel or held == "fp8"):
        raise ModelError(_not_compiled(held))
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    # transformers needs accelerate to load parameters straight to the device; without it they are
    # memory-mapped and copied there one by one, as those that become codes there always are
    placed = {"device_map": {"": where}} if is_accelerate_available() and not by_torchao else {}
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        check_known(config)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=kind, attn_implementation="eager", **placed
        )
    except (ValueError, OSError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if out_of_memory(error):
            raise
        raise ModelError(f"{path} cannot be loaded: {error}") from error
    if merged is not None:
        merged.merge(dict(model.named_parameters()))
    if why := check_vocabulary(tokenizer, model.get_input_embeddings().weight.shape[0]):
        raise ModelError(f"{path}: {why}")
    if by_torchao:
        quantise(model, held, where)
    model = shard(model) if tensor_parallel else model.to(where)
    run: Layers = "torch" if tensor_parallel else layers
    name, revision = name_of(path, adapter), revision_of(path, adapter, held)
    return _wrap(model, tokenizer, run, name=name, revision=revision, weights=held, path=path)


def prepare(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    revision: str = "",
    layers: Layers = "compiled",
    weights: Weights = "float",
) -> LoadedModel:
    """Wrap a transformers model of this process. Raises ModelError when it cannot run over regions.

    ``layers``, ``weights``: as of `load_model`; by default the caller's model keeps its weights.
    """
    check_known(model.config)
    held: Weights = "float" if weights == "auto" else weights
    return _wrap(model, tokenizer, layers, name=name, revision=revision, weights=held)


def _not_compiled(weights: Weights) -> str:
    if weights == "fp8":
        return "model.weights is fp8, which a single GPU holds: on a CPU take int8 or int4"
    return (
        f"model.weights is {weights}, which compiled layers read: those of a plain decoder "
        "(llama, mistral without a window, qwen2, qwen3) in float32 or bfloat16 on a CPU"
    )


def _quantised(
    model: Any, layers: Layers, weights: Weights, path: Path | None
) -> dict[str, Quantised] | None:
    """Codes of the matrices of ``model``, of directory ``path``, which then has what they expand to."""
    if weights == "float" or weights in FORMS:
        return None
    if layers not in ("auto", "compiled") or not serves(model):
        raise ModelError(_not_compiled(weights))
    tensors = model.state_dict()
    try:
        codes = codes_of(path, tensors, weights)
    except (OSError, KeyError, SafetensorError) as error:
        raise ModelError(f"the codes of {path} cannot be read: {error}") from error
    except ValueError as error:
        raise ModelError(f"model.weights is {weights}, but {error}") from error
    with torch.no_grad():
        for name, each in codes.items():
            tensors[name].copy_(each.expanded())
    return codes


def _wrap(
    model: Any,
    tokenizer: Any,
    layers: Layers,
    *,
    name: str,
    revision: str,
    weights: Weights,
    path: Path | None = None,
) -> LoadedModel:
    model.eval().requires_grad_(False)
    codes = _quantised(model, layers, weights, path)
    probed = probe(model)
    fused = layers in ("auto", "compiled") and fuses(model)
    by_layer = decoder_layers(model, len(probed.layers))
    if fused and by_layer is not None and not is_plain(model):
        fuse(by_layer)
    plain = LoadedModel(
        model,
        tokenizer,
        ModelSizes.of(model.config),
        torch.device(model.device),
        model.dtype,
        probed.layers,
        probed.rotations,
        name,
        revision,
        bool(getattr(model.config, "foretick_untrained", False)),
        probed.max_positions,
        install(model, len(probed.layers), wanted_of_last),
        getattr(model.config, "foretick", None) or {},
        end_ids=end_ids_of(model) | turn_ends(tokenizer),
        generation=generation_of(model),
        weights=weights,
    )
    if codes is not None:
        loaded = replace(plain, decoder=decoder_of(model, quantised=codes))
        log.info("weights: %s", loaded.layers_run)
    elif fused and is_plain(model):
        loaded = replace(plain, decoder=_fused(model))
    else:
        loaded = _with_layers(plain, layers, MEMORY)
    model.set_attn_implementation(ATTENTION)
    return loaded


def _fused(model: Any) -> Decoder:
    """A plain ``model`` on a GPU, by our own kernels."""
    # imported here: compiling kernels needs a GPU, and importing Triton is slow
    from engine.fused.decoder import FusedDecoder

    return FusedDecoder.of(model)


def _with_layers(plain: LoadedModel, layers: Layers, memory: Memory) -> LoadedModel:
    """``plain``, whose layers are transformers', with the layers that are asked for."""
    if layers == "compiled":
        return replace(plain, decoder=decoder_of(plain.model))
    choice = None
    if layers == "auto" and serves(plain.model):
        decoder, choice = _chosen(plain, memory)
        log.info("layers: %s", choice)
        if decoder is not None:
            return replace(plain, decoder=decoder, choice=choice)
    mode: Mode = "auto" if layers == "auto" else layers
    linears = install_linears(plain.model, partial(single_token, plain.model), mode)
    return replace(plain, linears=linears, choice=choice)


def _chosen(plain: LoadedModel, memory: Memory) -> tuple[CompiledDecoder | None, LayerChoice]:
    """Compiled layers if they pay, as an earlier start on this machine found, or else as is measured now."""
    question = question_of(plain)
    verdict, decoder = memory.recall(question, Verdict), None
    remembered = verdict is not None
    if verdict is None or verdict.compiled:
        decoder = decoder_of(plain.model)
        assert decoder is not None, "it is served"
    if verdict is None:
        assert decoder is not None
        verdict = compare(plain, decoder)
        memory.remember(question, verdict)
    choice = LayerChoice(verdict, remembered, memory.path(question), question)
    return decoder if verdict.compiled else None, choice


def end_ids_of(model: Any) -> frozenset[int]:
    """Return all end tokens that a model's generation config and config.json name, each one or a list.

    Ids that no token has are left out: some configurations have -1 for none.
    """
    config = model.config.get_text_config()
    found: set[int] = set()
    for each in (getattr(model, "generation_config", None), model.config, config):
        ids = getattr(each, "eos_token_id", None)
        found.update([] if ids is None else [int(ids)] if isinstance(ids, int) else map(int, ids))
    return frozenset(token for token in found if 0 <= token < config.vocab_size)


def generation_of(model: Any) -> dict[str, Any]:
    """What a model's generation_config.json says of drawing tokens.

    Nothing where transformers made the file out of config.json: its values are defaults.
    """
    found = getattr(model, "generation_config", None)
    if found is None or getattr(found, "_from_model_config", False):
        return {}
    said = {name: getattr(found, name, None) for name in DRAWING}
    return {name: value for name, value in said.items() if value is not None}
