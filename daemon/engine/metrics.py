"""The engine's metrics: requests and batches as the scheduler reports them, memory with each heartbeat."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from daemon.api.auth import LOCAL_LABEL
from daemon.engine.maintenance import Tiers
from engine.divergence import Divergence
from engine.engine import Engine
from metrics.catalogue import ANSWERING, DRAFTS, OTHER
from metrics.store import GrowthHandle, MetricStore
from regions.kv_tensors import KVPool
from scheduler.interfaces import PriorityClass
from scheduler.observer import Observer
from scheduler.request import LifecycleEvent, Request, State
from scheduler.tapes import Work

log = logging.getLogger(__name__)

SHARED = (PriorityClass.SESSION, PriorityClass.POOL)
"""Classes that tenants share."""
_QUEUES = {PriorityClass.FLASH: "queue_flash", PriorityClass.SESSION: "queue_session"}


class EngineObserver(Observer):
    """Turns the schedulers' calls into metrics, on the worker thread, their only writer.

    ``pools``: of all models; their blocks are counted together.
    """

    def __init__(self, store: MetricStore, *pools: KVPool) -> None:
        self._store, self._pools = store, pools
        self._names = {cls: cls.name.lower() for cls in PriorityClass}
        self._decoded = {
            cls: store.counter("foretick_decode_passes_total", cls=name) for cls, name in self._names.items()
        }
        self._drafts = {
            (cls, each): store.counter("foretick_draft_tokens_total", cls=name, outcome=each)
            for cls, name in self._names.items()
            for each in DRAFTS
        }

    def queue_wait(self, cls: PriorityClass, ns: int) -> None:
        """Time from queued to the first batch, of the classes whose waits are shown."""
        if cls in _QUEUES:
            self._store.observe("foretick_stage_seconds", ns, stage=_QUEUES[cls])

    def batch(self, tokens: Mapping[PriorityClass, int], rows: int, forward_ns: int) -> None:
        """Count a forward pass, and the pool's blocks after it."""
        self._store.inc("foretick_batches_total")
        for cls, count in tokens.items():
            self._store.inc("foretick_batch_tokens_total", count, cls=self._names[cls])
        self._store.observe("foretick_stage_seconds", forward_ns, stage="forward")
        free = sum(pool.free_blocks for pool in self._pools)
        self._store.set("foretick_pool_blocks", free, state="free")
        used = sum(pool.total_blocks for pool in self._pools) - free
        self._store.set("foretick_pool_blocks", used, state="used")

    def preempted(self, request: Request, how: LifecycleEvent, by: Work) -> None:
        """A request was preempted."""
        cls, by_class = self._names[request.cls], self._names[by.cls]
        self._store.inc("foretick_preemptions_total", cls=cls, by_class=by_class)

    def decoded(self, cls: PriorityClass, drafted: int, accepted: int) -> None:
        """An answer had a token from a pass, and draft tokens were verified."""
        self._decoded[cls].inc(1)
        if drafted:
            self._drafts[cls, "accepted"].inc(accepted)
            self._drafts[cls, "rejected"].inc(drafted - accepted)

    def ended(self, request: Request) -> None:
        """Count a request's whole history. One refused after the end has none; its thread may be another."""
        store, cls = self._store, self._names[request.cls]
        for reason, ns in request.waits.items():
            store.inc("foretick_wait_seconds_total", ns, cls=cls, reason=reason)
        first = request.first(LifecycleEvent.KV_ON_GPU)
        if request.output and first is not None and cls in ANSWERING:
            store.observe("foretick_ttft_seconds", first - request.last_chunk_ns, cls=cls)
        if (began := request.first(LifecycleEvent.SCHEDULED)) is not None and request.cls in SHARED:
            self._waited(request, began - request.events[0][1])
        if request.cached_tokens and request.state is State.FINISHED:
            store.inc("foretick_reused_tokens_total", request.cached_tokens, cls=cls)
        if request.preempted_by:
            store.inc("foretick_lost_tokens_total", request.recomputed_tokens, kind="recomputed")
            store.inc("foretick_lost_tokens_total", request.swapped_tokens, kind="swapped")
        if request.total_tokens_invalidated:
            store.inc("foretick_lost_tokens_total", request.total_tokens_invalidated, kind="invalidated")
        if log.isEnabledFor(logging.DEBUG):
            trace = {"trace_id": request.spec.trace_id} if request.spec.trace_id else {}
            log.debug("%s", history(request), extra=trace)

    def _waited(self, request: Request, ns: int) -> None:
        """A tenant that came after the start has no series of its own."""
        known = (request.spec.tenant or LOCAL_LABEL, OTHER)
        label = next((each for each in known if self._store.has("tenant", each)), None)
        if label is not None and not request.prefill_only:
            self._store.observe("foretick_tenant_wait_seconds", ns, tenant=label)

    def out_of_memory(self, *, retried: bool) -> None:
        """A forward pass ran out of memory."""
        self._store.inc("foretick_oom_total", outcome="retried" if retried else "failed")

    def refreshed(self, session: str) -> None:
        """An exact session switched to a fresh window."""
        self._store.inc("foretick_refreshes_total", session=session)

    def refresh_restarted(self) -> None:
        """A window was evicted before its refresh finished."""
        self._store.inc("foretick_refresh_restarts_total")

    def refresh_failed(self, session: str) -> None:
        """A refresh failed; the log says why."""
        self._store.inc("foretick_refresh_failures_total", session=session)

    def compared(self, session: str, found: Sequence[Divergence]) -> None:
        """Standing questions were answered from both the carried and a fresh state."""
        self._store.inc("foretick_divergence_samples_total", len(found), session=session)
        agreeing = sum(divergence.agrees for divergence in found)
        self._store.inc("foretick_divergence_agreements_total", agreeing, session=session)
        mean = sum(divergence.kl_nats for divergence in found) / len(found)
        self._store.set("foretick_divergence_kl_nats", mean, session=session)

    def depth(self, waiting: Mapping[PriorityClass, int], live: Mapping[PriorityClass, int]) -> None:
        """Requests by class after a step."""
        for cls, name in self._names.items():
            self._store.set("foretick_waiting_requests", waiting[cls], cls=name)
            self._store.set("foretick_live_requests", live[cls], cls=name)


def history(request: Request) -> str:
    """One log line about an ended request: how long it waited and why, who preempted it, what it reused."""
    waits = ", ".join(f"{reason} {ns / 1e6:.1f} ms" for reason, ns in request.waits.items()) or "not at all"
    preempted_by = ", ".join(map(str, request.preempted_by)) or "none"
    return (
        f"request {request.id} ({request.cls.name.lower()}, {request.session or 'no session'}) "
        f"{request.state.value}: waited {waits}; preempted by {preempted_by}; "
        f"{len(request.prompt)} + {len(request.output)} tokens, reused {request.cached_tokens}, "
        f"recomputed {request.recomputed_tokens}, swapped {request.swapped_tokens}, "
        f"invalidated {request.total_tokens_invalidated}, "
        f"drafts {request.drafts.accepted}/{request.drafts.verified}"
    )


class MemoryMetrics:
    """Writes the metrics of pools, captured passes, prefix caches and tiers, as their only writer.

    ``models``: engine and tiers of each, counted together.

    Called with every heartbeat, on its thread. It reads counters of the worker's thread: each is a whole
    number, at most one pass old.
    """

    def __init__(self, models: Sequence[tuple[Engine, Tiers]], store: MetricStore) -> None:
        self._models, self._store = models, store
        self._growths: dict[tuple[str, ...], GrowthHandle] = {}

    def __call__(self) -> None:
        """Write what there is."""
        caches = [engine.cache for engine, _ in self._models]
        graphs = [each.graphs for each, _ in self._models if each.graphs is not None]
        attempts = sum((Counter(dict(each.outcomes)) for each in graphs), Counter[str]())
        for outcome, buckets in attempts.items():
            self._count("foretick_graph_captures_total", buckets, outcome=outcome)
        for event, tokens in (
            ("reused", sum(each.matched_tokens for each in caches)),
            ("saved", sum(each.saved_tokens for each in caches)),
            ("evicted", sum(each.evicted_tokens for each in caches)),
            ("unretained", sum(each.priorities.refused_tokens for each in caches)),
        ):
            self._count("foretick_prefix_tokens_total", tokens, event=event)
        if hosts := [tiers.host.pool for _, tiers in self._models if tiers.host is not None]:
            free = sum(each.free_blocks for each in hosts)
            self._store.set("foretick_host_blocks", free, state="free")
            used = sum(each.total_blocks for each in hosts) - free
            self._store.set("foretick_host_blocks", used, state="used")
        if kept := [tiers.residency for _, tiers in self._models if tiers.residency is not None]:
            self._count("foretick_spill_failures_total", sum(each.failures for each in kept))
            spills = sum((Counter(dict(each.spills)) for each in kept), Counter[str]())
            for outcome, count in spills.items():
                self._count("foretick_spills_total", count, outcome=outcome)
            restores = sum((Counter(dict(each.restores)) for each in kept), Counter[str]())
            for outcome, count in restores.items():
                self._count("foretick_restores_total", count, outcome=outcome)

    def _count(self, name: str, total: int, **labels: str) -> None:
        key = (name, *labels.values())
        if key not in self._growths:
            self._growths[key] = self._store.growth(name, **labels)
        self._growths[key].update(total)
