"""The configuration: layers, refusals by key, contradictions, and the rendered reference."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.checks import exposure_warnings
from daemon.config.key_reference import configuration_reference
from daemon.config.load import POLICIES, ConfigError, load_config, read_toml
from daemon.config.standing import question_of, table_of
from daemon.engine.build import costs_of, limits_of
from feeds.connector import SettingError
from feeds.decimals import from_units
from feeds.durations import Duration, parse_duration
from feeds.timestamps import Instant, parse_instant
from scheduler.interfaces import Limits
from scheduler.policies import NAMES, Ordering

ROOT = Path(__file__).parents[3]
TWO_SESSIONS = """
[[sessions]]
name = "a"
symbol = "X:A"
[[sessions]]
name = "b"
symbol = "X:B"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "foretick.toml"
    path.write_text(text)
    return path


def problems(tmp_path: Path, text: str, environment=None, overrides=None) -> dict[str, str]:
    """Messages of a refused configuration, by key; fails when it is accepted."""
    with pytest.raises(ConfigError) as refused:
        load_config(write(tmp_path, text), environment or {}, overrides)
    return {problem.key: problem.message for problem in refused.value.problems}


def test_without_a_file_every_key_has_its_default():
    config = load_config(None, {})
    assert config.pool.block_size == 16
    assert config.bars.interval == 1_000_000_000
    assert config.query.endpoint == "tcp://127.0.0.1:7801"
    assert config.source.kind == "none"
    assert config.sink.kafka is None
    assert exposure_warnings(config) == []


def test_flags_win_over_environment_and_environment_over_file(tmp_path):
    path = write(
        tmp_path, "[scheduler]\nmax_batch_tokens = 2\nchunk_min = 1\nmax_prompt_tokens = 2\n[http]\nport = 2"
    )
    environment = {"FORETICK_SCHEDULER__MAX_PROMPT_TOKENS": "3", "FORETICK_HTTP__PORT": "3", "HOME": "/x"}
    config = load_config(path, environment, {"http.port": "4"})
    assert config.scheduler.max_batch_tokens == 2
    assert config.scheduler.max_prompt_tokens == 3
    assert config.http.port == 4


def test_override_text_is_read_as_the_key_asks(tmp_path):
    path = write(tmp_path, TWO_SESSIONS)
    config = load_config(
        path,
        {
            "FORETICK_MODEL__PATH": "123",
            "FORETICK_LOG__JSON": "true",
            "FORETICK_SCHEDULER__CELL_BUDGET": "0.25",
            "FORETICK_BARS__INTERVAL": "5m",
            "FORETICK_SESSIONS__1__RETENTION_TOKENS": "512",
            "FORETICK_SOURCE__KAFKA__BOOTSTRAP": "h:1",
            "FORETICK_SOURCE__KAFKA__TOPICS": "t1, t2",
            "FORETICK_SOURCE__REPLAY": '{"file": "f", "format": "g", "from": "2024-01-01T00:00:00Z"}',
            "FORETICK_QUESTIONS": '[{"name": "q", "text": "t?", "choices": ["Yes", "No"]}]',
        },
    )
    assert config.model.path == "123"
    assert config.log.json is True
    assert config.scheduler.cell_budget == 0.25
    assert config.bars.interval == 300 * 10**9
    assert [s.retention_tokens for s in config.sessions] == [4096, 512]
    assert config.source.kafka is not None
    assert config.source.kafka.topics == ("t1", "t2")
    assert config.source.replay is not None
    assert config.source.replay.from_ == 1704067200 * 10**9
    assert config.questions[0].choices == ("Yes", "No")


def test_typed_overrides_are_taken_as_they_are():
    config = load_config(None, {}, {"http.port": 0, "source.kafka": {"bootstrap": "h:1"}})
    assert config.http.port == 0
    assert config.source.kafka is not None
    assert config.source.kafka.group == "foretick"


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("poool = 1", "poool", "no such key"),
        ("[pool]\nblok = 1", "pool.blok", "did you mean blocks?"),
        ('[source.zeromq]\nendpoints = ["e"]', "source.zeromq.endpoints", "did you mean endpoint?"),
        (TWO_SESSIONS + "[sessions.extra]", "sessions[1].extra", "no such key"),
        ('[pool]\nblocks = "many"', "pool.blocks", "expected int, got str"),
        ("[pool]\nblocks = -1", "pool.blocks", ">= 0"),
        ('[pool]\nhost_blocks = "many"', "pool.host_blocks", "must be a number or auto, not 'many'"),
        ("[pool]\nhost_blocks = -1", "pool.host_blocks", ">= 0"),
        ("[pool]\nmemory = -0.5", "pool.memory", ">= 0"),
        ("[pool]\nmemory = 0.5\nblocks = 4096", "pool.memory", "as blocks do: set one of them"),
        ("[scheduler]\ncell_budget = 0", "scheduler.cell_budget", "> 0"),
        ("[bars]\ninterval = 1", "bars.interval", "expected a duration"),
        ('[bars]\ninterval = "1 s"', "bars.interval", "expected a duration"),
        ('[bars]\nempty = "flat"', "bars.empty", "must be one of emit, fill, skip, not 'flat'"),
        ('[model]\ndevice = "cuda:3"', "model.device", "must be one of auto, cpu, cuda, not 'cuda:3'"),
        (TWO_SESSIONS + 'semantics = "carrying"', "sessions[1].semantics", "carry, exact, not 'carrying'"),
        (
            TWO_SESSIONS + '[source]\nkind = "kafka"\n[source.kafka]\nbootstrap = "b:9092,kafka..corp:9092"',
            "source.kafka.bootstrap",
            "no broker",
        ),
        ('[sink.kafka]\nbootstrap = "b:port"', "sink.kafka.bootstrap", "no broker"),
        ('[[sessions]]\nname = "a"', "sessions[0]", "symbol"),
        ('[[sessions]]\nname = "a b"\nsymbol = "X:A"', "sessions[0].name", "0 to 9, _, . and -"),
        ('[[sessions]]\nname = "a"\nsymbol = "BTCUSDT"', "sessions[0].symbol", "VENUE:SYMBOL, such as"),
        (
            '[query]\nendpoint = "127.0.0.1:1"',
            "query.endpoint",
            'tcp://host:port or ipc://path, or "" for none',
        ),
        ('[source.replay]\nfile="f"\nformat="g"\nfrom=2024-01-01T00:00:00', "source.replay.from", "zone"),
        ("[http]\nport = 65536", "http.port", "<= 65535"),
    ],
)
def test_a_bad_key_or_value_is_refused_by_name(tmp_path, text, key, part):
    found = problems(tmp_path, text)
    assert list(found) == [key]
    assert part in found[key]


@pytest.mark.parametrize(
    ("variable", "value", "key", "part"),
    [
        ("FORETICK_POOL__BLOKS", "1", "pool.bloks", "did you mean blocks?"),
        ("FORETICK_NOTHING", "1", "nothing", "no such key"),
        ("FORETICK_POOL__BLOCKS__DEEPER", "1", "pool.blocks.deeper", "no such key"),
        ("FORETICK_POOL__BLOCKS", "many", "pool.blocks", "cannot read 'many'"),
        ("FORETICK_POOL__BLOCKS", "[" * 5000, "pool.blocks", "cannot read"),
        ("FORETICK_POOL__BLOCKS", '"1"', "pool.blocks", "expected int, got str"),
        ("FORETICK_POOL__HOST_BLOCKS", "many", "pool.host_blocks", "cannot read 'many'"),
        ("FORETICK_SESSIONS__A__NAME", "z", "sessions.a", "by number"),
        ("FORETICK_SESSIONS__2__NAME", "z", "sessions.2", "2 elements"),
        ("FORETICK_BARS__INTERVAL", "soon", "bars.interval", "duration"),
        ("FORETICK_SESSIONS__0__RETENTION_TOKENS", "1", "sessions[0].retention_tokens", ">= 64"),
    ],
)
def test_a_bad_variable_is_refused_by_key_and_variable(tmp_path, variable, value, key, part):
    found = problems(tmp_path, TWO_SESSIONS, {variable: value})
    assert list(found) == [key]
    assert part in found[key]
    assert variable in found[key]


def test_variables_of_the_test_suite_are_not_settings():
    assert load_config(None, {"FORETICK_DATA": "/x", "FORETICK_KAFKA": "h:1"}) == load_config(None, {})


def test_a_scalar_where_an_override_needs_a_table_is_refused(tmp_path):
    assert "table" in problems(tmp_path, "pool = 3", {"FORETICK_POOL__BLOCKS": "1"})["pool"]


@pytest.mark.parametrize("text", ["a = ", '"', "\xff"])
def test_a_file_that_is_not_toml_is_refused(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_config(path, {})


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml", {})


def test_all_contradictions_are_named_at_once(tmp_path):
    found = problems(
        tmp_path,
        """
        [[sessions]]
        name = "a"
        symbol = "X:A"
        retention_tokens = 6000
        [[sessions]]
        name = "a"
        symbol = "X:A"
        [[questions]]
        name = "q"
        text = "?"
        choices = ["Yes", "Yes"]
        sessions = ["zz"]
        max_tokens = 257
        [[questions]]
        name = "q"
        text = "?"
        choices = ["Yes"]
        [pool]
        blocks = 10
        [scheduler]
        chunk_min = 2000
        [bars]
        interval = "0s"
        [source]
        kind = "kafka"
        ring_capacity = 1000
        [query]
        max_wait = ""
        """,
    )
    assert set(found) == {
        "sessions[1].name",
        "questions[0].choices",
        "questions[0].sessions",
        "questions[0].max_tokens",
        "questions[1].name",
        "questions[1].choices",
        "pool.frame_limit",
        "pool.blocks",
        "scheduler.chunk_min",
        "bars.interval",
        "source.kafka",
        "source.ring_capacity",
        "query.max_wait",
    }
    assert "1024" in found["source.ring_capacity"]
    assert "'zz'" in found["questions[0].sessions"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("http.host", "0.0.0.0"), ("query.endpoint", "tcp://*:1"), ("query.endpoint", "tcp://[::]:1")],
)
def test_a_wide_bind_needs_keys(key, value):
    with pytest.raises(ConfigError) as refused:
        load_config(None, {}, {key: value})
    assert [(p.key, "tenants.file" in p.message) for p in refused.value.problems] == [(key, True)]
    keyed = {key: value, "tenants.file": "t.toml", "query.secret_key_file": "k.secret"}
    assert [warning.key for warning in exposure_warnings(load_config(None, {}, keyed))] == (
        ["http.host"] if key == "http.host" else []
    )
    tls = {"http.tls_certificate_file": "c.pem", "http.tls_key_file": "k.pem"}
    assert exposure_warnings(load_config(None, {}, keyed | tls)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("http.host", "localhost"), ("query.endpoint", "tcp://[::1]:1"), ("query.endpoint", "ipc:///run/q")],
)
def test_a_local_bind_is_not_warned_about(key, value):
    assert exposure_warnings(load_config(None, {}, {key: value})) == []


def test_a_zeromq_sink_or_source_bound_widely_is_warned_about(tmp_path):
    text = TWO_SESSIONS + '[source]\nkind="zeromq"\n[source.zeromq]\nendpoint="tcp://0.0.0.0:1"\nbind=true\n'
    text += '[sink.zeromq]\nendpoint="tcp://eth0:2"'
    warnings = exposure_warnings(load_config(write(tmp_path, text), {}))
    assert [warning.key for warning in warnings] == ["sink.zeromq.endpoint", "source.zeromq.endpoint"]


def test_settings_cross_process_boundaries():
    config = load_config(None, {}, {"bars.interval": "90s"})
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert isinstance(copy.bars.interval, Duration)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("", 0),
        ("0s", 0),
        ("7ns", 7),
        ("1us", 10**3),
        ("250ms", 250 * 10**6),
        ("1.5s", 1_500_000_000),
        ("1m", 60 * 10**9),
        ("2h", 7200 * 10**9),
        ("1d", 86400 * 10**9),
    ],
)
def test_durations_are_read_as_nanoseconds(text, ns):
    assert parse_duration(text) == ns


@given(st.integers(0, 10**18))
def test_a_duration_reads_back_what_it_prints(ns):
    assert parse_duration(str(Duration(ns))) == ns


@pytest.mark.parametrize("bad", ["1", "s", "-1s", "1S", "1.5ns", "1e3s", "999999999999d", None, 1.0])
def test_text_that_is_no_duration_is_refused(bad):
    with pytest.raises(ValueError, match=r"duration|whole number|longer"):
        parse_duration(bad)


def test_instants_are_exact_and_need_a_zone():
    assert parse_instant("2020-01-01T17:00:00.065001-05:00") == 1577916000065001000
    assert str(Instant(1577916000065001002)) == "2020-01-01T22:00:00.065001002Z"
    assert parse_instant("2020-01-01T22:00:00.065001002Z") == 1577916000065001002
    for bad in (
        "2020-01-01T00:00:00",
        "yesterday",
        3,
        "2020-01-01T00:00:60Z",
        "2020-01-01T00:00:00.0000000001Z",
    ):
        with pytest.raises(ValueError, match="with a zone"):
            parse_instant(bad)


def test_a_time_that_toml_would_shorten_is_refused(tmp_path):
    file = tmp_path / "config.toml"
    start = "[source]\nkind = 'replay'\n[source.replay]\nfile = 'a'\nformat = 'b'\n"
    file.write_text(f"{start}from = 2020-01-01T00:00:00.065001002Z\n")
    with pytest.raises(ConfigError, match="line 6"):
        read_toml(file)
    for exact in (
        "2020-01-01T00:00:00.065001000Z",
        "'2020-01-01T00:00:00.065001002Z' # 2020-01-01T00:00:00.0650010021",
    ):
        file.write_text(f"{start}from = {exact}\n")
        read_toml(file)


@pytest.mark.parametrize("name", ["kafka", "zeromq", "replay"])
def test_examples_are_valid_and_use_the_source_they_are_named_after(name):
    config = load_config(ROOT / "examples" / f"{name}.toml", {})
    assert config.source.kind == name
    assert config.sessions
    assert exposure_warnings(config) == []


def test_the_committed_reference_is_the_rendered_one():
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_reference(), (
        "run: python -m daemon.config.key_reference > docs/configuration.md"
    )


@pytest.mark.parametrize(("name", "policy"), POLICIES.items())
def test_scheduler_type_names_a_policy_over_the_file_and_under_our_own_variable(tmp_path, name, policy):
    path = write(tmp_path, '[scheduler]\npolicy = "lpm"\n')
    assert load_config(path, {"SCHEDULER_TYPE": name}).scheduler.policy == policy
    both = {"SCHEDULER_TYPE": name, "FORETICK_SCHEDULER__POLICY": "mcps"}
    assert load_config(path, both).scheduler.policy == "mcps"
    assert (
        load_config(path, {"SCHEDULER_TYPE": name}, {"scheduler.policy": "vllm"}).scheduler.policy == "vllm"
    )


def test_every_policy_has_a_name_for_scheduler_type():
    assert set(POLICIES.values()) == set(NAMES)
    for policy in NAMES:
        assert Ordering(load_config(None, {}, {"scheduler.policy": policy}).scheduler.policy).key


@pytest.mark.parametrize("name", ["", "fcfs", "SJF"])
def test_an_unknown_scheduler_type_is_refused_with_all_that_are_known(tmp_path, name):
    found = problems(tmp_path, "", {"SCHEDULER_TYPE": name})
    assert repr(name) in found["scheduler.policy"]
    assert all(known in found["scheduler.policy"] for known in POLICIES)


SESSION = '[[sessions]]\nname = "a"\nsymbol = "X:A"\n'
SECOND = SESSION.replace('"a"', '"b"')
QUESTION = '[[questions]]\nname = "q"\ntext = "Up?"\n'
COMPACT = f'{SESSION}lines = "compact"\n'
ZEROMQ = '[sources.zeromq]\nendpoint = "ipc://x"\n'
SOURCES = f'{SESSION}[source]\nkind = "zeromq"\n[source.zeromq]\nendpoint = "ipc://x"\n'
KAFKA = f'{SESSION}[source]\nkind = "kafka"\n[source.kafka]\nbootstrap = "b:1,a:1"\n'
SINK = '[sink.kafka]\nbootstrap = "a:1, b:1"\ndelivery = "exactly_once"\n'
STANDBY = "[recovery]\nstandby = true\n"
ROLLUP = '[[sessions.rollup]]\ninterval = "1m"\nbars = 4\n'
MORE = f'[[sources]]\nname = "b"\n{ZEROMQ}'


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ('[scheduler]\npolicy = "sjf"', "scheduler.policy", ""),
        ("[scheduler]\nk = 0", "scheduler.k", ""),
        ('[scheduler]\neviction = "drop"', "scheduler.eviction", ""),
        ('[scheduler]\neviction = "swap"\n[pool]\nhost_blocks = 0', "scheduler.eviction", "pool.host_blocks"),
        ("[scheduler]\nmax_drafts = -1", "scheduler.max_drafts", ""),
        ("[scheduler]\nmax_draft_rows = -1", "scheduler.max_draft_rows", ""),
        ("[scheduler]\ndraft_give_up = 1.5", "scheduler.draft_give_up", ""),
        ("[scheduler]\ndraft_retry = 0", "scheduler.draft_retry", ""),
        ("[scheduler]\nmax_batch_requests = 0", "scheduler.max_batch_requests", ""),
        ('[scheduler]\nstream_timeout = "soon"', "scheduler.stream_timeout", ""),
        ("[query]\nmax_prompts = 8", "query.max_prompts_each", ""),
        ('[process]\nmode = "inproc"\nreserve_core = true', "process.reserve_core", ""),
        (f'{SESSION}max_staleness = "-1s"', "sessions[0].max_staleness", ""),
        (f"{SESSION}price_scale = 1", "sessions[0].price_decimals", "more than the price_scale of 1"),
        (
            f"{SESSION}{SECOND}price_decimals = 12",
            "sessions[1].price_scale",
            "12, but sessions[0] has 9 for X:A",
        ),
        (
            f'{SESSION}{SECOND.replace("X:A", "X:B")}more_symbols = ["X:A"]\nprice_scale = 4',
            "sessions[1].price_scale",
            "for X:A",
        ),
        (f"{SESSION}unit = -1", "sessions[0].unit", "-1 is below 0"),
        (f'{SESSION}unit = 0.25\nlines = "decimal"', "sessions[0].unit", "is for compact lines"),
        (f"{SESSION}unit = 0.125", "sessions[0].unit", "more than 2 (price_decimals) decimals"),
        (f'{SESSION}unit = "1e-3"', "sessions[0].unit", "more than 2 (price_decimals) decimals"),
        (f'{SESSION}unit = "a half"', "sessions[0].unit", "not a decimal number"),
        (f"{SESSION}unit = true", "sessions[0].unit", "expected a number, got True"),
        (f'{SESSION}late = "amend"\n{ROLLUP}', "sessions[0].rollup", "longer bars are not amended"),
        (f"{COMPACT}{ROLLUP}", "sessions[0].rollup", "compact lines have no room"),
        (
            f'{QUESTION}choices = ["YES", "NO"]\npublish_when = "crossed"',
            "questions[0].publish_when",
            "remove the choices",
        ),
        (f'{QUESTION}ask_every_bars = 2\nask_every = "1m"', "questions[0].ask_every", "ask_every_bars"),
        ('[model]\naliases = ["gpt-4o", "session:a"]', "model.aliases[1]", "session:"),
        ('[model]\naliases = [""]', "model.aliases[0]", "empty"),
        ('[tenants]\nfile = "t.toml"', "query.secret_key_file", "missing"),
        ('[query]\nsecret_key_file = "k.secret"', "query.secret_key_file", "tenants.file"),
        ('[http]\ntls_certificate_file = "c.pem"', "http.tls_key_file", "missing"),
        ('[http]\ntls_key_file = "k.pem"', "http.tls_certificate_file", "missing"),
        (SOURCES.removeprefix(SESSION), "sessions", "no session to read its records"),
        (MORE, "sessions", "no session to read them"),
        (
            f'{SOURCES}[[sources]]\nname = "a"',
            "sources[0]",
            "http, kafka, replay, websocket, zeromq; there is: none",
        ),
        (f'{SOURCES}[[sources]]\nname = "all"\n{ZEROMQ}', "sources[0].name", "names all sources together"),
        (f'{SOURCES}[[sources]]\nname = "zeromq"\n{ZEROMQ}', "sources[0].name", "is already source.kind"),
        (f"{SOURCES}{MORE}{MORE}", "sources[1].name", "is already sources[0].name"),
        (SINK, "sink.kafka.delivery", "exactly_once commits offsets with answers"),
        (f"{KAFKA}{MORE}{SINK}", "sink.kafka.delivery", "exactly_once commits offsets with answers"),
        (
            f"{KAFKA.replace('b:1,', '')}{SINK}",
            "sink.kafka.delivery",
            "the sink's brokers are a:1, b:1, the source's are a:1",
        ),
        (STANDBY, "recovery.standby", "only a Kafka source has a consumer group"),
        (f"{SOURCES}{STANDBY}", "recovery.standby", "alone, not zeromq"),
        (f"{KAFKA}{MORE}{STANDBY}", "recovery.standby", "alone, not b, kafka"),
        (f'{KAFKA}start_at = "latest"\n{STANDBY}', "source.kafka.start_at", "goes on from what is committed"),
    ],
)
def test_settings_that_are_impossible_or_contradict_are_refused_by_key(tmp_path, text, key, part):
    found = problems(tmp_path, text)
    assert found.keys() == {key}
    assert part in found[key]


@pytest.mark.parametrize(
    "text",
    [f"{KAFKA}{SINK}", f"{KAFKA}{STANDBY}", f"{SESSION}{ROLLUP}"],
    ids=["delivery", "standby", "rollup"],
)
def test_what_was_refused_above_is_accepted_where_its_needs_are_met(tmp_path, text):
    load_config(write(tmp_path, text), {})


@pytest.mark.parametrize(("text", "found"), [("auto", "auto"), ("5", 5)])
def test_the_host_tier_has_a_size_or_takes_what_is_left(tmp_path, text, found):
    written = text if text.isdigit() else f'"{text}"'
    path = write(tmp_path, f"[pool]\nhost_blocks = {written}")
    assert load_config(path, {}).pool.host_blocks == found
    assert load_config(None, {"FORETICK_POOL__HOST_BLOCKS": text}).pool.host_blocks == found
    assert load_config(None, {}, {"pool.host_blocks": text}).pool.host_blocks == found


def test_swapping_has_a_host_tier_by_default_and_no_prompts_need_no_bound(tmp_path):
    text = '[scheduler]\neviction = "swap"\n[query]\nmax_prompts = 0'
    assert load_config(write(tmp_path, text), {}).scheduler.eviction == "swap"


def test_the_scheduler_takes_its_limits_from_the_configuration(tmp_path):
    text = """
    [scheduler]
    eviction = "recompute"
    max_drafts = 2
    max_draft_rows = 3
    draft_give_up = 0.25
    draft_retry = 9
    stream_timeout = "5s"
    max_batch_tokens = 300
    max_batch_requests = 7
    chunk_min = 11
    cell_budget = 0.3
    high_water = 0.9
    max_prompt_tokens = 13
    max_new_tokens = 14
    """
    assert limits_of(load_config(write(tmp_path, text), {})) == Limits(
        300,
        7,
        11,
        300,
        0.3,
        0.9,
        13,
        14,
        "recompute",
        max_drafts=2,
        max_draft_rows=3,
        draft_give_up=0.25,
        draft_retry=9,
        stream_timeout_ns=5 * 10**9,
    )


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"scheduler.profile": "nowhere"}, "nowhere: no profile"),
        ({"scheduler.profile": "h200-paper", "pool.block_size": 32}, "blocks of 16 tokens"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused_by_its_key(settings, part):
    with pytest.raises(SettingError, match=part) as refused:
        costs_of(load_config(None, {}, settings))
    assert refused.value.key == "scheduler.profile"


@pytest.mark.parametrize(
    ("keys", "scale"),
    [("", 9), ("price_decimals = 9", 9), ("price_decimals = 12", 12), ("price_scale = 2", 2),
     ("price_decimals = 0\nprice_scale = 0", 0), ("price_decimals = 18", 18)],
)  # fmt: skip
def test_the_scale_of_prices_follows_their_decimals(tmp_path, keys, scale):
    path = write(tmp_path, f'[[sessions]]\nname = "a"\nsymbol = "X:A"\n{keys}\n')
    assert load_config(path, {}).sessions[0].scale == scale


def test_costs_begin_with_the_profile():
    guessed = costs_of(load_config(None, {}))
    measured = costs_of(load_config(None, {}, {"scheduler.profile": "h200-paper"}))
    assert 0 < measured.recompute_ns(30_000) < guessed.recompute_ns(30_000)


@pytest.mark.parametrize(("written", "nano"), [("0.25", 250_000_000), ("5", 5 * 10**9), ('"0.01"', 10**7)])
def test_a_price_unit_is_read_exactly(tmp_path, written, nano):
    path = write(tmp_path, f"{COMPACT}unit = {written}\n")
    assert load_config(path, {}).sessions[0].unit == from_units(nano)
    overridden = load_config(path, {"FORETICK_SESSIONS__0__UNIT": "0.5"}).sessions[0]
    assert (overridden.unit, str(overridden.unit)) == (from_units(500_000_000), "0.5")


def test_a_compact_session_needs_room_for_two_windows(tmp_path):
    def blocks(lines):
        text = f'[[sessions]]\nname = "a"\nsymbol = "X:A"\nlines = "{lines}"\n[pool]\nblocks = 1\n'
        return int(problems(tmp_path, text)["pool.blocks"].partition(", but ")[2].split()[0])

    assert blocks("compact") - blocks("decimal") == 4096


def test_a_question_keeps_its_policies_through_its_table(tmp_path):
    text = """
[[questions]]
name = "q"
text = "Price?"
publish_when = "crossed"
level = 100.25
ask_every = "1m"
"""
    config = load_config(write(tmp_path, TWO_SESSIONS + text), {})
    question = question_of(config.questions[0])
    assert (question.level, question.ask_every_ns) == ("100.25", 60 * 10**9)
    assert question_of(table_of(question, "a")) == question
