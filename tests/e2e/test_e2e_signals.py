"""Signals of a daemon with a real engine: what is published, what clients hear, and what they may ask."""

from decimal import Decimal

from daemon.api.events import EventFilter, Subscription
from daemon.config.schema import ClauseConfig, QuestionConfig, SignalConfig
from daemon.config.signals import rules_of
from daemon.tenants import LOCAL, Client, Tenant
from feeds.market_data import Signal
from tests.kit import inproc_config, until
from tests.kit.inproc import running
from tests.kit.signals import ids_of

QUESTIONS = (
    QuestionConfig("trend", "Up or down?", ("UP", "DOWN")),
    QuestionConfig("pullback", "Is it pulling back?", ("YES", "NO")),
)
BARS = 12
SIGNALS = (
    SignalConfig("any", (ClauseConfig("trend", changed=True),), withheld_by=()),
    SignalConfig(
        "both",
        (ClauseConfig("trend", answer=("UP",)), ClauseConfig("pullback", "bbb", answer=("YES",))),
        withheld_by=(),
    ),
)


def ids(listening: Subscription) -> set[str]:
    """Of the signals that a client has heard."""
    return {event.message.signal_id for event in listening.take()[1] if isinstance(event.message, Signal)}


async def test_signals_follow_from_published_answers_and_reach_every_client() -> None:
    config = inproc_config(["V:AAA", "V:BBB"], standing="none", questions=QUESTIONS, signals=SIGNALS)
    async with running(config, signals="signals.v1") as daemon:
        listening = daemon.gateway.events.subscribe(
            Client(LOCAL, "test"), EventFilter(kinds=frozenset(["signal"])), "sse"
        )
        restricted = daemon.gateway.events.subscribe(
            Client(Tenant("desk", sessions=("aaa",)), "test"), EventFilter(kinds=frozenset(["signal"])), "sse"
        )
        await daemon.advance(BARS)
        await until(lambda: daemon.gateway.publisher.progress.of("aaa").version == BARS)
        await until(lambda: daemon.gateway.publisher.progress.of("bbb").version == BARS)
        sent = [each for each in daemon.sink.messages("signals.v1") if isinstance(each, Signal)]
        every = [each for name in ("aaa", "bbb") for each in daemon.answers(name)]
        expected = set(ids_of(rules_of(config), every))
        assert expected
        assert {
            each.signal_id for each in sent if len({cause.session for cause in each.answers}) == 1
        } == expected
        assert len({each.signal_id for each in sent}) == len(sent)
        published = {each.answer_id: each for each in every}
        for signal in sent:
            for cause in signal.answers:
                assert published[cause.answer_id].text == cause.text
        assert all(Decimal(each.close or 0) >= 100 for each in sent)
        assert ids(listening) == {each.signal_id for each in sent}
        assert ids(restricted) == {
            each.signal_id for each in sent if {cause.session for cause in each.answers} == {"aaa"}
        }
        reply = (await daemon.http("GET", "/v1/signals?session=aaa")).json
        assert {(each["name"], each["owner"]) for each in reply["conditions"]} == {
            ("any", "aaa"),
            ("both", "aaa"),
        }
        assert {each["signal_id"] for each in reply["signals"]} == {
            each.signal_id for each in sent if "aaa" in {each.session, *(c.session for c in each.answers)}
        }
        unknown = await daemon.http("GET", "/v1/signals?session=zzz")
        assert unknown.json["code"] == "unknown_session"
        assert daemon.count("signals", outcome="fired") == len(sent)
