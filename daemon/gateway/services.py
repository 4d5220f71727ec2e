"""Which part of the gateway answers a client's request."""

from functools import partial

from daemon.api import messages
from daemon.api.pushes import Pushes
from daemon.api.zmq import Answering
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.generations import Generations
from daemon.gateway.group_generator import generated_here
from daemon.gateway.label_requests import LabelRequests
from daemon.gateway.past_requests import PastRequests
from daemon.gateway.prompts import Prompts
from daemon.gateway.question_requests import Questions
from daemon.gateway.reconfigure import LiveSessions
from daemon.gateway.request_trace import visible_traces
from daemon.gateway.signal_requests import SignalRequests
from daemon.tenants import Client
from daemon.traces.recent_traces import RecentTraces


class Services:
    """All parts that answer clients."""

    def __init__(
        self,
        sessions: Sessions,
        generations: Generations,
        live: LiveSessions,
        questions: Questions,
        labels: LabelRequests,
        prompts: Prompts,
        pushes: Pushes,
        traces: RecentTraces,
        signals: SignalRequests,
        past: PastRequests,
    ) -> None:
        self._sessions, self._generations, self._live = sessions, generations, live
        self._questions, self._labels, self._prompts, self._pushes = questions, labels, prompts, pushes
        self._traces, self._signals, self._past = traces, signals, past

    def begin(self, request: messages.ClientRequest, client: Client) -> Answering:
        """A ready answer, or what to await for a reply. Raises QueryError."""
        match request:
            case messages.Ask():
                return self._generations.ask(request, client)
            case messages.ListSessions():
                return partial(self._sessions.sessions, request)
            case messages.Describe():
                return partial(self._questions.describe, request)
            case messages.ShowPrompt():
                return partial(self._generations.shown, request)
            case messages.AddSession():
                return partial(self._live.add, request)
            case messages.ChangeSession():
                return partial(self._live.change, request)
            case messages.RemoveSession():
                return partial(self._live.remove, request)
            case messages.Answers():
                return partial(self._sessions.answers, request)
            case messages.ListQuestions():
                return partial(self._questions.list, request)
            case messages.SetQuestion():
                return partial(self._questions.set, request)
            case messages.RemoveQuestion():
                return partial(self._questions.remove, request)
            case messages.Pause():
                return partial(self._questions.pause, request)
            case messages.Label():
                return partial(self._labels.label, request)
            case messages.ListSignals():
                return self._signals.found(request, client)
            case messages.ListVersions():
                return self._past.versions(request)
            case messages.Quality():
                return partial(self._past.quality, request)
            case messages.Stats():
                return partial(self._sessions.stats, request, client.tenant)
            case messages.ListBudgets():
                return self._generations.budgets(request, client)
            case messages.GetTrace():
                return visible_traces(self._traces, request, client)
            case messages.Open():
                return partial(self._prompts.open, request, client)
            case messages.Append() | messages.Update():
                return partial(self._prompts.append, request, client)
            case messages.Finish():
                return partial(self._prompts.finish, request, client)
            case messages.Complete():
                return partial(self._prompts.complete, request, client)
            case messages.Close():
                return partial(self._prompts.close, request, client)
            case messages.Push():
                return partial(self._pushes.push, request, client.tenant)
            case messages.KeptAnswers():
                return self._sessions.kept(request)
            case messages.GenerateElsewhere():
                return partial(generated_here, self._generations, request, client)
