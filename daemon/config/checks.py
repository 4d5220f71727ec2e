"""Checks across keys: settings that are valid on their own but contradict each other."""

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from urllib.parse import SplitResult, urlsplit

from msgspec import structs

from daemon.config.answerable import refusal_of
from daemon.config.by_model import by_model, key_of_file
from daemon.config.errors import ConfigProblem
from daemon.config.question_sets import SETS
from daemon.config.schema import (
    ALL,
    BarsConfig,
    Config,
    ModelConfig,
    QuestionConfig,
    SessionConfig,
    required_keys,
)
from daemon.config.signals import signal_problems, webhook_problems
from daemon.config.standing import is_asked, refusal_by
from daemon.config.symbol_checks import symbol_problems
from feeds.connector import Connector
from feeds.connectors import SOURCES
from feeds.decimals import decimals_of
from feeds.quality.calendar import Calendar

KeyProblem = tuple[str, str]
"""The key, and what is wrong with it."""
_LEAST_LINE, _LEAST_BARS = 6, 64
"""Of the tape model, which has the shortest lines: tokens of one, and the bars of its window."""
_TCP = re.compile(r"tcp://(.*):[^:]*")


def cross_check(config: Config) -> list[ConfigProblem]:
    """Every contradiction between settings."""
    checks = (
        _sessions,
        _models,
        _aliases,
        _symbols,
        _units,
        _price_scales,
        _rollups,
        _questions,
        _answerable,
        signal_problems,
        webhook_problems,
        _positions,
        _pool,
        _scheduler,
        _bars,
        _quality,
        _source,
        _brokers_named,
        _delivery,
        _standby,
        _query,
        _access,
        _process,
        _traces,
    )
    return [ConfigProblem(*problem) for check in checks for problem in check(config)]


def exposure_warnings(config: Config) -> list[ConfigProblem]:
    """One warning for each socket that other machines can use or read without a key."""
    bound: dict[str, str] = {}
    for table, connector in connectors_of(config).items():
        if not connector.authenticates():
            bound |= {f"{table}.{key}": _tcp_host(each) for key, each in connector.bound().items()}
    found = [
        (key, host, "clients of other machines can use it unauthenticated")
        for key, host in bound.items()
        if host
    ]
    if not config.http.tls_certificate_file:
        why = "without http.tls_certificate_file, or a proxy that has one, keys are sent in the clear"
        found.append(("http.host", config.http.host, why))
    return [
        ConfigProblem(key, f"{host} is not a loopback address: {why}")
        for key, host, why in found
        if not is_loopback(host)
    ]


def connectors_of(config: Config) -> dict[str, Connector]:
    """The connectors in use, by the dotted key of their tables."""
    found: dict[str, Connector] = {f"sink.{name}": sink for name, sink in config.sink.connectors.items()}
    return found | {table: connector for table, (_, connector) in config.feeds.items()}


def bound_endpoints(config: Config) -> dict[str, str]:
    """The endpoints that connectors bind, by dotted key."""
    return {
        f"{table}.{key}": endpoint
        for table, connector in connectors_of(config).items()
        for key, endpoint in connector.bound().items()
    }


def _tcp_host(endpoint: str) -> str:
    match = _TCP.fullmatch(endpoint)
    return match[1].strip("[]") if match else ""


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def _repeated(values: list[str]) -> Iterator[tuple[int, int]]:
    """(index, index of the first equal one) of every repeated value."""
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        if first.setdefault(value, index) != index:
            yield index, first[value]


def tables_of(config: Config) -> Iterator[tuple[str, SessionConfig]]:
    """The sessions, and an example of each pattern's, by their tables."""
    for index, session in enumerate(config.sessions):
        yield f"sessions[{index}]", session
    for index, pattern in enumerate(config.patterns):
        yield f"patterns[{index}]", pattern.example


def _sessions(config: Config) -> Iterator[KeyProblem]:
    names = [session.name for session in config.sessions]
    for index, first in _repeated(names):
        yield f"sessions[{index}].name", f"{names[index]!r} is already sessions[{first}].name"
    for index, session in enumerate(config.sessions):
        here = f"sessions[{index}].more_symbols"
        for at, _ in _repeated(list(session.symbols)):
            yield here, f"{session.symbols[at]!r} appears twice: remove one"
        if session.more_symbols and session.lines == "compact":
            yield here, 'compact lines are relative to one price: remove it, or set lines = "decimal"'


def models_of(config: Config) -> Iterator[tuple[str, ModelConfig]]:
    """The models by their tables."""
    yield "model", config.model
    for index, model in enumerate(config.models):
        yield f"models[{index}]", model


def _models(config: Config) -> Iterator[KeyProblem]:
    """Each name means one model, and each session's model is there."""
    named: dict[str, str] = {}
    for table, model in models_of(config) if config.models else ():
        for key, name in (("name", model.name), *(("aliases", each) for each in model.aliases)):
            if name and named.setdefault(name, f"{table}.{key}") != f"{table}.{key}":
                yield f"{table}.{key}", f"{name!r} is already {named[name]}"
    for table, model in models_of(config):
        if table != "model" and model.threads:
            yield f"{table}.threads", "one thread runs all models: set model.threads for them"
    names = [model.name for _, model in models_of(config) if model.name]
    tables = [(f"sessions[{n}]", each.model) for n, each in enumerate(config.sessions)]
    tables += [(f"patterns[{n}]", each.model) for n, each in enumerate(config.patterns)]
    for table, name in tables:
        if name and name not in names:
            known = ", ".join(names) or "that of [model], without a name"
            yield f"{table}.model", f"there is no model named {name!r}; there are: {known}"


def _answerable(config: Config) -> Iterator[KeyProblem]:
    """Of several models, one of those that are asked can answer, and each that is named."""
    if not config.models:
        return
    models = [config.model_of(each) for each in config.all_sessions]
    for question in SETS[config.standing] if models else ():
        refused = [refusal_of(each, question) for each in models]
        if all(refused):
            yield "standing", f"no session's model can answer {question.name!r}: {refused[0]}"
    for index, asked in enumerate(config.questions):
        sessions = [each for each in config.all_sessions if is_asked(asked, each.name)]
        why = {each.name: refusal_by(config.model_of(each), asked) for each in sessions}
        if why and all(why.values()):
            yield f"questions[{index}].text", f"no session's model can answer it: {next(iter(why.values()))}"
            continue
        for name in asked.sessions:
            if why.get(name):
                yield f"questions[{index}].sessions", f"{name}: {why[name]}"


def _aliases(config: Config) -> Iterator[KeyProblem]:
    for table, model in models_of(config):
        for index, alias in enumerate(model.aliases):
            if not alias or alias.startswith("session:"):
                why = f"{alias!r} must not be empty or begin with session:, as sessions do"
                yield f"{table}.aliases[{index}]", why


def _symbols(config: Config) -> Iterator[KeyProblem]:
    yield from symbol_problems(config, tables_of(config))


def _units(config: Config) -> Iterator[KeyProblem]:
    for table, session in tables_of(config):
        here = f"{table}.unit"
        if session.unit < 0:
            yield here, f"{session.unit} is below 0"
        elif session.unit and session.lines not in ("auto", "compact"):
            yield here, 'is for compact lines: remove it, or set lines = "compact"'
        elif decimals_of(session.unit) > session.price_decimals:
            yield here, f"{session.unit} has more than {session.price_decimals} (price_decimals) decimals"


def _price_scales(config: Config) -> Iterator[KeyProblem]:
    for table, session in tables_of(config):
        if session.price_decimals > session.scale:
            yield (
                f"{table}.price_decimals",
                f"{session.price_decimals} decimals are more than the price_scale of {session.scale} keeps",
            )
    scales: dict[str, tuple[int, int]] = {}
    for index, session in enumerate(config.sessions):
        for symbol in session.symbols:
            first, scale = scales.setdefault(symbol, (index, session.scale))
            if scale != session.scale:
                yield (
                    f"sessions[{index}].price_scale",
                    f"{session.scale}, but sessions[{first}] has {scale} for {symbol}: all sessions of a "
                    "symbol have the same",
                )
            if config.sessions[first].signed != session.signed:
                why = f"sessions[{first}] says otherwise of {symbol}: all sessions of a symbol have the same"
                yield f"sessions[{index}].signed", why


def _rollups(config: Config) -> Iterator[KeyProblem]:
    for table, session in tables_of(config):
        here, shorter = f"{table}.rollup", session.bars(config.bars).interval
        if session.rollup and session.bars(config.bars).late == "amend":
            yield here, 'longer bars are not amended: remove it, or set late = "drop" or "refuse"'
        if session.rollup and config.events.on_split != "line":
            why = f'{here} sums up what leaves the window, which goes on: remove it, or set "line"'
            yield "events.on_split", why
        if session.rollup and session.lines == "compact":
            why = 'compact lines have no room for longer bars: remove it, or set lines = "decimal"'
            yield here, why
        for at, tier in enumerate(session.rollup):
            if shorter and (tier.interval <= shorter or tier.interval % shorter):
                yield (
                    f"{here}[{at}].interval",
                    f"{tier.interval} is no multiple of {shorter}, the length of the bars it sums up",
                )
            shorter = tier.interval


def _questions(config: Config) -> Iterator[KeyProblem]:
    known = {session.name for session in config.sessions}
    limit = config.scheduler.max_new_tokens
    for index, first in _repeated([question.name for question in config.questions]):
        name = config.questions[index].name
        yield f"questions[{index}].name", f"{name!r} is already questions[{first}].name"
    for index, question in enumerate(config.questions):
        here = f"questions[{index}]"
        for name in question.sessions:
            if not config.patterns and not any(fnmatchcase(each, name) for each in known):
                yield f"{here}.sessions", f"there is no session named {name!r}"
        for at, _ in _repeated(list(question.choices)):
            yield f"{here}.choices", f"{question.choices[at]!r} appears twice: remove one"
        if len(question.choices) == 1:
            yield f"{here}.choices", "a single choice decides nothing: give two or more, or none"
        if question.answer == "number" and question.choices:
            yield f"{here}.answer", "is a number or one of the choices: remove one of the keys"
        if question.publish_when == "crossed" and question.choices:
            yield f"{here}.publish_when", "only a number crosses a level: remove the choices"
        if question.ask_every and question.ask_every_bars > 1:
            yield f"{here}.ask_every", "contradicts ask_every_bars: remove one"
        if question.rule:
            from daemon.config import label_rules  # reads bars, which few configurations need

            if why := label_rules.problem(config, question):
                yield f"{here}.rule", why
        if question.max_error is not None and (why := _unlabelled(config, question)):
            yield f"{here}.max_error", why
        if question.pack:
            from daemon.config import taught

            if why := taught.problem(question):
                yield f"{here}.pack", why
        if question.max_tokens > limit:
            yield f"{here}.max_tokens", f"{question.max_tokens} is above scheduler.max_new_tokens {limit}"


def _unlabelled(config: Config, asked: QuestionConfig) -> str:
    """Why its answers can have neither labels nor a calibration; "" where they can."""
    if not asked.choices:
        return "needs choices: other answers have neither labels nor a calibration"
    if asked.provisional:
        return "answers behind open bars have neither labels nor a calibration: remove provisional"
    sessions = (each for each in config.all_sessions if is_asked(asked, each.name))
    if any(config.model_of(each).calibration == "off" for each in sessions):
        return "model.calibration is off, and answers without one get no label either: remove one of the keys"
    return ""


def _positions(config: Config) -> Iterator[KeyProblem]:
    """Positions cover the frozen prefix, rollup, tape, the question and its answer (see regions)."""
    question = config.scheduler.max_prompt_tokens + config.scheduler.max_new_tokens
    for table, session in tables_of(config):
        rollup = f", rollup_tokens {session.rollup_tokens}" if session.rollup else ""
        if session.retention_tokens + session.summed_tokens + question >= config.pool.frame_limit:
            yield (
                "pool.frame_limit",
                f"{config.pool.frame_limit} is too small for the system prompt,"
                f" {table}.retention_tokens {session.retention_tokens}{rollup}"
                f" and scheduler.max_prompt_tokens + max_new_tokens {question}: raise it, or lower them",
            )


def _pool(config: Config) -> Iterator[KeyProblem]:
    """The engine checks again: with lines = "auto" the model decides how long they are."""

    def at_least(session: SessionConfig) -> SessionConfig:
        if session.lines != "auto":
            return session
        window = _LEAST_LINE * (session.retention_records or _LEAST_BARS)
        return structs.replace(session, retention_tokens=min(session.retention_tokens, window))

    for number, part in enumerate(by_model(config)):
        if part.pool.blocks and part.pool.memory:
            yield key_of_file(config, number, "pool.memory"), "sizes the pool, as blocks do: set one of them"
        for key, why in pool_problems(part, at_least):
            yield key_of_file(config, number, key), why


def pool_problems(config: Config, known: Callable[[SessionConfig], SessionConfig]) -> Iterator[KeyProblem]:
    """Whether the pool holds the windows of all sessions that may be open at once.

    ``known``: a session with what is known of its lines.
    """
    if not config.opens_by_partition:
        yield from pool_size(config, [known(each) for each in config.sessions])
    examples = [each.example for each in config.patterns]
    for session in config.all_sessions if config.opens_by_partition else examples:
        if problems := list(pool_size(config, [known(session)])):
            yield from problems
            return


def pool_size(config: Config, sessions: Sequence[SessionConfig]) -> Iterator[KeyProblem]:
    """Whether the pool holds the windows of these sessions together."""
    tokens = config.pool.blocks * config.pool.block_size
    # an exact session has two windows during a refresh, a compact one while it gets another anchor, and one
    # with a rollup while bars move there
    windows = [
        session.retention_tokens * (2 if twice else 1) + 2 * session.summed_tokens
        for session in sessions
        for twice in [session.semantics == "exact" or session.lines == "compact" or bool(session.rollup)]
    ]
    if config.flash.placement == "frozen":  # one session at a time gets other numbered questions
        windows.append(max((s.retention_tokens for s in sessions if s.semantics == "carry"), default=0))
    limits = config.scheduler
    # readers of a version keep what the next append evicts: allow one more append per session
    appended = [min(session.retention_tokens, limits.max_batch_tokens) for session in sessions]
    kept, appends = sum(windows), sum(appended)
    if config.pool.idle_spill:  # the windows of all sessions but one may be on disk
        kept, appends = max(windows, default=0), max(appended, default=0)
    question = limits.max_prompt_tokens + limits.max_new_tokens
    needed = kept + appends + question
    if tokens and tokens < needed:
        remedy = "give it more memory" if config.pool.memory else "add blocks"
        yield (
            config.pool.size_key,
            f"{config.pool.blocks} blocks of {config.pool.block_size} have room for {tokens} tokens, but"
            f" {needed} are needed ({kept} for windows, {appends} for appends, {question} for a question):"
            f" {remedy}, or set 0 to size the pool from the sessions",
        )


def _scheduler(config: Config) -> Iterator[KeyProblem]:
    least, most = config.scheduler.chunk_min, config.scheduler.max_batch_tokens
    if least > most:
        yield "scheduler.chunk_min", f"{least} is above scheduler.max_batch_tokens {most}"
    if config.scheduler.eviction == "swap" and not config.pool.host_blocks:
        yield "scheduler.eviction", "swap needs a host tier: set pool.host_blocks"
    if not config.scheduler.share_window:
        yield "scheduler.share_window", "a window needs a length above 0, such as 10s"


def _bars(config: Config) -> Iterator[KeyProblem]:
    here: list[tuple[str, BarsConfig]] = [("bars", config.bars)]
    here += [(table, session.bars(config.bars)) for table, session in tables_of(config)]
    for table, bars in here:
        own = table == "bars" or bars != config.bars
        if own and bars.interval == 0:
            yield f"{table}.interval", "a bar needs a length above 0, such as 1s"
        if own and 0 < bars.price_jump <= 1:
            why = f"a factor between two prices must be above 1, or 0 for no limit, not {bars.price_jump:g}"
            yield f"{table}.price_jump", why


def _quality(config: Config) -> Iterator[KeyProblem]:
    if config.quality.reordered == "hold" and not any(
        bars.lateness for bars in (config.bars, *(each.bars(config.bars) for each in config.sessions))
    ):
        yield "quality.reordered", "hold needs a bar that stays open: set bars.lateness"
    for index, calendar in enumerate(config.quality.calendars):
        try:
            Calendar(calendar.zone, calendar.hours, calendar.holidays, calendar.half_days)
        except ValueError as error:
            yield f"quality.calendars[{index}]", str(error)
    venues = [each.venue for each in config.quality.calendars]
    for index, first in _repeated(venues):
        yield f"quality.calendars[{index}].venue", f"{venues[index]!r} is already quality.calendars[{first}]"


def _source(config: Config) -> Iterator[KeyProblem]:
    kind = config.source.kind
    if kind != "none" and config.source.connector is None:
        needed = f"the table [source.{kind}] is needed, with {', '.join(required_keys(SOURCES[kind]))}"
        yield f"source.{kind}", f'source.kind is "{kind}", so {needed}'
    reads = config.sessions or config.patterns
    if kind != "none" and not reads:
        yield "sessions", "the source has no session to read its records: add a [[sessions]] table"
    if config.sources and not reads:
        yield "sessions", "the sources have no session to read them: add a [[sessions]] table"
    names = [kind, *(source.name for source in config.sources)]
    for index, first in _repeated(names):
        other = f"sources[{first - 1}].name" if first else "source.kind"
        yield f"sources[{index - 1}].name", f"{names[index]!r} is already {other}"
    for index, source in enumerate(config.sources):
        if source.name == ALL:
            yield f"sources[{index}].name", f"{ALL!r} names all sources together: take another"
        if len(source.tables) != 1:
            given = ", ".join(source.tables) or "none"
            yield f"sources[{index}]", f"needs one table of {', '.join(SOURCES)}; there is: {given}"
    capacity = config.source.ring_capacity
    if capacity & (capacity - 1):
        nearest = 1 << (capacity.bit_length())
        yield "source.ring_capacity", f"{capacity} is not a power of two (the next one is {nearest})"


def _delivery(config: Config) -> Iterator[KeyProblem]:
    sink = config.sink.kafka
    if sink is None or sink.delivery != "exactly_once":
        return
    here, feeds = "sink.kafka.delivery", [connector for _, connector in config.feeds.values()]
    if len(feeds) != 1 or config.source.kind != "kafka":
        yield here, 'exactly_once commits offsets with answers: set source.kind = "kafka", alone'
    elif (mine := _brokers(sink.bootstrap)) != (theirs := _brokers(config.source.kafka.bootstrap)):
        shown = f"{', '.join(sorted(mine))}, the source's are {', '.join(sorted(theirs))}"
        yield here, f"a transaction is of one cluster: the sink's brokers are {shown}"


def _standby(config: Config) -> Iterator[KeyProblem]:
    if not config.recovery.standby:
        return
    here = "recovery.standby"
    if len(config.feeds) != 1 or config.source.kind != "kafka":
        kinds = ", ".join(sorted(name for name, _ in config.feeds.values())) or "none"
        why = f'only a Kafka source has a consumer group: set source.kind = "kafka", alone, not {kinds}'
        yield here, why
    elif config.source.kafka.start_at != "committed":
        why = f'a standby goes on from what is committed: set start_at = "committed", not {here}'
        yield "source.kafka.start_at", why


def _brokers_named(config: Config) -> Iterator[KeyProblem]:
    for table, connector in connectors_of(config).items():
        try:
            check_brokers(getattr(connector, "bootstrap", ""))
        except ValueError as error:
            yield f"{table}.bootstrap", str(error)


def check_brokers(text: str) -> str:
    """``text``, which names brokers. Raises ValueError for the first that is none."""
    for broker in filter(None, _brokers(text)):
        if not _is_broker(broker):
            raise ValueError(f"{broker!r} is no broker: write host:port, such as kafka.corp:9092")
    return text


def _is_broker(text: str) -> bool:
    """Whether it is a host, or its address, and perhaps a port."""
    try:
        parts = urlsplit(f"//{text}")
        (parts.hostname or "").encode("idna")
        return bool(parts.hostname) and text.lower() == _authority(parts)
    except ValueError:
        return False


def _is_origin(text: str) -> bool:
    """Whether it is scheme, host and perhaps a port, as in the header Origin."""
    try:
        parts = urlsplit(text)
        default = {"http": 80, "https": 443}.get(parts.scheme)
        is_shown = default not in (None, parts.port) and text == f"{parts.scheme}://{_authority(parts)}"
        return bool(parts.hostname) and is_shown
    except ValueError:
        return False


def _authority(parts: SplitResult) -> str:
    """Host and port, as they are written in lower case. Raises ValueError for a port that is none."""
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return shown if parts.port is None else f"{shown}:{parts.port}"


def _brokers(bootstrap: str) -> frozenset[str]:
    return frozenset(each.strip() for each in bootstrap.split(","))


def _process(config: Config) -> Iterator[KeyProblem]:
    if config.process.reserve_core and config.process.mode != "two":
        yield "process.reserve_core", 'gateway and engine share a process: set mode = "two"'
    if config.http.mcp and find_spec("mcp") is None:
        yield "http.mcp", "the MCP SDK is not installed: pip install 'foretick[mcp]'"


def _query(config: Config) -> Iterator[KeyProblem]:
    if config.query.max_wait == 0:
        yield "query.max_wait", "a request needs a time limit above 0, such as 30s"
    if 0 < config.query.max_prompts < config.query.max_prompts_each:
        yield (
            "query.max_prompts_each",
            f"{config.query.max_prompts_each} is above query.max_prompts {config.query.max_prompts}",
        )


def _access(config: Config) -> Iterator[KeyProblem]:
    """Keys, where other machines can reach a socket; CURVE where there are keys."""
    keyed, query = bool(config.tenants.file), config.query
    bound = {"http.host": config.http.host, "query.endpoint": _tcp_host(query.endpoint)}
    for key, host in bound.items():
        if host and not keyed and not is_loopback(host):
            why = "clients of other machines need keys: name a tenants file (tenants.file)"
            yield key, f"{host} is not a loopback address, and {why}"
    if keyed and query.endpoint and not query.secret_key_file:
        why = (
            'with a tenants file clients of this socket have CURVE keys, and so must it; or set endpoint = ""'
        )
        yield "query.secret_key_file", f"missing: {why}"
    if query.secret_key_file and not keyed:
        yield "query.secret_key_file", "needs tenants.file, which says who may connect"
    for index, origin in enumerate(config.http.allowed_origins):
        if not _is_origin(origin):
            why = "is no origin: write scheme and host as browsers do, such as https://desk.example:8443"
            yield f"http.allowed_origins[{index}]", f"{origin!r} {why}"
    if bool(config.http.tls_certificate_file) != bool(config.http.tls_key_file):
        missing = "tls_key_file" if config.http.tls_certificate_file else "tls_certificate_file"
        yield f"http.{missing}", "missing: TLS needs a certificate and its key"


def _traces(config: Config) -> Iterator[KeyProblem]:
    endpoint = config.traces.endpoint
    if not endpoint:
        return
    try:
        address = urlsplit(endpoint)
        valid = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        valid = False
    if not valid:
        yield "traces.endpoint", f"{endpoint!r} is no address such as http://127.0.0.1:4318/v1/traces"
    elif find_spec("httpx2") is None:
        yield "traces.endpoint", "httpx2 is not installed: pip install 'foretick[otel]'"
