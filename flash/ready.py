"""The ready position: what the model would answer to no question (*Attention Once* section 3.9.4).

Each data version gets one more row, of the tokens that begin an answer, in a batch with its standing
questions. An ask may be answered from the result at once (early exit). The result is blind to its question.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from regions.tape import Tape
from scheduler.interfaces import PriorityClass
from scheduler.request import LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItems


@dataclass(frozen=True, slots=True)
class ReadyToken:
    """The likeliest ``token`` at the ready position of a data version, and its logit gap (equation 12)."""

    version: int
    token: int
    gap: float


def exits(ready: ReadyToken | None, version: int, choices: Sequence[int], tau: float) -> bool:
    """Whether ``ready`` answers an ask of ``version`` with these first tokens of its choices (equation 13).

    ``tau``: logit gap to exceed; 0 never exits.
    """
    if ready is None or not tau:
        return False
    return ready.version == version and ready.gap > tau and ready.token in choices


class ReadyPosition:
    """Evaluates the ready position of every version; a newer one replaces one that has not started.

    ``tokens`` begin an answer behind the tape. State belongs to the thread that steps the scheduler; any
    thread may call `newest`.
    """

    def __init__(self, scheduler: Scheduler, tokens: Sequence[int]) -> None:
        self._scheduler, self._tokens = scheduler, tuple(tokens)
        self._newest: dict[str, ReadyToken] = {}
        self._open: dict[str, Request] = {}
        scheduler.subscribe(self.on_commit)

    def newest(self, session: str) -> ReadyToken | None:
        """The result of the newest evaluated version."""
        return self._newest.get(session)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """Evaluate the new version."""
        older = self._open.get(tape.name)
        if older is not None and older.first(LifecycleEvent.SCHEDULED) is None:
            self._scheduler.cancel(older.id)
        self._open[tape.name] = request = Request(
            RequestSpec(
                cls=PriorityClass.FLASH,
                session=tape.name,
                prompt=self._tokens,
                max_tokens=1,
                on_done=partial(self._done, version),
                reader=tape.fork(),
            )
        )
        self._scheduler.submit(request)

    def _done(self, version: int, request: Request) -> None:
        if self._open.get(request.session) is request:
            del self._open[request.session]
        known = self._newest.get(request.session)
        if request.state is State.FINISHED and (known is None or known.version < version):
            self._newest[request.session] = ReadyToken(version, request.output[0], request.samples[0].gap)
