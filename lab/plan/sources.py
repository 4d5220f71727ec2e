"""What a plan is made of: the configuration, its model without weights, and the device's costs."""

import os
from dataclasses import dataclass
from functools import partial

from daemon.config.schema import Config
from daemon.config.standing import questions_of
from daemon.config.symbols import numbered
from daemon.engine.build import (
    costs_of,
    directory_of,
    limits_of,
    line_spec,
    prefixes_of,
    prepared,
    register,
    window_of,
)
from daemon.engine.memory_budget import unbounded_host_blocks
from daemon.engine.pool_size import PoolSizes
from daemon.engine.prefixes import EnginePrefixes
from engine.model.architectures import ModelError
from engine.model.chat_format import PromptFormat
from feeds.connector import SettingError
from flash.registry import Registry
from ingest.compact import WIDEST, CompactSpec
from ingest.lines import LineSpec
from lab.plan.outline import Outline, outline_of
from scheduler.costs import CostModel
from scheduler.interfaces import Limits


@dataclass(frozen=True)
class Sources:
    """Everything that a plan reads. ``blocks``: of the pool, as the daemon would size it.

    ``session_tokens``: tokens of KV that one more session of this kind takes in the pool, on average.
    """

    config: Config
    outline: Outline
    prompt: PromptFormat
    lines: dict[str, LineSpec | CompactSpec]
    prefixes: EnginePrefixes
    registry: Registry
    limits: Limits
    costs: CostModel
    blocks: int
    session_tokens: float

    @property
    def compact(self) -> list[str]:
        """Names of the sessions with compact lines."""
        return [name for name, spec in self.lines.items() if isinstance(spec, CompactSpec)]

    @property
    def intervals(self) -> list[int]:
        """Length of a bar of each session, ns."""
        return [session.bars(self.config.bars).interval for session in self.config.sessions]

    @property
    def symbols(self) -> dict[str, int]:
        """The symbols by their number in the ring."""
        return numbered(self.config.sessions)

    @property
    def host_blocks(self) -> int:
        """Blocks of the host tier, on a host whose memory is not short."""
        settings = self.config.pool
        if settings.host_blocks == "auto":
            return unbounded_host_blocks(self.blocks, self.config.scheduler.cell_budget)
        return settings.host_blocks

    def kv_bytes(self, tokens: float) -> float:
        """Memory of ``tokens`` tokens of KV (*Attention Once* equation 21)."""
        return tokens * self.outline.token_bytes


def sources_of(config: Config, costs: CostModel | None = None) -> Sources:
    """Read tokenizer and shape of the model; ``costs``: None takes the configured profile.

    Raises SettingError naming the key at fault; `sessions` where there is none.
    """
    if not config.sessions:
        raise SettingError("sessions", "there is no session to plan for: add one")
    costs = costs or costs_of(config).base
    try:
        outline = _outline(config)
        prompt = PromptFormat.of(outline.tokenizer, config.model.system_prompt, outline.described)
    except (ModelError, ValueError) as error:
        raise SettingError("model.path", str(error)) from error
    lines = {
        session.name: line_spec(session, config.bars, prompt, f"sessions[{index}]")
        for index, session in enumerate(config.sessions)
    }
    prefixes = prefixes_of(config, prompt, lines)
    registry = Registry(partial(prepared, prompt))
    for asked in questions_of(config):
        register(registry, asked)
    compact = [name for name, spec in lines.items() if isinstance(spec, CompactSpec)]
    frozen = max(len(prefixes.newest(name)) for name in lines)
    if compact:
        frozen += len(prompt.encode(WIDEST.header))
    sizes = PoolSizes(config, frozen, window_of(prompt))
    blocks = sizes.all(compact)
    return Sources(
        config,
        outline,
        prompt,
        lines,
        prefixes,
        registry,
        limits_of(config),
        costs,
        config.pool.blocks or blocks,
        (blocks - sizes.shared) * config.pool.block_size / len(config.sessions),
    )


def weights_of(config: Config) -> int:
    """Bytes of the model's weights. Raises SettingError."""
    try:
        return _outline(config).weight_bytes
    except (ModelError, ValueError) as error:
        raise SettingError("model.path", str(error)) from error


def _outline(config: Config) -> Outline:
    return outline_of(directory_of(config.model), config.model.dtype, config.model.kv_dtype)


def device_memory(config: Config) -> int:
    """Bytes of the configured device: of the GPU, or of this machine. Raises SettingError without a GPU."""
    from engine.device import resolve_device

    try:
        device = resolve_device(config.model.device)
    except ModelError as error:
        raise SettingError("model.device", str(error)) from error
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)
