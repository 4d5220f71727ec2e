"""What the frozen prefix tells a language model of a session's lines, and whom it tells nothing."""

import msgspec
import pytest

from daemon.config.schema import (
    BarsConfig,
    Config,
    ContinuousConfig,
    ContractConfig,
    EventsConfig,
    Instant,
    ModelConfig,
    SessionConfig,
    SymbolsConfig,
)
from daemon.engine.build import line_spec, prefixes_of
from daemon.engine.described import described
from engine.model.chat_format import PromptFormat, schema_of
from engine.model.embedded import build_tokenizer
from feeds.durations import Duration, parse_duration

ES = SessionConfig(name="es", symbol="CME:ESZ6")
SILENT = EventsConfig(text="flag", status="ignore", action="flag")


def config(session: SessionConfig = ES, interval: str = "1m", **more: object) -> Config:
    bars = {name: more.pop(name) for name in ("late", "empty", "ready", "dates") if name in more}
    own = BarsConfig(interval=parse_duration(interval), **bars)  # type: ignore[arg-type]  # settings of it
    return msgspec.structs.replace(Config(sessions=(session,), bars=own, events=SILENT), **more)


def told(made: Config) -> str:
    return described(made, made.sessions[0], is_compact=False).strip()


@pytest.mark.parametrize(
    ("interval", "length"),
    [("1m", "one minute"), ("5m", "5 minutes"), ("1s", "one second"), ("90s", "90 seconds"),
     ("1h", "one hour"), ("250ms", "250 milliseconds")],
)  # fmt: skip
def test_bars_are_said_to_be_of_a_symbol_and_how_long(interval: str, length: str) -> None:
    assert told(config(interval=interval)) == (
        f"The bars are of ESZ6 (CME), {length} each. Times are when a bar began, in UTC."
    )


@pytest.mark.parametrize(("interval", "length"), [("1d", "one day"), ("7d", "7 days")])
def test_times_of_days_are_dates_and_others_have_them_where_that_is_wanted(
    interval: str, length: str
) -> None:
    days = f"The bars are of ESZ6 (CME), {length} each. Times are the days on which bars began, in UTC."
    assert told(config(interval=interval)) == days
    assert told(config(dates=True)).endswith("Times are the date and the time when a bar began, in UTC.")


def test_units_are_said_where_they_are_known() -> None:
    units = msgspec.structs.replace(ES, prices_in="index points", volumes_in="contracts")
    assert told(config(units)).endswith("Prices are in index points. Volumes are in contracts.")
    assert "contracts" not in described(config(units), units, is_compact=True)


def test_several_symbols_are_named_and_bars_of_any_length_have_none() -> None:
    several = msgspec.structs.replace(ES, more_symbols=("CME:NQZ6", "CBOT:ZNZ6"))
    said = told(config(several, ready="any"))
    assert said.startswith("The bars are of ESZ6 (CME), NQZ6 (CME) and ZNZ6 (CBOT). Times")


def test_other_lines_are_explained_where_they_may_come() -> None:
    contracts = ContractConfig("CME:ESU6", Instant(0)), ContractConfig("CME:ESH7", Instant(60 * 10**9))
    rolled = SymbolsConfig(continuous=(ContinuousConfig("CME:ESZ6", contracts),))
    events = EventsConfig(text="line", status="flag", action="ignore", book="line")
    said = told(config(late="amend", empty="emit", events=events, symbols=rolled))
    assert "is an event: a headline (text) or the best levels of the order book" in said
    assert "begins with amend" in said
    assert "No trade means" in said
    assert "begins with roll" in said


def test_compact_lines_have_no_times_and_no_words() -> None:
    made = config(late="amend")
    assert described(made, ES, is_compact=True) == "The bars are of ESZ6 (CME), one minute each.\n"


@pytest.mark.parametrize("more", [(), ("CME:NQZ6",)])
def test_the_prefix_says_it_where_that_is_configured(more: tuple[str, ...]) -> None:
    tokenizer = build_tokenizer()
    prompt = PromptFormat.of(tokenizer)
    for describe in (False, True):
        made = config(msgspec.structs.replace(ES, more_symbols=more), model=ModelConfig(describe=describe))
        lines = {"es": line_spec(made.sessions[0], made.bars, prompt)}
        prefixes = prefixes_of(made, prompt, lines)
        text = tokenizer.decode(list(prefixes.newest("es")))
        schema = schema_of("decimal", symbols=bool(more))
        assert text.endswith((told(made) + "\n" if describe else "") + schema)
        assert ("The bars are of" in text) == describe
        assert prefixes.longest("es", ()) == len(prefixes.newest("es"))


def test_a_length_that_is_no_number_of_units_stays_as_it_is_written() -> None:
    assert "1500us each" in told(
        msgspec.structs.replace(config(), bars=BarsConfig(interval=Duration(1_500_000)))
    )
