"""Tensor parallelism: every rank of a torch.distributed group keeps its part of each layer's heads.

transformers' plan for the architecture defines what is split and where ranks sum up. Each rank has a KV pool
for its own heads and a full copy of everything else (tapes, extents, metadata, logits). Ranks exchange only
activations, so all of them must make the same calls in the same order.
"""

from typing import Any

from torch import distributed, nn

from engine.model.architectures import ModelError


def shard(model: Any) -> Any:
    """Keep this rank's part of ``model``, on the device of the group's mesh. May raise ModelError."""
    # imported here: only this mode needs it
    from transformers.distributed import DistributedConfig

    kind, config = model.config.model_type, model.config.get_text_config()
    if not distributed.is_initialized():
        raise ModelError("tensor parallelism needs an initialised torch.distributed process group")
    ranks = distributed.get_world_size()
    for what, heads in (("attention", config.num_attention_heads), ("key-value", config.num_key_value_heads)):
        if heads % ranks:
            raise ModelError(f"{kind}: {heads} {what} heads cannot be divided among {ranks} ranks")
    _untie(model)
    try:
        plan, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=ranks, tp_plan="auto"))
        model = model.maybe_distribute_model(model, plan, mesh)
    except ValueError as error:
        raise ModelError(f"{kind} has no way of tensor parallelism: {error}") from error
    if mesh is not None:
        model.to(mesh.get_mesh("tp").device_type)
    return model


def _untie(model: Any) -> None:
    """Untie weights: plans name every weight, but a tied one is listed once. The storage stays shared."""
    for name in model.all_tied_weights_keys:
        owner, _, leaf = name.rpartition(".")
        shared = model.get_parameter(name)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(shared.detach(), requires_grad=False))
