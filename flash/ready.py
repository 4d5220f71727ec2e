"""The ready position: what the model would answer to no question (*Attention Once* section 3.9.4).

Each data version gets one more row, of the tokens that begin an answer, in a batch with its standing
questions. `flash.early_exit` answers asks from the result, which is blind to any question.
"""

from collections.abc import Callable, Sequence
from functools import partial

from flash.early_exit import ReadyToken
from regions.tape import Tape
from scheduler.interfaces import PriorityClass
from scheduler.request import LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItems

OnReady = Callable[[str, ReadyToken], None]
"""``on_ready(session, token)``: the result of a version."""


class ReadyPosition:
    """Evaluates the ready position of every version; a newer one replaces one that has not started.

    ``tokens`` begin an answer behind the tape. On the thread that steps the scheduler.
    """

    def __init__(self, scheduler: Scheduler, tokens: Sequence[int], on_ready: OnReady) -> None:
        self._scheduler, self._tokens, self._on_ready = scheduler, tuple(tokens), on_ready
        self._open: dict[str, Request] = {}
        scheduler.subscribe(self.on_commit)

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
        if request.state is State.FINISHED:
            self._on_ready(request.session, ReadyToken(version, request.output[0], request.samples[0].gap))
