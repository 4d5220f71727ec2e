"""The parts of `foretick bench peers`: contestants on one scenario, and their figures."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from bench.engine.contenders import EIGHTY_SHAPE, TIE
from bench.figures import Figure, Goal, Setting, latency
from bench.peers.conductor import Conductor, Peer, conducting
from bench.peers.protocol import Answered, Reply, Took
from bench.peers.scenarios import BURST, FILE, GROW, MULTI, RELEASED, Plan, Run, run_of
from bench.run import MeasurementFailed, SuiteRun
from engine.model.chat_format import PromptFormat
from engine.model.embedded import embedded_directory
from engine.model.gguf import gguf_directory

KEPT, OURS = "kept cache", "ours"
RESENT, WARMED, LLAMA = "vLLM, re-sent", "vLLM, warmed", "llama.cpp"
_TINY = {"hidden": 256, "layers": 2}
_GOALS: dict[tuple[str, str, str, str], float] = {
    ("grow", "float32", "question", WARMED): 0.8,
    ("grow", "float32", "reading", WARMED): 0.9,
    ("grow", "float32", "a further token", WARMED): 0.8,
    ("grow", "bfloat16", "question", WARMED): 0.6,
    ("grow", "bfloat16", "reading", WARMED): 0.9,
    ("burst", "float32", "question", KEPT): 0.25,
    ("multi", "float32", "question", KEPT): 0.25,
} | {
    (plan, dtype, what, peer): limit
    for plan in ("released", "file")
    for dtype in ("float32", "bfloat16")
    for what, peer, limit in (
        ("question", WARMED, 0.5),
        ("question", LLAMA, 0.5),
        ("reading", WARMED, 0.9),
        ("reading", LLAMA, 0.9),
        ("a further token", LLAMA, 0.9),
    )
}
"""By scenario, dtype, figure and contestant: ours over it, at most."""
_BY_CONTEXT = ("question", "reading")
_LONG = (RELEASED.name, FILE.name)
"""Parts on a released model."""
_TIES = {"float32": TIE, "bfloat16": 0.125}
"""By dtype: leads, in logits, that rounding may turn round. In bfloat16 a logit of 16 has steps of 0.125."""


def grow(run: SuiteRun) -> Iterator[Figure]:
    """100 bars, then 15 times 55 bars and a question of one token; then one with eight tokens more. Both are
    asked once before the first round and not measured, so that no contestant's first answer is a cold start
    (this holds for all parts). The same random weights for all, each contestant in a process of its own, one
    running at a time in an order drawn at each step while the others are stopped. *Kept cache*: Hugging Face
    with a `DynamicCache` that is cropped after each question; ratios are medians of the ratios at the same
    step. *vLLM, re-sent*: the whole prompt comes with the question. *Warmed*: it also comes with each update,
    for one token, so that the question meets a filled prefix cache. *llama.cpp* keeps a context and forgets
    the question.
    """
    yield from _measured(run, GROW)


def burst(run: SuiteRun) -> Iterator[Figure]:
    """The scenario of the growing tape with six questions at once after each update; the time until the last
    has its token.
    """
    yield from _measured(run, BURST)


def multi(run: SuiteRun) -> Iterator[Figure]:
    """Eight sessions: 100 bars each, then 15 times 20 bars to each, and a question to each at once; the time
    until the last has its token.
    """
    yield from _measured(run, MULTI)


def released(run: SuiteRun) -> Iterator[Figure]:
    """The scenario of the growing tape on a released model (`--model`) in its chat format, with 16 further
    tokens, and as many bars as its context has room for. Answers are compared where the kept cache's first
    token leads by more than rounding may change: 0.001 logits in float32, 0.125 in bfloat16.
    """
    if run.model is None or not run.model.is_dir():
        raise MeasurementFailed("the part released needs --model, the directory of a released Llama")
    yield from _measured(run, RELEASED, run.model)


def file(run: SuiteRun) -> Iterator[Figure]:
    """The scenario of released weights on a GGUF file (`--model`) as it is: llama.cpp reads it and keeps
    KV in float16, as it does by default; we read the file's codes and compute in the table's type, in which
    the others have the expanded weights. llama.cpp rounds what it multiplies with codes to 8 bits, we do not.
    """
    if run.model is None or not run.model.is_file():
        raise MeasurementFailed("the part file needs --model, a GGUF file")
    for dtype in run.dtypes:
        directory = gguf_directory(run.model.absolute(), dtype)
        yield from _measured(replace(run, dtypes=[dtype]), FILE, directory, str(run.model.absolute()))


@dataclass
class Results:
    """Replies of one contestant, by round. ``reading`` is empty for one that reads only when asked."""

    asked: list[Answered] = field(default_factory=list)
    longer: list[Answered] = field(default_factory=list)
    reading: list[int] = field(default_factory=list)

    def add(self, replies: Sequence[Reply]) -> None:
        """The replies of one round."""
        took, *answered = replies
        assert isinstance(took, Took)
        if took.ns is not None:
            self.reading.append(took.ns)
        for into, reply in zip((self.asked, self.longer), answered, strict=False):
            assert isinstance(reply, Answered)
            into.append(reply)

    @property
    def times(self) -> dict[str, list[float]]:
        """ns of each round, by figure."""
        asked = [float(reply.ns) for reply in self.asked]
        found = {
            "question": asked,
            "reading": list(map(float, self.reading)),
            "a further token": [(r.ns - r.first_ns) / (len(r.answers[0]) - 1) for r in self.longer],
        }
        return {name: values for name, values in found.items() if values}


def peers_of(run: SuiteRun) -> list[Peer]:
    """Everyone who could take part; those without an environment lack their engine and say so."""
    threads = {"OMP_NUM_THREADS": str(run.threads)}
    own = {KEPT: "kept:Kept", OURS: "ours:Ours"}
    others = {RESENT: ("vllm:Resent", run.vllm), WARMED: ("vllm:Warmed", run.vllm)}
    others[LLAMA] = ("llama:LlamaCpp", run.llama)
    peers = [Peer(name, f"bench.peers.{target}", None, threads) for name, target in own.items()]
    return peers + [
        Peer(name, f"bench.peers.{target}", python, threads | _preloads(python))
        for name, (target, python) in others.items()
        if python is not None
    ]


def _preloads(python: Path) -> dict[str, str]:
    """Libraries that vLLM's documentation wants to be loaded first, where they are installed."""
    openmp = python.absolute().parents[1] / "lib" / "libiomp5.so"
    found = [str(openmp) if openmp.exists() else None, find_library("tcmalloc_minimal")]
    wanted = ":".join(filter(None, found))
    return {"LD_PRELOAD": wanted} if wanted else {}


def race(scenario: Run, peers: Sequence[Peer], conductor: Conductor) -> dict[str, Results]:
    """Fill, ask once without measuring, and run all rounds; results by contestant, as far as each came."""
    found = {peer.name: Results() for peer in peers}
    conductor.start(peers, scenario.opening)
    for update in scenario.fill:
        conductor.turn(update)
    conductor.turn(*scenario.asks)  # kernels are compiled and loaded at the first one
    for each in scenario.rounds:
        for name, replies in conductor.turn(each.update, *scenario.asks).items():
            found[name].add(replies)
    return {name: results for name, results in found.items() if results.asked}


def _measured(run: SuiteRun, plan: Plan, released: Path | None = None, file: str = "") -> Iterator[Figure]:
    """All dtypes in turn, each with processes of its own; on random weights, or ``released`` ones."""
    model = released or embedded_directory(**(_TINY if run.quick else EIGHTY_SHAPE))
    prompt = PromptFormat.of(AutoTokenizer.from_pretrained(model, local_files_only=True))
    if released is not None:
        positions = AutoConfig.from_pretrained(model, local_files_only=True).max_position_embeddings
        plan = plan.within(prompt, positions)
    peers, plan = peers_of(run), run.sized(plan, plan.quick)
    for dtype in run.dtypes:
        run.say(f"{plan.name}, {dtype}, weights in {model}")
        scenario = run_of(plan, prompt, str(model), dtype, run.threads, file)
        with (
            tempfile.TemporaryDirectory(prefix="foretick-peers") as directory,
            conducting(Conductor(Path(directory), run.seed, run.say)) as conductor,
        ):
            found = race(scenario, peers, conductor)
        yield from taking_part(dtype, found, conductor.about, conductor.lost)
        yield from figures(plan, dtype, found, [each.context for each in scenario.rounds])


def taking_part(
    dtype: str, found: Mapping[str, Results], about: Mapping[str, str], lost: Mapping[str, str]
) -> Iterator[Figure]:
    """Who took part in how many rounds, by which engine, and why others did not."""
    for name in (KEPT, OURS, RESENT, WARMED, LLAMA):
        why = lost.get(name, "" if name in about else "absent: no environment given").partition("\n")[0]
        setting: Setting = {"contestant": name, "engine": "; ".join(filter(None, (about.get(name), why)))}
        rounds = len(found[name].asked) if name in found else 0
        yield Figure("rounds", rounds, "", f"Contestants, {dtype}", setting)


def figures(
    plan: Plan, dtype: str, found: Mapping[str, Results], contexts: Sequence[int]
) -> Iterator[Figure]:
    """Every contestant over the kept cache; then ours over every other, in all and by context."""
    for name, results in found.items():
        setting: Setting = {"contestant": name, "questions at once": plan.sessions * plan.questions}
        reference = found.get(KEPT, Results()) if name != KEPT else Results()
        for what, ns in results.times.items():
            yield from _beside(what, ns, setting, dtype, KEPT, reference.times.get(what, []))
        if reference.asked:
            tie = _TIES[dtype] if plan.name in _LONG else 0.0
            yield from _agreement(partial(Figure, table=dtype, setting=setting), results, reference, tie)
    ours = found.get(OURS, Results()).times
    for name, results in found.items():
        for what, mine in ours.items() if name != OURS else ():
            theirs = results.times.get(what, [])
            limit = _GOALS.get((plan.name, dtype, what, name))
            goal = None if limit is None else Goal(limit)
            if theirs:
                yield from _beside(what, mine, {}, f"Ours over the others, {dtype}", name, theirs, goal)
            if plan.name in (GROW.name, *_LONG) and what in _BY_CONTEXT:
                by_context = f"Ours by context, {dtype}"
                for a, b, context in zip(mine, theirs, contexts, strict=False):
                    yield from _beside(what, [a], {"context": context}, by_context, name, [b], goal)


def _beside(
    name: str,
    ns: Sequence[float],
    setting: Setting,
    table: str,
    against: str,
    other: Sequence[float],
    goal: Goal | None = None,
) -> Iterator[Figure]:
    """Medians in ms of the rounds that both had; ``other`` may be empty."""
    n, goals = min(len(ns), len(other)) or len(ns), {0.5: goal}
    against = against if other else ""
    return latency(name, ns[:n], setting, table, against, other[:n], at=(0.5,), goals=goals)


def _agreement(figure: partial[Figure], results: Results, reference: Results, tie: float) -> Iterator[Figure]:
    """Greedy answers equal to the reference's, and the largest lead of its token where another came.

    Answers where the reference's first token leads by at most ``tie`` are not compared.
    """
    equal, compared, lead = 0, 0, 0.0
    pairs = [*zip(results.asked, reference.asked, strict=False)]
    pairs += [*zip(results.longer, reference.longer, strict=False)]
    for ours, other in pairs:
        for i, (answer, expected) in enumerate(zip(ours.answers, other.answers, strict=True)):
            if other.leads is not None and other.leads[i] < tie:
                continue
            compared += 1
            equal += answer == expected
            if answer[0] != expected[0] and other.leads is not None:
                lead = max(lead, other.leads[i])
    yield figure("answers equal", equal, against="compared", reference=float(compared))
    if lead:
        yield figure("largest lead of another answer", lead, "logits")
