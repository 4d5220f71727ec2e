"""What one pass can answer: several sessions, standing questions on one tape, sharers of a prefix."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, islice
from typing import NamedTuple

from bench.engine.contenders import (
    KeptCache,
    Regions,
    Reply,
    agree,
    append,
    ask_together,
    embedded,
    engine_for,
    model_of,
)
from bench.engine.floor import Floors, causal
from bench.engine.rates import MachineRates
from bench.engine.scenario import Records, Size, make_scenario, synthetic_bars
from bench.figures import FLOORS, Figure, Goal, Setting, latency, median_ratio, quantiles
from bench.run import SuiteRun, Turns
from engine.model.chat_format import PromptFormat
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.model.terse import TAPE_MODEL
from flash.question import PAPER_SIX
from ingest.compact import CompactEncoder, CompactSpec
from ingest.tokens import Tokeniser
from regions.tape import Retention, Tape

Ask = Callable[[], list[Reply]]
Questions = Sequence[Sequence[int]]
Goals = Mapping[str, Goal]
_WAYS = ("in turn", "kept caches one by one")
"""What one pass is compared with; the second one only where there are such caches."""


class Compared(NamedTuple):
    """``rows`` rows of ``readers``, each with ``own`` tokens (half of its new rows in them) and ``shared``.

    ``ns`` of each way's passes: one pass, then `_WAYS`.
    """

    name: str
    readers: int
    rows: int
    own: float
    goals: Goals
    shared: int = 0
    ns: Sequence[Sequence[int]] = ()


def compare(ways: Sequence[Ask], repeats: int, context: int) -> list[list[int]]:
    """ns of each way: all in turn, after one unmeasured round. Raises Disagreement."""
    turns = Turns(*ways)
    for _ in range(repeats + 1):
        together, *others = turns()
        for replies in others:
            for ours, other in zip(together, replies, strict=True):
                agree(ours, other, context)
    return [ns[1:] for ns in turns.ns]


def figures(found: Compared, floors: Floors) -> Iterator[Figure]:
    """One pass over the other ways and over its floor, and what limits it."""
    one_pass, in_turn, goals = found.ns[0], found.ns[1], found.goals
    context = found.shared + round(found.own)
    setting: Setting = {"": found.name, "rows": found.rows, "context": context, FLOORS: floors.made_of}
    figure = partial(Figure, setting=setting)
    for way, other in zip(_WAYS, found.ns[1:], strict=False):
        yield from latency("one pass", one_pass, setting, "", way, other, at=(0.5,))
    read = found.rows, found.shared, found.own, found.readers
    floor = floors.of_pass(*read)
    took, goal = quantiles(one_pass, 0.5)[0] / 1e6, goals.get("floor")
    yield figure("one pass P50", took, "ms", against="floor", reference=floor, goal=goal)
    gain = "gain of one pass"
    yield figure(gain, median_ratio(in_turn, one_pass), goal=goals.get(gain))
    yield figure("gain of a pass at the floor", quantiles(in_turn, 0.5)[0] / 1e6 / floor)


_GAINS = {6: 2.5, 25: 5.0}
"""Goals for one further token of this many answers."""
_OF_FLOOR = Goal(1.5)
"""Of a pass that arithmetic limits: it gains over single passes at most what its floor does."""


def sessions(run: SuiteRun) -> Iterator[Figure]:
    """Sessions with nothing in common but the prompt's first tokens, a question each: one pass, one pass
    each in turn, and kept caches one by one.
    """
    n, bars = run.sized((8, 155), (3, 12))
    bench = _Bench(run, n, bars)
    question = bench.prompt.question(PAPER_SIX[0].text)
    caches = [KeptCache(bench.plain, tokens) for tokens in bench.contexts]
    name = f"{n} sessions, a question each"
    bench.whole(name, [question] * n, lambda: [cache.ask(question) for cache in caches])
    yield from bench.figures()


def standing(run: SuiteRun) -> Iterator[Figure]:
    """Whole questions on one tape, and one further token of each answer: one pass against one each. Every
    row multiplies every key and weight itself either way; a pass only saves reading the same bytes again
    and the fixed cost of each pass. Then both placements (`flash.placement`): these questions of a window
    of 64 bars, in full, or numbered in the frozen prefix and asked by number, against one in the same
    placement.
    """
    numbers = run.sized((6, 25), (2, 4))
    bench = _Bench(run, 1, run.sized(480, 30), readers=max(numbers))
    for n in numbers:
        questions = [bench.prompt.question(text) for text in standing_texts(n)]
        goals = {"gain of one pass": Goal(_GAINS[n], "at least", "ours")} if n in _GAINS else {}
        bench.whole(f"{n} questions on one tape", questions)
        bench.decode(f"{n} answers on one tape, a token each", questions, goals)
    yield from bench.figures()
    at = partial(placements, run, bench.rates)
    yield from at("80m" if not run.quick else "embedded", model_of(run)[0])
    if not run.quick:
        yield from at("embedded", embedded(run))
        yield from at("tape model", load_model(TAPE_MODEL, dtype="float32", device="cpu"))


_PLACED = Goal(1.5)
"""Of how many times longer some questions in the shorter placement take than one, over the same of floors."""


def placements(run: SuiteRun, rates: MachineRates, model: str, loaded: LoadedModel) -> Iterator[Figure]:
    """Questions of one version in one pass, in both placements, all in turn. Goals are the shorter one's."""
    numbers, bars = run.sized((1, 6, 25, 100), (1, 2, 4)), run.sized(64, 6)
    prompt = PromptFormat.of(loaded.tokenizer, described=loaded.described, end_ids=loaded.end_ids)
    header, window = _window(loaded, prompt, bars)
    cases: list[tuple[str, int, tuple[int, ...], list[list[int]]]] = []
    for n in numbers:
        texts = standing_texts(n)
        if prompt.terse is not None:  # it knows fewer questions than that
            texts = list(islice(cycle(prompt.terse.questions), n))
        numbered = [prompt.numbered(number) for number in range(1, n + 1)]
        cases.append(("ephemeral", n, prompt.frozen(header), list(map(prompt.question, texts))))
        cases.append(("frozen", n, prompt.frozen(header, texts), numbered))
    tokens = sum(len(frozen) for *_, frozen, _ in cases) + len(cases) * sum(map(len, window))
    engine = engine_for(loaded, tokens, readers=max(numbers))
    ways: list[Callable[[], list[Reply]]] = []
    for _, n, frozen, questions in cases:
        regions = Regions(engine, frozen, Retention(sum(map(len, window))))
        regions.fill(window)
        ways.append(partial(ask_together, engine, [regions.tape] * n, questions))
    for way in ways:  # includes one-time set-up
        way()
    turns = Turns(*ways)
    for _ in range(run.sized(7, 2)):
        turns()
    times = {case[:2]: ns for case, ns in zip(cases, turns.ns, strict=True)}
    floors, behind = Floors.of(loaded, rates), sum(map(len, window))
    least, table = dict[tuple[str, int], float](), f"Placements, {model}"
    for placement, n, frozen, questions in cases:
        rows = sum(map(len, questions))
        least[placement, n] = floors.of_pass(rows, len(frozen) + behind, causal(round(rows / n)), n)
        setting: Setting = {"placement": placement, "questions": n, "rows": rows, "frozen": len(frozen)}
        yield from latency("one version's answers", times[placement, n], setting, table, at=(0.5,))
        if n > 1:
            took = quantiles(times[placement, n], 0.5)[0] / quantiles(times[placement, 1], 0.5)[0]
            most = least[placement, n] / least[placement, 1]
            goal = _PLACED if placement == ("frozen" if prompt.terse is None else "ephemeral") else None
            yield Figure("times one question", took, "", table, setting, "floors", most, goal=goal)


def _window(loaded: LoadedModel, prompt: PromptFormat, bars: int) -> tuple[str | None, Records]:
    """Bars in the lines that the model reads best, and their header."""
    if prompt.lines == "decimal":
        return None, make_scenario(loaded, Size(bars, 0, 0)).first
    header, window = "", list[list[int]]()
    for piece in CompactEncoder(Tokeniser(prompt.encode), CompactSpec(2)).encode(synthetic_bars(bars, 7)):
        if piece.restart is not None and piece.restart.anchor is not None:
            header = piece.restart.anchor.header
            window = [list(tokens) for tokens, _ in piece.restart.window]
        window += piece.lines
    return header, window


def standing_texts(n: int) -> list[str]:
    """``n`` different questions of about the same length: the paper's six, then one per further span."""
    further = (
        f"Is the close of the newest bar above the average close of the last {span} bars shown here?"
        for span in range(2, 2 + max(0, n - len(PAPER_SIX)))
    )
    return [*(question.text for question in PAPER_SIX), *further][:n]


class _Bench:
    """One engine, and ``n`` tapes of equal length behind one prefix.

    Questions go to one tape each, or all to the only one. The machine's own rates, which give the floors,
    are measured before and after everything else.
    """

    def __init__(self, run: SuiteRun, n: int, bars: int, *, readers: int = 0) -> None:
        self._repeats, self._found = run.sized(5, 2), list[Compared]()
        self._loaded, self.plain = model_of(run)
        self.prompt = PromptFormat.of(self._loaded.tokenizer)
        frozen = self.prompt.frozen()
        records = [make_scenario(self._loaded, Size(bars, 0, 0), seed).first for seed in range(n)]
        self.contexts = [[*frozen, *chain.from_iterable(own)] for own in records]
        sizes = [len(context) - len(frozen) for context in self.contexts]
        tokens = len(frozen) + sum(sizes)
        self._engine = engine_for(self._loaded, tokens, readers=max(readers, n))
        regions = [Regions(self._engine, frozen, Retention(size)) for size in sizes]
        for each, own in zip(regions, records, strict=True):
            each.fill(own)
        self._tapes = [each.tape for each in regions]
        self._shared, self._own = (len(frozen), sizes[0]) if n > 1 else (tokens, 0)
        self.rates = MachineRates.of(run)
        self.rates.look()

    def whole(self, name: str, questions: Questions, *kept: Ask) -> None:
        """Compare whole questions."""
        tapes, rows = self._read_by(questions), sum(map(len, questions))

        def ask(some: slice) -> list[Reply]:
            return ask_together(self._engine, tapes[some], questions[some])

        seen = causal(round(rows / len(tapes)))
        self._compare(Compared(name, len(tapes), rows, seen, {"floor": _OF_FLOOR}), ask, *kept)

    def decode(self, name: str, questions: Questions, goals: Goals) -> None:
        """Compare the passes after the questions': one row per reader, dropped again in O(1)."""
        forks = [tape.fork() for tape in self._read_by(questions)]
        tokens = [[reply.token] for reply in append(self._engine, forks, questions)]

        def step(some: slice) -> list[Reply]:
            replies = append(self._engine, forks[some], tokens[some])
            for fork in forks[some]:
                fork.keep(fork.length - 1)
            return replies

        n = len(forks)
        self._compare(Compared(name, n, n, sum(map(len, questions)) / n + 1, goals), step)
        for fork in forks:
            fork.release()

    def figures(self) -> Iterator[Figure]:
        """All figures, by the same floors; then the rates behind them."""
        self.rates.look()
        floors = Floors.of(self._loaded, self.rates)
        for compared in self._found:
            yield from figures(compared, floors)
        yield from self.rates.figures()

    def _compare(self, of: Compared, ask: Callable[[slice], list[Reply]], *kept: Ask) -> None:
        """``ask`` all readers in one pass, and one by one; ``of``: without the tapes."""
        ways = lambda: ask(slice(None)), lambda: [ask(slice(i, i + 1))[0] for i in range(of.readers)], *kept
        of = of._replace(own=self._own + of.own, shared=self._shared)
        self._found.append(of._replace(ns=compare(ways, self._repeats, of.shared + int(of.own))))

    def _read_by(self, questions: Questions) -> list[Tape]:
        return self._tapes * (len(questions) // len(self._tapes))
