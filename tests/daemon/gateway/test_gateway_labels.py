"""Labels of past answers, seen from the gateway."""

import asyncio

import pytest

from daemon.api.generation import Failed
from daemon.api.messages import ErrorReply, Label, LabelReply, QueryError
from daemon.gateway.label_requests import LabelRequests
from metrics.catalogue import LABEL_OUTCOMES
from tests.kit import until
from tests.kit.gateway import EngineRig


class Rig(EngineRig):
    """Labels and the commands they send."""

    def __init__(self) -> None:
        super().__init__("aaa")
        self.observe = self.sessions.observe
        self.labels = LabelRequests(self.sessions, self.store, self.pending)

    async def begin(self, label: Label) -> tuple[asyncio.Task[LabelReply], Label]:
        """The client's request, and the command that it becomes."""
        before = len(self.sent)
        task = asyncio.create_task(self.labels.label(label))
        await until(lambda: len(self.sent) > before)
        command = self.sent[-1]
        assert isinstance(command, Label)
        return task, command

    def counted(self) -> dict[str, float]:
        found = {o: self.store.value("foretick_labels_total", outcome=o) for o in LABEL_OUTCOMES}
        return {outcome: n for outcome, n in found.items() if n}


@pytest.fixture
def rig() -> Rig:
    return Rig()


LABEL = Label(77, "aaa", "trend", 4, "UP")


def reply_to(command: Label, right: bool = True) -> LabelReply:
    return LabelReply(command.id, command.session, "trend", command.data_version, right, True, 0.9)


async def test_replies_find_their_clients_in_any_order_and_are_counted(rig: Rig) -> None:
    (first, one), (second, two) = [await rig.begin(LABEL), await rig.begin(LABEL)]
    assert one.id != two.id
    rig.pending.on_event(reply_to(two, right=False))
    rig.pending.on_event(reply_to(one))
    assert ((await first).right, (await second).right) == (True, False)
    assert (await first).id == (await second).id == LABEL.id
    assert rig.counted() == {"right": 1, "wrong": 1}


@pytest.mark.parametrize("code", ["bad_request", "unknown_version", "not_calibrated", "repeated"])
async def test_what_the_engine_refuses_is_the_client_s_error(rig: Rig, code: str) -> None:
    task, command = await rig.begin(LABEL)
    rig.pending.on_event(Failed(command.id, code, "because"))
    with pytest.raises(QueryError, match="because") as refused:
        await task
    assert refused.value.code == code
    rig.observe(LABEL, ErrorReply(LABEL.id, refused.value.code, "because"), 5)  # as the query socket does
    assert rig.counted() == {code if code in LABEL_OUTCOMES else "other": 1}


async def test_an_unknown_session_never_reaches_the_engine(rig: Rig) -> None:
    with pytest.raises(QueryError, match=r"'bbb'.* aaa") as refused:
        await rig.labels.label(Label(1, "bbb", "trend", 4, "UP"))
    assert refused.value.code == "unknown_session"
    assert rig.sent == []


async def test_when_the_engine_ends_labels_fail(rig: Rig) -> None:
    task, command = await rig.begin(LABEL)
    rig.pending.engine_gone("the engine ended")
    with pytest.raises(QueryError, match="the engine ended") as refused:
        await task
    assert refused.value.code == "engine"
    rig.pending.on_event(reply_to(command))  # too late: the command has ended
    assert rig.counted() == {}
