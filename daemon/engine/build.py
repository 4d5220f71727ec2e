"""Builds an engine from the configuration: model, pool size, tapes with their prefixes."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path

from msgspec import structs

from daemon.config.answerable import terse_text
from daemon.config.by_model import by_model, keys_of_file
from daemon.config.checks import tables_of
from daemon.config.schema import UNTRAINED, BarsConfig, Config, ModelConfig, PoolConfig, SessionConfig
from daemon.config.standing import StandingQuestion, questions_of
from daemon.engine.confidence_metrics import calibration_of
from daemon.engine.cost_probe import measured_costs
from daemon.engine.described import described
from daemon.engine.example_turns import asked_as, example_turns
from daemon.engine.maintenance import Tiers, identity_of, tiers_of
from daemon.engine.memory_budget import (
    HOST,
    SHARE,
    SharedMemory,
    asked_host_blocks,
    blocks_of_memory,
    check_memory,
    check_weights,
    fitting_blocks,
    host_blocks,
    shown_bytes,
)
from daemon.engine.pool_size import PoolLimit, PoolSizes, Window, check_pools, kept_tokens
from daemon.engine.prefixes import EnginePrefixes, Explanation
from daemon.engine.question_packs import EnginePacks
from daemon.engine.snapshot_store import Recovery, SavedSession, SnapshotNoRoom, UsableSnapshot
from daemon.progress import Progress
from engine.device import in_own_thread, out_of_memory, resolve_device, unused_gpu, use_threads
from engine.engine import Engine
from engine.free_memory import own_bytes
from engine.graphs.runner import MAX_ROWS, CapturePlan
from engine.model import canary
from engine.model.architectures import ModelError
from engine.model.chat_format import PromptError, PromptFormat
from engine.model.gguf import gguf_directory
from engine.model.kv_type import KVType, with_kv
from engine.model.loaded import Layers, LoadedModel, Weights
from engine.model.lora import AdapterError
from engine.model.remembered import recall, remember
from engine.model.terse import TAPE_MODEL, Terse, TerseQuestion, named_lines
from engine.pass_memory import pass_bytes
from engine.step import OutOfMemory
from engine.warm_up import Tell, warm_up
from feeds.connector import SettingError
from feeds.decimals import to_units
from flash.confidence import Calibration
from flash.question import EXACT_VALUE, PreparedQuestion, Question
from flash.registry import BadQuestion, Registry, Standing
from ingest.compact import WIDEST, WIDEST_LINE, CompactSpec
from ingest.lines import LineSpec
from regions.kv_tensors import KVPool
from regions.offload.snapshot_format import ForeignSnapshot, Identity, Restoring, SnapshotError
from regions.tape import Retention, Tape
from scheduler.costs import OnlineCosts, guess
from scheduler.costs import load as load_profile
from scheduler.interfaces import Limits

log = logging.getLogger(__name__)

_LEVEL = "999"
"""As long as the level of any price."""


Loaded = tuple[LoadedModel, PromptFormat]


@dataclass(frozen=True)
class Built:
    """Everything that needs the model.

    ``opened``: the configuration, with the sessions that are open from the start on.
    """

    opened: Config
    loaded: LoadedModel
    prompt: PromptFormat
    engine: Engine
    tapes: dict[str, Tape]
    tiers: Tiers
    costs: OnlineCosts
    lines: dict[str, LineSpec | CompactSpec]
    """How bars are written, by session."""
    prefixes: EnginePrefixes
    recovery: Recovery
    limit: PoolLimit
    packs: EnginePacks
    calibration: Calibration | None = None
    progress: dict[str, Progress] = field(default_factory=dict)
    """What each session goes on from."""
    restored: dict[str, SavedSession] = field(default_factory=dict)
    """Sessions whose tape came back from a snapshot."""
    names: tuple[str, ...] = ()
    """Its own name, by which answers name it, then what the configuration calls it."""
    others: tuple["Built", ...] = ()
    """Of `[[models]]`, each with its own sessions."""

    @property
    def all(self) -> tuple["Built", ...]:
        """Every model, this one first."""
        return self, *self.others

    @cached_property
    def identity(self) -> Identity:
        """Of the model; `Identity.behind` makes it that of a tape."""
        return identity_of(self.engine, ())

    def open(self, session: SessionConfig, progress: Progress, objective_ns: int) -> Tape:
        """Open the tape of a session whose line and prefix are there; it goes on from ``progress``.

        It comes back from a snapshot if there is one that may be used. ``objective_ns``: how
        fresh it is to be.

        Raises ValueError for a retention that does not fit, ModelError and OutOfMemory where the pool is too
        small.
        """
        name, line = session.name, self.lines[session.name]
        self.progress[name] = progress
        settings = self.recovery.settings(session, line, retention_of(session, self.prompt))
        tape = None
        for found in self.recovery.usable(name, settings, progress):
            try:
                tape = self.restore(session, found, progress)
                break
            except SnapshotError as error:
                self.recovery.refuse(name, error)
                self.prefixes.restore(name, header_of(line), ())
        if tape is None:
            tape = self._opened(session)
            tape.continue_from(progress.version)
        tape.bound_staleness(objective_ns)
        self.tapes[name] = tape
        if self.tiers.residency is not None:
            self.tiers.residency.attach(tape, self.identity.behind(tape.prefix))
        return tape

    def restore(self, session: SessionConfig, found: UsableSnapshot, progress: Progress) -> Tape:
        """The tape of a snapshot. Raises SnapshotError where it does not fit; the prefix has changed then."""
        (snapshot, state), name = found, session.name
        self.prefixes.restore(name, state.header, state.rollup)
        snapshot.expect(self.identity.behind(self.prefixes.newest(name)))
        tape = self._opened(session)
        version = max(snapshot.header.state.version, progress.version)
        stored = Restoring(self.engine.pool, snapshot)
        try:
            tape.resume(structs.replace(snapshot.header.state, version=version), stored)
            if not tape.swap_in():
                raise SnapshotNoRoom(f"{snapshot.path}: the pool has no room for its window")
        except ValueError as error:
            tape.release()
            raise ForeignSnapshot(f"{snapshot.path}: {error}") from error
        except SnapshotError:
            tape.release()
            raise
        self.restored[name] = state
        return tape

    def try_open(self, session: SessionConfig) -> None:
        """Open an empty tape and close it. Raises as `open`."""
        try:
            self._opened(session).release()
        finally:
            self.forget(session.name)

    def _opened(self, session: SessionConfig) -> Tape:
        """An empty tape."""
        compact = isinstance(self.lines[session.name], CompactSpec)
        self.limit.open(session, compact=compact)
        engine, frozen = self.engine, self.prefixes.newest(session.name)
        tape = engine.open_tape(session.name, frozen, retention_of(session, self.prompt))
        try:
            # no anchor's header is longer
            header = len(self.prompt.encode(WIDEST.header)) if compact else 0
            tape.check_prefix(len(frozen) + header + session.summed_tokens)
        except ValueError:
            tape.release()
            raise
        return tape

    def close(self, tape: Tape) -> None:
        """Close a session's tape, which nothing uses any more."""
        if self.tiers.residency is not None:
            self.tiers.residency.detach(tape)
        tape.release()
        self.forget(tape.name)

    def forget(self, session: str) -> None:
        """A session is closed, or was not opened after all."""
        for kept in (self.lines, self.progress, self.restored):
            kept.pop(session, None)
        self.prefixes.remove(session)
        self.limit.close(session)

    def prepare(self, question: Question) -> PreparedQuestion:
        """Render and encode a question for this model.

        Raises ValueError for a choice that is empty or not the model's, and BadQuestion for a question that
        the model does not answer.
        """
        return self.packs.prepared(question) if question.pack else prepared(self.prompt, question)

    def answers(self, question: Question) -> tuple[str, ...]:
        """All answers of a terse model to ``question``, none where they are numbers. Raises BadQuestion."""
        terse = self.prompt.terse
        assert terse is not None, "other models answer in any words"
        if question.pack:
            return self.packs.answers(question)
        choices = known(self.prompt, question, terse).choices
        return (*choices, terse.none) if choices else ()

    def shown(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones among them; a question pack's are none of the tokenizer's."""
        asked = self.packs.text_of(tokens)
        return asked or str(self.prompt.tokenizer.decode(list(tokens), skip_special_tokens=False))


def known(prompt: PromptFormat, question: Question, terse: Terse) -> TerseQuestion:
    """The model's own question that ``question`` is. Raises BadQuestion."""
    try:
        return terse.find(text_of(prompt, question))
    except ValueError as error:
        raise BadQuestion(f"question {question.name!r}: {error}", "text") from error


def prepared(prompt: PromptFormat, question: Question) -> PreparedQuestion:
    """See `Built.prepare`."""
    terse, text = prompt.terse, text_of(prompt, question)
    try:
        tokens = tuple(prompt.question(text))
    except ValueError as error:
        raise BadQuestion(f"question {question.name!r}: {error}", "text") from error
    choices = prompt.choices(text, question.choices) if question.choices else None
    grammar = prompt.numbers.allowed if question.answer == "number" else None
    if terse is None:
        is_price = question.text == EXACT_VALUE.text
        return PreparedQuestion(tokens, choices, prompt.stop_ids, None, is_price, grammar)
    is_price = not terse.find(text).choices
    most = len(prompt.encode(_LEVEL)) if is_price else 1
    return PreparedQuestion(tokens, choices, prompt.stop_ids, most, is_price, grammar)


def text_of(prompt: PromptFormat, question: Question) -> str:
    """The text that the model knows ``question`` by."""
    # the paper's texts are for models that read
    if prompt.terse is None:
        return asked_as(prompt, question)
    return terse_text(question)


def registry_of(config: Config, built: Built) -> Registry:
    """The standing questions of all sessions. Raises SettingError for one that cannot be asked."""
    registry = Registry(built.prepare)
    for asked in questions_of(config):
        register(registry, asked)
    return registry


def register(registry: Registry, asked: StandingQuestion) -> Standing:
    """Register a declared standing question. Raises SettingError naming its key."""
    try:
        return registry.register(asked.session, asked.question)
    except BadQuestion as error:
        declared = asked.key != "standing"
        raise SettingError(f"{asked.key}.{error.member}" if declared else asked.key, str(error)) from error


def limits_of(config: Config) -> Limits:
    """The scheduler's budgets."""
    settings = config.scheduler
    alike = {f.name: getattr(settings, f.name) for f in fields(Limits) if hasattr(settings, f.name)}
    return Limits(
        **alike,
        chunk_max=settings.max_batch_tokens,
        cell_budget_fraction=settings.cell_budget,
        stream_timeout_ns=settings.stream_timeout,
    )


def costs_of(config: Config) -> OnlineCosts:
    """The device's costs before any measured pass. Raises SettingError for an unusable profile."""
    name, size = config.scheduler.profile, config.pool.block_size
    if not name:
        return OnlineCosts(guess(size))
    try:
        profile = load_profile(name)
    except ValueError as error:
        raise SettingError("scheduler.profile", str(error)) from error
    if profile.block_size != size:
        raise SettingError(
            "scheduler.profile",
            f"{name} was measured with blocks of {profile.block_size} tokens, but pool.block_size is {size}: "
            f"set it to {profile.block_size}, or measure with `foretick profile`",
        )
    return OnlineCosts(profile)


def directory_of(settings: ModelConfig) -> Path:
    """The model's directory. Raises ModelError as `gguf_directory`."""
    if settings.path == UNTRAINED:
        from engine.model.embedded import embedded_directory  # here, since it takes seconds to import

        return embedded_directory(seed=settings.seed)
    path = Path(settings.path)
    if path.suffix == ".gguf":
        return gguf_directory(path, settings.dtype)
    return path if settings.path else TAPE_MODEL


def adapter_of(settings: ModelConfig) -> Path | None:
    """The directory of the model's adapter; None where it has none."""
    return Path(settings.adapter) if settings.adapter else None


def load_on_cpu(config: Config) -> tuple[Loaded, ...]:
    """As `load_all`, in a thread of its own, if all models run on a CPU; none otherwise."""
    if any(resolve_device(each.device) != "cpu" for each in (config.model, *config.models)):
        return ()

    def work() -> tuple[Loaded, ...]:
        use_threads(config.model.threads)
        return load_all(config)

    return in_own_thread(work)


def load_all(config: Config) -> tuple[Loaded, ...]:
    """Load every model, in the order of `by_model`. Raises SettingError as `load`."""
    loaded = []
    for number, part in enumerate(by_model(config)):
        with keys_of_file(config, number):
            loaded.append(load(part))
    return tuple(loaded)


def load(config: Config) -> Loaded:
    """Load the model and run its canary. Raises SettingError naming the key at fault."""
    settings = config.model
    try:
        directory = directory_of(settings)
        check_weights(directory, settings.dtype, resolve_device(settings.device))
        loaded = load_checked(
            directory,
            settings.dtype,
            settings.device,
            settings.layers,
            adapter_of(settings),
            settings.weights,
            settings.kv_dtype,
        )
        prompt = PromptFormat.of(loaded.tokenizer, settings.system_prompt, loaded.described, loaded.end_ids)
        if settings.end_tokens:
            prompt = replace(prompt, only_ends=_end_tokens(prompt, settings.end_tokens))
    except AdapterError as error:
        raise SettingError("model.adapter", str(error)) from error
    except (ModelError, ValueError) as error:
        named = (each for each in ("kv_dtype", "weights", "layers") if f"model.{each}" in str(error))
        key = next(named, "device" if "device" in str(error) else "path")
        raise SettingError(f"model.{key}", str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        why = str(error).partition("\n")[0][:200]
        raise SettingError("model.path", f"no memory for the model {directory.name}: {why}") from error
    if loaded.untrained:
        log.warning("the model is UNTRAINED: its answers are not advice; they only exercise the pipeline")
    if (unused := unused_gpu(settings.device)) is not None:
        log.warning("model.device: %s", unused)
    return loaded, prompt


def load_checked(
    directory: Path,
    dtype: str = "auto",
    device: str = "auto",
    layers: Layers = "auto",
    adapter: Path | None = None,
    weights: Weights = "auto",
    kv: KVType = "auto",
) -> LoadedModel:
    """The model in a directory, with its ``adapter``, its canary passed. Raises ModelError."""
    if resolve_device(device) == "cpu":
        known = recall(directory, dtype, layers, adapter=adapter, weights=weights)
        if known is not None:
            return with_kv(known, kv)
    # imported here: transformers' modelling code takes longer than all else of a start with a small model
    from engine.model.loading import load_model

    loaded = checked(
        load_model(directory, dtype=dtype, device=device, layers=layers, adapter=adapter, weights=weights)
    )
    remember(loaded, directory, dtype, layers, adapter=adapter)
    loaded.release_plain()
    return with_kv(loaded, kv)


def _end_tokens(prompt: PromptFormat, texts: Sequence[str]) -> frozenset[int]:
    """Raises SettingError for a text that is not one token."""
    found = [prompt.encode(text) for text in texts]
    for text, tokens in zip(texts, found, strict=True):
        if len(tokens) != 1:
            why = f"{text!r} is {len(tokens)} tokens of this model, not one"
            raise SettingError("model.end_tokens", why)
    return frozenset(token for (token,) in found)


def checked(loaded: LoadedModel) -> LoadedModel:
    """``loaded``, whose canary has passed, with the fastest way to run its layers that passes it.

    Raises ModelError if none does.
    """
    while True:
        try:
            canary.check(loaded)
        except ModelError as error:
            slower = loaded.more_exact()
            if slower is None:
                raise
            names = loaded.layers_run, slower.layers_run
            log.warning("%s failed their canary, %s take over: %s", *names, error)
            loaded = slower
        else:
            return loaded


def opened_at_start(config: Config) -> Config:
    """With the sessions that an engine has from its start on; the others are opened later."""
    return structs.replace(config, sessions=()) if config.opens_by_partition else config


def build(
    config: Config,
    progress: Mapping[str, Progress],
    ahead: tuple[Loaded, ...] = (),
    *,
    opens_all: bool = False,
    tell: Tell = lambda doing: None,
) -> Built:
    """Load the models, size their pools and open the tapes of `opened_at_start`, or with ``opens_all`` of all
    sessions; each goes on from its ``progress``.

    ``ahead``: the models of `load_on_cpu`. ``tell``: called with what takes long. Runs in a thread of its
    own, because another one will use the device. Raises SettingError naming the key.
    """
    return in_own_thread(lambda: _build_all(config, progress, ahead, tell, opens_all=opens_all))


def _build_all(
    config: Config,
    progress: Mapping[str, Progress],
    ahead: tuple[Loaded, ...],
    tell: Tell,
    *,
    opens_all: bool,
) -> Built:
    use_threads(config.model.threads)
    models = ahead or load_all(config)
    found: list[Built] = []
    tell("measuring memory and costs")
    rooms = sized_all(config, models)
    for number, (part, model, room) in enumerate(zip(by_model(config), models, rooms, strict=True)):
        with keys_of_file(config, number):
            opened = part if opens_all else opened_at_start(part)
            built = _build(part, opened, progress, model, room, tell)
            found.append(replace(built, names=_names(part.model, model[0], found)))
    return replace(found[0], others=tuple(found[1:]))


def _names(settings: ModelConfig, loaded: LoadedModel, before: Sequence[Built]) -> tuple[str, ...]:
    """Raises SettingError for one that another model has."""
    taken = {name for each in before for name in each.names}
    configured = tuple(name for name in (settings.name, *settings.aliases) if name)
    if again := taken.intersection(configured):
        raise SettingError("model.name", f"{sorted(again)[0]!r} is the name of another model: take another")
    # one directory twice: answers have the same name of both, and clients the configured one
    own = () if loaded.name in taken else (loaded.name,)
    return tuple(dict.fromkeys((*own, *configured)))


@dataclass(frozen=True)
class Sized:
    """What the pool has to hold. ``longest``: tokens of the longest frozen prefix; ``compact``: sessions.

    ``host_blocks``: of the host tier.
    """

    lines: dict[str, LineSpec | CompactSpec]
    prefixes: EnginePrefixes
    sizes: PoolSizes
    compact: list[str]
    largest: int
    longest: int
    blocks: int
    host_blocks: int


def sized_all(config: Config, models: Sequence[Loaded]) -> list[Sized]:
    """How large pools and host tiers are to be, in the order of `by_model`; allocates none of them.

    Host tiers of no given size get their shares of what all pools leave. Raises SettingError where a pool
    does not fit.
    """
    memory, found = SharedMemory(), list[Sized]()
    parts = list(zip(by_model(config), models, strict=True))
    spare = _for_spare(config, models[0][0])
    left = (SHARE - 1) * memory(HOST) - spare
    for number, (part, (loaded, prompt)) in enumerate(parts):
        with keys_of_file(config, number):
            found.append(_sized(part, loaded, prompt, memory))
    left += memory(HOST)
    for number, (part, (loaded, _)) in enumerate(parts):
        each = KVPool.block_bytes(loaded.layers, part.pool.block_size, loaded.kv_dtype)
        blocks = host_blocks(part.pool, found[number].blocks, part.scheduler.cell_budget, each, left)
        found[number] = replace(found[number], host_blocks=blocks)
        left -= blocks * each
    return found


def _sized(config: Config, loaded: LoadedModel, prompt: PromptFormat, memory: SharedMemory) -> Sized:
    """One model's. ``memory``: what it takes is no other model's any more."""
    lines = {each.name: line_spec(each, config.bars, prompt, table) for table, each in tables_of(config)}
    prefixes = prefixes_of(config, prompt, lines)
    longest = max((len(prefixes.newest(name)) for name in lines), default=0)
    header = len(prompt.encode(WIDEST.header))  # no anchor's header is longer
    if config.pool.memory:
        config = structs.replace(config, pool=_of_memory(config, loaded, memory))
    compact = [name for name, spec in lines.items() if isinstance(spec, CompactSpec)]
    window = window_of(prompt)
    sizes = PoolSizes(config, longest + (header if compact else 0), window)
    largest = sizes.largest(compact)
    check_pools(config, compact, window)
    blocks = _capacity(config, sizes, compact, largest, loaded, memory)
    return Sized(lines, prefixes, sizes, compact, largest, longest, blocks, asked_host_blocks(config.pool))


def _of_memory(config: Config, loaded: LoadedModel, memory: SharedMemory) -> PoolConfig:
    """The pool's settings, with the blocks that its `memory` is. Raises SettingError."""
    settings, tokens = config.pool, config.scheduler.max_batch_tokens
    free = memory(loaded.device)
    try:
        peak = pass_bytes(loaded, tokens, settings.block_size)
    except OutOfMemory as error:
        why = f"weights leave no memory for a pass of {tokens:,} tokens: lower it ({error})"
        raise SettingError("scheduler.max_batch_tokens", why) from error
    taken = peak + _for_spare(config, loaded)
    if loaded.device.type == "cpu":
        each = KVPool.block_bytes(loaded.layers, settings.block_size, loaded.kv_dtype)
        taken += asked_host_blocks(settings) * each
    blocks = blocks_of_memory(settings, loaded, free, taken)
    passes = f"passes of up to {tokens:,} tokens take {shown_bytes(peak)}"
    log.info("the pool has %s blocks: %s are available, %s", f"{blocks:,}", shown_bytes(free), passes)
    return structs.replace(settings, blocks=blocks)


def pool_bytes(config: Config, models: Sequence[Loaded]) -> int:
    """What pools and host tiers may take of a CPU's memory. Raises SettingError as `sized_all`."""
    found = 0
    for part, (loaded, _), room in zip(by_model(config), models, sized_all(config, models), strict=True):
        each = KVPool.block_bytes(loaded.layers, part.pool.block_size, loaded.kv_dtype)
        found += (room.blocks + room.host_blocks) * each
    return found


def _build(
    config: Config,
    opened: Config,
    progress: Mapping[str, Progress],
    ahead: Loaded,
    room: Sized,
    tell: Tell,
) -> Built:
    """One model's."""
    costs = costs_of(config)
    loaded, prompt = ahead
    lines, prefixes, blocks = room.lines, room.prefixes, room.blocks
    names = {
        named_lines("compact" if isinstance(spec, CompactSpec) else spec.form, config.model.examples)
        for spec in lines.values()
    }
    trained = adapter_of(config.model) or directory_of(config.model)
    calibration = calibration_of(config.model, trained, loaded.revision, names)
    # the pool less the cell budget; at least the longest frozen prefix and rollup
    least = room.longest + max((session.summed_tokens for session in config.all_sessions), default=0)
    share = config.pool.block_size * (1 - config.scheduler.cell_budget)

    def cached(blocks: int) -> int:
        return max(int(blocks * share), least)

    engine = _engine(loaded, config, blocks, cached(blocks))
    limit = PoolLimit(engine, room.sizes, cached, follows=not config.pool.has_size, largest=room.largest)
    recovery = Recovery(config)
    if recovery.enabled:
        recovery.files.prepare()
    if room.host_blocks and not config.scheduler.profile:
        costs = OnlineCosts(measured_costs(engine, config.scheduler.max_batch_tokens, room.host_blocks))
    if loaded.device.type != "cpu":
        warmed(engine, config, tell)
    tiers = tiers_of(config, engine, room.host_blocks, costs.copied)
    tapes: dict[str, Tape] = {}
    packs = EnginePacks(
        engine,
        directory_of(config.model),
        prompt,
        calibrates=config.model.calibration != "off",
        most=config.flash.max_packs,
    )
    keeping = tiers, costs, lines, prefixes, recovery, limit, packs, calibration
    built = Built(opened, loaded, prompt, engine, tapes, *keeping)
    at_start = {session.name for session in opened.sessions}
    for table, session in tables_of(config):
        try:
            if session.name in at_start:
                known = progress.get(session.name, Progress())
                built.open(session, known, config.freshness_objective_ns(session))
            else:  # so that what cannot be opened is said now
                built.try_open(session)
        except ValueError as error:
            raise SettingError(f"{table}.retention_tokens", str(error)) from error
        except ModelError as error:
            raise SettingError(config.pool.size_key, str(error)) from error
    return built


def _capacity(
    config: Config,
    sizes: PoolSizes,
    compact: Collection[str],
    largest: int,
    loaded: LoadedModel,
    memory: SharedMemory,
) -> int:
    """Blocks to set memory aside for. Raises SettingError where there is too little.

    Where sessions come and go, as many as fit, and at least those of the largest session.
    """
    needed, least = config.pool.blocks or sizes.all(compact), sizes.shared + largest
    if not config.opens_by_partition:
        least = max(least, sizes.configured(compact))
    if not config.pool.blocks:
        each = KVPool.block_bytes(loaded.layers, config.pool.block_size, loaded.kv_dtype)
        fitting = fitting_blocks(config.pool, loaded, memory) - _for_spare(config, loaded) // each
        needed = min(needed, max(fitting, least))

    def room(blocks: int) -> str:
        sessions = len(config.sessions)
        if config.pool.blocks or not sessions:
            return ""
        return (
            f", so there is room for {sizes.fitting(blocks, compact):,} of {sessions:,} sessions: lower "
            "retention_tokens or retention_records, or have fewer of them"
        )

    check_memory(config.pool, needed, loaded, memory, room)
    memory.take(config.pool, needed, loaded)
    return needed


def _for_spare(config: Config, loaded: LoadedModel) -> int:
    """Bytes that a pool of what fits leaves to a spare engine: what this process has, and a quarter."""
    settings = config.process
    is_wanted = settings.mode == "two" and settings.spare_engine is not False and loaded.device.type == "cpu"
    return own_bytes() * 5 // 4 if is_wanted else 0


def _engine(loaded: LoadedModel, config: Config, blocks: int, cached: int) -> Engine:
    """The engine with its pool. Raises SettingError where there is no memory for it after all."""
    settings, rows = config.pool, min(MAX_ROWS, config.scheduler.max_batch_tokens)
    try:
        return Engine(
            loaded,
            blocks=blocks,
            block_size=settings.block_size,
            frame_limit=settings.frame_limit,
            cache_tokens=cached,
            retained_share=settings.retained_share,
            captures=CapturePlan(rows, deferred=True),
        )
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        why = str(error).partition("\n")[0][:200]
        raise SettingError(settings.size_key, f"no memory for {blocks} blocks: {why}") from error


def warmed(engine: Engine, config: Config, tell: Tell) -> None:
    """Run the passes of `warm_up`. Raises SettingError where the pool leaves them no memory."""
    tokens = config.scheduler.max_batch_tokens
    window = max((session.retention_tokens for session in config.all_sessions), default=0)
    log.info("warming up: the first start compiles kernels, which takes longer")
    try:
        warm_up(engine, tokens, window, tell)
    except OutOfMemory as error:
        blocks = engine.pool.capacity
        why = f"{blocks:,} blocks leave no memory for a pass of {tokens:,} tokens: have fewer ({error})"
        raise SettingError(config.pool.size_key, why) from error


def line_spec(
    session: SessionConfig, bars: BarsConfig, prompt: PromptFormat, here: str = "session"
) -> LineSpec | CompactSpec:
    """How the bars of a session are written. Raises SettingError for lines that the model does not read.

    ``bars``: settings of sessions that have none of their own. ``here``: the key of its table.
    """
    lines = prompt.lines if session.lines == "auto" else session.lines
    if prompt.terse is not None and lines != prompt.lines:
        raise SettingError(f"{here}.lines", f"this model reads {prompt.lines} lines only")
    if lines != "compact":
        if session.unit:
            raise SettingError(f"{here}.unit", 'is for compact lines: remove it, or set lines = "compact"')
        symbols = labels_of(session.symbols) if session.more_symbols else ()
        emits_empty = session.bars(bars).empty == "emit"
        return LineSpec(
            session.price_decimals,
            session.volume_decimals,
            symbols,
            emits_empty,
            session.scale,
            dates=session.bars(bars).dates,
            form=lines,
        )
    for name, value in (("late", "amend"), ("empty", "emit")):
        if getattr(session.bars(bars), name) == value:
            table = "bars" if getattr(session, name) is None else here
            why = f"the model reads compact lines, which have no words: {value!r} needs decimal lines"
            raise SettingError(f"{table}.{name}", why)
    if session.bars(bars).dates:
        table = "bars" if session.dates is None else here
        raise SettingError(f"{table}.dates", "the model reads compact lines, which have no times")
    if session.signed:
        why = "the model reads compact lines, which are parts of a price above zero: it needs decimal lines"
        raise SettingError(f"{here}.signed", why)
    if session.more_symbols:
        why = "the model reads compact lines, which are relative to one price: use a session for each symbol"
        raise SettingError(f"{here}.more_symbols", why)
    if session.rollup:
        why = "the model reads compact lines, which have no room for the prices and volumes of longer bars"
        raise SettingError(f"{here}.rollup", f"{why}: remove it, or use a model that reads decimal lines")
    unit = to_units(session.unit, session.scale)
    if unit is None:
        raise SettingError(
            f"{here}.unit", f"{session.unit} is finer than price_scale ({session.scale}) keeps"
        )
    return CompactSpec(
        session.price_decimals,
        unit,
        session.retention_tokens,
        retained_records(session, prompt),
        session.retention_span,
        price_scale=session.scale,
    )


def labels_of(symbols: Sequence[str]) -> tuple[str, ...]:
    """How lines name symbols VENUE:SYMBOL: without the venue, unless two are alike then."""
    short = tuple(symbol.partition(":")[2] for symbol in symbols)
    return short if len(set(short)) == len(short) else tuple(symbols)


def retention_of(session: SessionConfig, prompt: PromptFormat) -> Retention:
    """What its tape keeps. A span is kept by the rollup, if there is one: nothing leaves without it."""
    span = 0 if session.rollup else session.retention_span
    return Retention(session.retention_tokens, retained_records(session, prompt), span)


def retained_records(session: SessionConfig, prompt: PromptFormat) -> int:
    """Longest window in bars: as configured, or else what the model was trained on; 0 is no limit."""
    return session.retention_records or (prompt.terse.window_bars if prompt.terse is not None else 0)


def window_of(prompt: PromptFormat) -> Window:
    """What windows can hold: with a terse model, whose lines have one length, only their bars."""
    if prompt.terse is None:
        return kept_tokens
    line = len(prompt.encode(WIDEST_LINE))

    def tokens(session: SessionConfig) -> int:
        bars = retained_records(session, prompt)
        return min(session.retention_tokens, bars * line) if bars else session.retention_tokens

    return tokens


def prefixes_of(
    config: Config, prompt: PromptFormat, lines: Mapping[str, LineSpec | CompactSpec]
) -> EnginePrefixes:
    """The frozen prefixes before the first bar. Raises SettingError for questions that cannot be numbered."""
    prefixes = EnginePrefixes(prompt, partial(text_of, prompt), numbers=config.flash.placement == "frozen")
    asked = list(questions_of(structs.replace(config, sessions=config.all_sessions)))
    try:
        for session in config.all_sessions:
            questions = dict.fromkeys(each.question for each in asked if each.session == session.name)
            line = lines[session.name]
            prefixes.add(session, header_of(line), tuple(questions), explained(config, session, line, prompt))
    except PromptError as error:  # of the turns of worked examples
        raise SettingError("model.examples", str(error)) from error
    except ValueError as error:
        raise SettingError("flash.placement", str(error)) from error
    return prefixes


def explained(
    config: Config, session: SessionConfig, line: LineSpec | CompactSpec, prompt: PromptFormat
) -> Explanation:
    """What a session's prefix says of its lines. Raises SettingError for examples that cannot be shown."""
    examples, is_compact = config.model.examples, isinstance(line, CompactSpec)
    if examples and is_compact:
        raise SettingError("model.examples", "are not for compact lines: remove it, or set other lines")
    about = described(config, session, is_compact=is_compact) if config.model.describe else ""
    if isinstance(line, CompactSpec):
        return Explanation(about="" if prompt.terse is not None else about)
    return Explanation(line.form, about, example_turns(prompt, examples, line.form))


def header_of(line: LineSpec | CompactSpec) -> str | None:
    """What compact lines mean before their first anchor; None: other lines."""
    return line.blank.header if isinstance(line, CompactSpec) else None
