"""What was answered before, and how well, for clients that ask. Lives on the event loop."""

import asyncio

from daemon.api import messages
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.question_quality import by_age, by_regime, found_in, reliability, tally_of
from metrics.store import MetricStore


class PastRequests:
    """Of the versions that are kept. ``kept``: at most, of each session."""

    def __init__(self, sessions: Sessions, store: MetricStore, kept: int) -> None:
        self._sessions, self._store, self._kept = sessions, store, kept

    def versions(self, request: messages.ListVersions) -> messages.VersionsReply:
        """What has changed of them. Raises QueryError."""
        past = self._sessions.state(request.session).past
        oldest, newest = past.span
        found = past.since(request.since)
        return messages.VersionsReply(request.id, request.session, past.revision, oldest, newest, found)

    async def quality(self, request: messages.Quality) -> messages.QualityReply:
        """Of one question in one session. Raises QueryError."""
        state = self._sessions.state(request.session)
        named = state.lookup.named(request.question)
        if not named:
            why = f"{request.session} has no standing question {request.question!r}"
            raise messages.QueryError("bad_request", why)
        await asyncio.sleep(0)  # between two sessions of a request for all, other work goes on
        asked, versions = named[0].question, state.past.since(0)
        found = found_in(versions, asked.name)
        answers = [answer for _, answer in found]
        ratio = self._store.value("foretick_gap_ratio", session=request.session)
        quality = messages.QuestionQuality(
            session=request.session,
            question=asked.name,
            versions=len(versions),
            tally=tally_of(answers),
            reliability=reliability(answers),
            regimes=by_regime(versions, found),
            ages=by_age(state.past.span[1], self._kept, found),
            gap_ratio=ratio or None,
        )
        return messages.QualityReply(request.id, quality)
