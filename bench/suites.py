"""The parts of each suite in running order: torch's threads disturb neither the first nor the last."""

from __future__ import annotations

SUITES: dict[str, dict[str, tuple[str, str]]] = {
    "stream": {
        "ring": ("bench.stream.ring:measure", "Ring between two processes"),
        "kafka": ("bench.stream.kafka:measure", "Kafka to bars"),
        "hits": ("bench.stream.hits:measure", "Flash hits through the query socket"),
        "sessions": ("bench.stream.sessions:measure", "Updates that the daemon keeps up with"),
        "idle": ("bench.stream.idle:measure", "CPU time of a daemon that waits"),
        "questions": ("bench.engine.questions:stream", "Questions on the paper's scenario"),
    },
    "data": {
        "ticks": ("bench.data.ticks:measure", "From tick to answer"),
        "outage": ("bench.data.outage:measure", "Live answers after an outage"),
    },
    "recovery": {
        "restart": ("bench.recovery.restart:measure", "An engine that is killed"),
        "service": ("bench.recovery.service:measure", "A daemon that is started again"),
        "restore": ("bench.recovery.restore:measure", "A window that comes back"),
        "snapshots": ("bench.recovery.snapshots:measure", "Questions while snapshots are written"),
        "delivery": ("bench.recovery.delivery:measure", "What exactly once costs"),
        "standby": ("bench.recovery.standby:measure", "A standby that takes over"),
    },
    "query": {
        "cached": ("bench.query.cached:measure", "Cached answers over ZeroMQ and HTTP"),
        "rates": ("bench.query.cached:rates", "Cached answers a second of CPU time"),
        "events": ("bench.query.events:measure", "Clients that listen over HTTP"),
        "kept": ("bench.query.kept:measure", "Kept responses and prefixes by the length of the prompt"),
    },
    "engine": {
        "questions": ("bench.engine.questions:engine", "Questions and updates as the tape grows"),
        "sessions": ("bench.engine.batches:sessions", "Several sessions in one pass"),
        "window": ("bench.engine.questions:window", "A tape at its retention limit"),
        "standing": ("bench.engine.batches:standing", "Standing questions in one pass"),
        "prefix": ("bench.engine.batches:prefix", "Sessions behind one frozen prefix"),
        "refresh": ("bench.engine.served:refresh", "An `exact` session's refresh"),
        "attention": ("bench.engine.attention:kernel", "Attention alone"),
        "passes": ("bench.engine.overhead:passes", "What a pass costs beside its compiled code"),
    },
    "scheduler": {
        "cost": ("bench.scheduler.cost:measure", "What scheduling costs"),
        "flood": ("bench.engine.served:flood", "Questions in a flood"),
        "engine": ("bench.scheduler.engine:measure", "The same scheduler on the engine"),
        "prefix": ("bench.scheduler.prefix:measure", "k-LPM by request rate"),
        "predicted": ("bench.scheduler.predicted:measure", "Plans beside the daemon they are for"),
        "simulated": ("bench.scheduler.simulated:measure", "Streaming prompts, simulated"),
    },
    "peers": {
        "grow": ("bench.peers.measure:grow", "A growing tape beside other engines"),
        "slide": ("bench.peers.measure:slide", "A sliding window beside other engines"),
        "burst": ("bench.peers.measure:burst", "Six questions at once beside other engines"),
        "multi": ("bench.peers.measure:multi", "Eight sessions beside other engines"),
    },
    "gpu": {"model": ("bench.gpu:measure", "Llama-3.1-8B's shape on one GPU")},
}
"""By suite and part: the function that measures it, imported when it runs, and its title."""
