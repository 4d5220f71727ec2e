"""The parts of each suite in running order: torch's threads disturb neither the first nor the last."""

SUITES: dict[str, dict[str, tuple[str, str]]] = {
    "stream": {
        "kafka": ("bench.stream.kafka:measure", "Kafka to bars"),
        "hits": ("bench.query.cached:hits", "Flash hits through the query socket"),
        "questions": ("bench.engine.questions:measure", "Questions on the paper's scenario"),
    },
    "data": {
        "files": ("bench.data.files:measure", "Recorded files to bars"),
        "websocket": ("bench.data.websocket:measure", "A venue's stream to bars"),
        "encodings": ("bench.data.encodings:measure", "Messages to columns, by encoding"),
        "quality": ("bench.data.quality:measure", "Faults of feeds"),
        "ticks": ("bench.data.ticks:measure", "From tick to answer"),
        "patterns": ("bench.data.patterns:measure", "Sessions by pattern"),
        "past": ("bench.data.past:measure", "Asking the past"),
    },
    "recovery": {
        "restart": (
            "bench.recovery.restart:measure",
            "An engine that is killed",
        ),
        "checkpoint": ("bench.recovery.checkpoint:measure", "A checkpoint by sessions"),
    },
    "query": {
        "cached": ("bench.query.cached:measure", "Cached answers over ZeroMQ and HTTP"),
        "events": ("bench.query.events:measure", "Clients that listen over HTTP"),
        "webhooks": ("bench.query.webhooks:measure", "From a bar's close to a webhook"),
        "decisions": ("bench.query.decisions:measure", "Ten typed questions in one request"),
        "traced": ("bench.query.traced:measure", "Ready answers with traces"),
        "exits": ("bench.query.exits:measure", "Early exits beside cached hits"),
        "scrape": ("bench.query.scrape:measure", "Metrics by sessions"),
    },
    "engine": {
        "sessions": ("bench.engine.batches:sessions", "Several sessions in one pass"),
        "standing": ("bench.engine.batches:standing", "Standing questions in one pass"),
        "weights": ("bench.engine.weights:measure", "Quantised weights"),
    },
    "scheduler": {
        "cost": ("bench.scheduler.cost:measure", "What scheduling costs"),
        "prefix": ("bench.scheduler.prefix:measure", "k-LPM by request rate"),
        "orders": ("bench.scheduler.prefix:simulated", "k-LPM by request rate, simulated"),
        "predicted": ("bench.scheduler.predicted:measure", "Plans beside the daemon they are for"),
        "preemption": ("bench.scheduler.preemption:measure", "Swapping or recomputing, by length"),
        "simulated": ("bench.scheduler.simulated:measure", "Streaming prompts, simulated"),
        "drafts": ("bench.scheduler.drafts:measure", "Drafts on free text and under a grammar"),
        "spill": ("bench.scheduler.spill:measure", "Questions while a session goes to disk"),
    },
    "peers": {
        "grow": ("bench.peers.measure:grow", "A growing tape beside other engines"),
        "burst": ("bench.peers.measure:burst", "Six questions at once beside other engines"),
        "multi": ("bench.peers.measure:multi", "Eight sessions beside other engines"),
        "released": ("bench.peers.measure:released", "Released weights beside other engines"),
        "file": ("bench.peers.measure:file", "A GGUF file beside llama.cpp"),
    },
    "gpu": {"model": ("bench.gpu:measure", "Llama-3.1-8B's shape on one GPU")},
}
"""By suite and part: the function that measures it, imported when it runs, and its title."""
