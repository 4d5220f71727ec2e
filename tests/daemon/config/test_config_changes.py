"""The steps from one configuration to another, against a direct comparison."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.changes import WINDOW, changes, live, questions_by_session, resolved
from daemon.config.schema import BarsConfig, Config, PoolConfig, QuestionConfig, SessionConfig
from daemon.config.symbols import numbered, routes
from feeds.durations import Duration

sessions = st.lists(
    st.builds(
        SessionConfig,
        name=st.sampled_from("abc"),
        symbol=st.sampled_from(["V:A", "V:B"]),
        more_symbols=st.sampled_from([(), ("V:C",)]),
        retention_tokens=st.sampled_from([64, 128]),
        interval=st.sampled_from([None, Duration(1), Duration(2)]),
        lateness=st.sampled_from([None, Duration(1)]),
    ),
    unique_by=lambda session: session.name,
    max_size=3,
)
questions = st.lists(
    st.builds(
        QuestionConfig,
        name=st.sampled_from("xy"),
        text=st.sampled_from(["Up?", "Down?"]),
        sessions=st.sampled_from([(), ("a",), ("b",)]),
    ),
    unique_by=lambda question: question.name,
    max_size=2,
)
configs = st.builds(
    Config,
    standing=st.sampled_from(["none", "paper_six"]),
    bars=st.builds(BarsConfig, interval=st.sampled_from([Duration(1), Duration(2)])),
    pool=st.builds(PoolConfig, blocks=st.sampled_from([0, 9])),
    sessions=sessions.map(tuple),
    questions=questions.map(tuple),
)


@given(old=configs, new=configs)
def test_the_steps_lead_from_one_configuration_to_the_other(old: Config, new: Config) -> None:
    found = changes(old, new)
    now = {s.name: s for s in resolved(old)}
    asked = questions_by_session(old)
    for name in found.removed:
        del now[name], asked[name]
    for session in found.changed:
        assert all(getattr(now[session.name], key) == getattr(session, key) for key in WINDOW)
        assert now[session.name] != session
        now[session.name] = session
    for session in found.added:
        assert session.name not in now
        now[session.name] = session
        asked[session.name] = questions_by_session(new)[session.name]
    asked |= found.questions
    assert now == {s.name: s for s in resolved(new)}
    assert asked == questions_by_session(new)
    assert found.fixed == (("pool.blocks",) if old.pool != new.pool else ())
    assert not changes(live(old, new), new)
    assert live(old, new).pool == old.pool
    assert not changes(old, old)


def test_what_begins_again_is_removed_first() -> None:
    one = SessionConfig(name="a", symbol="V:A")
    two = msgspec.structs.replace(one, interval=Duration(5))
    found = changes(Config(sessions=(one,)), Config(sessions=(two,)))
    assert (found.removed, [s.name for s in found.added], found.changed) == (("a",), ["a"], ())


@given(old=configs, new=configs)
def test_symbols_keep_their_numbers(old: Config, new: Config) -> None:
    before = numbered(old.sessions)
    after = numbered(new.sessions, before)
    assert {symbol: after[symbol] for symbol in before} == before
    assert sorted(after.values()) == list(range(len(after)))
    found = routes(new.sessions, after)
    for session in new.sessions:
        assert all(session.name in found[symbol].sessions for symbol in session.symbols)
    assert sum(len(r.sessions) for r in found.values()) == sum(len(s.symbols) for s in new.sessions)
