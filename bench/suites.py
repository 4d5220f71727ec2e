"""Which parts each suite has, in the order they run, and what their pages say of them.

Parts that need no torch come first, so that its threads disturb none of them; so do timed parts before
simulated ones. A part's module is imported when it runs.
"""

from __future__ import annotations

from typing import NamedTuple


class Spec(NamedTuple):
    """``measure``: module and function, which takes the `Run` and yields figures."""

    name: str
    title: str
    measure: str
    about: str


SUITES: dict[str, tuple[Spec, ...]] = {
    "stream": (
        Spec(
            "ring",
            "Ring between two processes",
            "bench.stream.ring:measure",
            "Records of 128 bytes, 512 at a time. Copying the bytes shows the order of memory's speed; its runs "
            "differ several times over, so it is no floor.",
        ),
        Spec(
            "kafka",
            "Kafka to bars",
            "bench.stream.kafka:measure",
            "Trades preloaded into the embedded broker, read by the real source and ingest, through the ring into "
            "the data plane in another process, to closed bars as token ids. Each stage is also measured alone, "
            "on the same records.",
        ),
        Spec(
            "hits",
            "Flash hits through the query socket",
            "bench.stream.hits:measure",
            "Round trips at a client in a process of its own, one millisecond apart, while the engine, in a second "
            "process, is idle or flooded by a source that always has more. *Hit*: a reply that says `cached`; "
            "*latest*: a request for the newest answer there is. The reference is a bare ZeroMQ echo in the "
            "front's own event loop, asked in turn. The client waits for each reply, so the counts of hits and of "
            "computed asks are not the shares that somebody would see who asks at random times.",
        ),
        Spec(
            "questions",
            "Questions on the paper's scenario",
            "bench.engine.questions:stream",
            "*Attention Once* section 4.1: 100 bars, then 15 times 55 bars and a question of one answer token, "
            "asked of a fork; taking and dropping the fork is inside the time. fp32. *Kept cache*: the "
            "unmodified transformers model (`sdpa`) with a `DynamicCache` that reads the same updates and is "
            "cropped back after each question. *Dense*: the same model over the whole context, nothing kept, at "
            "three contexts, once each. Ways are timed in turn; a median's ratio is that of the pairs. All must "
            "give the same answer token (a logit gap below 0.001 is a tie), or the run fails.",
        ),
    ),
    "engine": (
        Spec(
            "questions",
            "Questions and updates as the tape grows",
            "bench.engine.questions:engine",
            "The scenario of `foretick bench stream`, beside its floors: the arithmetic of a pass at the rate of a "
            "large matrix product, or reading its weights and KV at that of a large copy, whichever takes longer, "
            "both rates measured in this part. Floors count every layer for every row.",
        ),
        Spec(
            "sessions",
            "Several sessions in one pass",
            "bench.engine.batches:sessions",
            "Sessions with nothing in common but the prompt's first tokens, a question each: one pass, one pass "
            "each in turn, and kept caches one by one.",
        ),
        Spec(
            "window",
            "A tape at its retention limit",
            "bench.engine.window:measure",
            "Questions on a tape whose oldest bars go as new ones come, beside one that has just grown to that "
            "length and stays. *Dense*: the unmodified model over the same window sent again as a prompt.",
        ),
        Spec(
            "standing",
            "Standing questions in one pass",
            "bench.engine.batches:standing",
            "Whole questions on one tape, and one further token of each answer: one pass against one each. Every "
            "row multiplies every key and weight itself either way; a pass only saves reading the same bytes "
            "again and what each pass costs besides.",
        ),
        Spec(
            "prefix",
            "Sessions behind one frozen prefix",
            "bench.engine.batches:prefix",
            "One further token of an answer each, behind one long prefix: one pass against one each.",
        ),
        Spec(
            "refresh",
            "An `exact` session's refresh",
            "bench.engine.refresh:measure",
            "Questions through the real scheduler, alone and while the session's window is prefilled again in the "
            "background. *Bound*: 1.1 times the idle P99 plus the longest batch of the refresh.",
        ),
        Spec(
            "bookkeeping",
            "Metadata",
            "bench.engine.metadata:measure",
            "What a question costs before any arithmetic, by context length, on a pool of tiny layers. The "
            "reference is the shortest context.",
        ),
    ),
    "scheduler": (
        Spec(
            "cost",
            "What scheduling costs",
            "bench.scheduler.cost:measure",
            "Thread time a step. *Plan*: phase 1, order and budgets, which *Stream2LLM* section 6.5 gives as below "
            "165 us at P99 for 500 requests. *Step*: everything but the forward pass, over counting readers. "
            "*Sorting all*: ordering all live requests at each step instead, as the paper's code does.",
        ),
        Spec(
            "order",
            "Waiting queue ordered by cached prefixes",
            "bench.scheduler.order:measure",
            "What `klpm` pays in a step for its order: what saving and evicting adds for the watched prompts, "
            "following the changes, finding those who are admitted and taking them out. The reference asks the "
            "cache for everybody's match at each step, and sorts.",
        ),
        Spec(
            "flood",
            "Questions in a flood",
            "bench.scheduler.flood:measure",
            "Standing questions (FLASH) and asks (SESSION) of one session, alone and while another session's tape "
            "(STREAM) and prompts (POOL) always have more, on the embedded model. *Bound*: 1.5 times the idle P99 "
            "plus the P99 of a pass of the flood without a question. What each class computed meanwhile stands "
            "below: STREAM, too, waits for POOL and the questions.",
        ),
        Spec(
            "engine",
            "The same scheduler on the engine",
            "bench.scheduler.predicted:measure",
            "The crawler's shape with shorter prompts on the embedded model, and the simulator on the very same "
            "trace under the profile measured in this part, times the pace of a run before on another trace: a "
            "daemon, too, corrects its profile by the passes it runs. *Median error*: of single requests' TTFT; "
            "its reference is a second measured run in the prediction's place, which no prediction can beat. "
            "*Pace*: what the scheduler's steps took over what the profile says of their passes.",
        ),
        Spec(
            "prefix",
            "k-LPM by request rate",
            "bench.scheduler.prefix:measure",
            "P99 TTFT, median over seeds. *sessions*: four prompts share a user's history (*k-LPM* section 5.1); "
            "*regulars*: 60 users ask six of ten questions, the others ask once. Rates are parts of what the "
            "device computes without reuse. *Over the better*: of FCFS and LPM, on the same requests, geometric "
            "mean over seeds and two standard errors to either side.",
        ),
        Spec(
            "simulated",
            "Streaming prompts, simulated",
            "bench.scheduler.simulated:measure",
            "*Stream2LLM*'s workloads by their published distributions ([simulation](../simulation.md), "
            "[profiles](../profiles.md)). TTFT from the last chunk to the first token. vLLM-NS is FIFO over "
            "prompts that are complete. `lcas` is the policy as published, `lcas-fair` the changed one "
            "([scheduling](../scheduling.md)); both stand beside the paper's `lcas`. *Speed-up*: over vLLM-NS at "
            "the same quantile, or over vLLM-S where it says so. *Spread of policies*: P95 of the slowest of the "
            "streaming policies over that of the fastest.",
        ),
    ),
    "gpu": (
        Spec(
            "model",
            "Llama-3.1-8B's shape on one GPU",
            "bench.gpu.measure:measure",
            "Random weights. *Memory floor*: bytes of weights and KV over the bandwidth of a large copy; *matrix "
            "floor*: arithmetic over the rate of a large matrix product; both measured in the same run.",
        ),
    ),
}
