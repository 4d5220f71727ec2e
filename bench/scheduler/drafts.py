"""Speculation: what n-gram drafts save, on free text and on JSON under a grammar, for several thresholds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, NamedTuple

from bench.engine.contenders import embedded
from bench.engine.scenario import Size, scenario_in
from bench.figures import Figure, Goal, Setting, median_ratio
from bench.run import SuiteRun, Turns
from daemon.engine.cost_probe import LARGEST_TRANSFER, measured_costs
from engine.device import in_own_thread
from engine.engine import Engine
from engine.model.chat_format import PromptFormat
from engine.model.constrained import Part, TextGrammar, schema_parts
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.model.vocabulary import Vocabulary, token_bytes
from engine.sampling import accept
from engine.step import Chunk, Executor, SampledToken
from regions.pool_metadata import BlockPool
from regions.radix import RadixCache
from regions.streaming_kv import StreamingPrompt
from scheduler.interfaces import Costs, Limits, PriorityClass
from scheduler.request import Request, RequestSpec, State
from scheduler.scheduler import Scheduler

_BARS = 8
_ASKED = (
    "Is the trend up or down? Give your reasons, bar by bar.",
    "Summarise these bars in a few sentences.",
    "Repeat the last five bars, one a line.",
    "Which bar had the highest volume, and what happened after it?",
)
_AS_JSON = (
    'Describe these bars as JSON, so: {"trend": "up, down or sideways", "strength": "weak, moderate '
    'or strong", "breakout": true or false, "last_close": a number, "previous_close": a number, "phase": '
    '"accumulation, distribution or consolidation"}'
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "trend": {"enum": ["up", "down", "sideways"]},
        "strength": {"enum": ["weak", "moderate", "strong"]},
        "breakout": {"type": "boolean"},
        "last_close": {"type": "integer"},
        "previous_close": {"type": "integer"},
        "phase": {"enum": ["accumulation", "distribution", "consolidation"]},
    },
}
_DEFAULTS = Limits(max_batch_tokens=4096, chunk_max=4096, cell_budget_fraction=1.0)
_VARIED: tuple[dict[str, Any], ...] = (
    {},
    *({"max_drafts": most} for most in (1, 2, 8, 16)),
    *({"draft_give_up": rate} for rate in (0.0, 0.2, 0.3, 0.5)),
    *({"draft_retry": tokens} for tokens in (4, 64)),
    *({"max_draft_rows": rows} for rows in (4, 8)),
)
"""What the recorded answers are drafted with again; the first: the defaults."""
_TIMED = (0, 2, 4, 8)
"""`max_drafts` whose passes are timed."""


@dataclass(frozen=True)
class Case:
    """Prompts with answers of one kind; ``temperature`` and ``parts`` of their grammar, () for free text."""

    kind: str
    prompts: Sequence[Sequence[int]]
    stop_ids: frozenset[int]
    max_tokens: int
    vocabulary: Vocabulary
    temperature: float = 0.0
    parts: Sequence[Part] = ()

    def requests(self, open_prompt: Callable[[], StreamingPrompt], which: slice) -> list[Request]:
        """New requests for the prompts ``which``."""
        return [Request(self._spec(prompt, open_prompt)) for prompt in self.prompts[which]]

    def _spec(self, prompt: Sequence[int], open_prompt: Callable[[], StreamingPrompt]) -> RequestSpec:
        spec = RequestSpec(
            PriorityClass.POOL, "", prompt, self.max_tokens, lambda _: None, open_prompt=open_prompt,
            stop_ids=self.stop_ids, temperature=self.temperature,
        )  # fmt: skip
        if not self.parts:
            return spec
        grammar = TextGrammar(self.parts, self.vocabulary, self.stop_ids)

        def ended(request: Request) -> bool:
            return grammar.complete(request.output)

        return replace(spec, grammar=grammar.allowed, forced=grammar.forced, on_token=ended)


class Recorded:
    """An executor that gives recorded answers: what is drafted and accepted needs no model."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.pool = BlockPool(4096, block_size=16)
        self._cache = RadixCache(self.pool, 0)
        self._answers = iter(answers)
        self._left: dict[int, list[int]] = {}
        """What follows of each answer, by its prompt's identity; the scheduler keeps the prompt."""

    def open_prompt(self) -> StreamingPrompt:
        """The reader of the next answer; requests open in order."""
        prompt = StreamingPrompt(self.pool, self._cache, frame_limit=1 << 20)
        self._left[id(prompt)] = list(next(self._answers))
        return prompt

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """See `Executor`."""
        return [self._run(chunk) for chunk in batch]

    def _run(self, chunk: Chunk) -> SampledToken | None:
        chunk.target.wrote(chunk.target.next_slots(len(chunk.tokens)), chunk.tokens)
        if not chunk.sample:
            return None
        drafts = chunk.tokens[len(chunk.tokens) - chunk.drafts :]
        left = self._left[id(chunk.target)]
        behind = [-1] * (1 + chunk.drafts - len(left))
        chosen = accept(
            drafts, [SampledToken(token, 1.0, 0.0) for token in (*left[: 1 + chunk.drafts], *behind)]
        )
        del left[: 1 + len(chosen.accepted)]
        return chosen


class Counts(NamedTuple):
    """Of all answers: tokens, passes in which one had a row, drafts verified and accepted."""

    tokens: int
    passes: int
    verified: int
    accepted: int


def counted(requests: Sequence[Request]) -> Counts:
    """The counts of ended requests."""
    tokens, accepted = sum(len(each.output) for each in requests), sum(r.drafts.accepted for r in requests)
    return Counts(tokens, tokens - accepted, sum(r.drafts.verified for r in requests), accepted)


def answered(
    executor: Executor,
    pool: BlockPool,
    requests: Sequence[Request],
    limits: Limits,
    costs: Costs | None = None,
) -> Sequence[Request]:
    """The requests, answered all at once. Raises RuntimeError where one failed."""
    ticks = count()
    scheduler = Scheduler(executor, pool, limits, lambda: next(ticks), costs=costs)
    for request in requests:
        scheduler.submit(request)
    while scheduler.step():
        pass
    if any(request.state is not State.FINISHED for request in requests):
        raise RuntimeError(f"an answer failed: {[request.error for request in requests]}")
    return requests


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Answers of several models to prompts of eight bars: free text, the best token or drawn at 0.8, and JSON
    of a schema. The tokens are generated once without drafts; which drafts would have been accepted follows
    from them, at all thresholds, were drafts free. *At once* answers share each pass. *Time* is of the same
    answers with drafts over without, in turn on one engine, the prompts in the prefix cache, and with the
    engine's costs, so that no more is drafted than pays.
    """
    models = {"embedded": embedded(run)}
    if run.model is not None:
        released = run.model
        models[released.name] = in_own_thread(lambda: load_model(released, dtype="float32", device="cpu"))
    for name, loaded in models.items():
        for case in cases(loaded, run.sized(96, 24), run.sized(4, 2)):
            yield from of_case(run, name, loaded, case)


def cases(loaded: LoadedModel, tokens: int, prompts: int) -> list[Case]:
    """Each kind of answer: at most ``tokens`` long, to the first ``prompts``."""
    form = PromptFormat.of(loaded.tokenizer, described=loaded.described, end_ids=loaded.end_ids)
    made, as_json = list[list[int]](), list[list[int]]()
    for seed, asked in enumerate(_ASKED[:prompts]):
        scenario = scenario_in(form, Size(_BARS, 0, 0), seed)
        before = [*scenario.frozen, *chain.from_iterable(scenario.first)]
        made.append([*before, *form.question(asked)])
        as_json.append([*before, *form.question(_AS_JSON)])
    vocabulary = Vocabulary(token_bytes(loaded.tokenizer))
    free = Case("free text", made, form.stop_ids, tokens, vocabulary)
    return [
        free,
        replace(free, kind="free text, drawn", temperature=0.8),
        replace(free, kind="JSON", prompts=as_json, parts=schema_parts(_SCHEMA), max_tokens=200),
    ]


def of_case(run: SuiteRun, name: str, loaded: LoadedModel, case: Case) -> Iterator[Figure]:
    """Counts at all thresholds, of one answer at a time and of all at once; then times."""
    longest = max(map(len, case.prompts)) + case.max_tokens
    engine = Engine(loaded, blocks=-(-longest // 16) * (2 * len(case.prompts) + 2), eager=True)
    plain = replace(_DEFAULTS, max_drafts=0)
    written = answered(engine, engine.pool, case.requests(engine.open_prompt, slice(None)), plain)
    answers = [request.output for request in written]
    base: Setting = {"model": name, "text": case.kind}
    for changes in _VARIED:
        limits = replace(_DEFAULTS, **changes)
        for together in (1, len(answers)):
            found = replayed(case, answers, limits, together)
            setting = base | {"at once": together} | {key: str(value) for key, value in changes.items()}
            share = found.accepted / max(1, found.verified)
            yield Figure("accepted", share, "", "Acceptance", setting, n=found.verified)
            yield Figure("tokens a pass", found.tokens / found.passes, "", "Gain", setting, n=found.tokens)
    yield from timed(run, engine, case, base, answers)


def replayed(case: Case, answers: Sequence[Sequence[int]], limits: Limits, together: int) -> Counts:
    """The counts of recorded answers under ``limits``, ``together`` of them in a pass."""
    found = list[Request]()
    for first in range(0, len(answers), together):
        group = slice(first, first + together)
        executor = Recorded(answers[group])
        found += answered(executor, executor.pool, case.requests(executor.open_prompt, group), limits)
    if [request.output for request in found] != list(answers):
        raise RuntimeError("drafts changed a recorded answer")
    return counted(found)


def timed(
    run: SuiteRun, engine: Engine, case: Case, base: Setting, answers: Sequence[Sequence[int]]
) -> Iterator[Figure]:
    """The time of one answer alone, and of all at once, with drafts over without."""
    costs = measured_costs(engine, _DEFAULTS.max_batch_tokens, LARGEST_TRANSFER)
    for which in (slice(0, 1), slice(None)):
        expected = answers[which]

        def way(most: int, which: slice = which) -> list[list[int]]:
            requests = case.requests(engine.open_prompt, which)
            answered(engine, engine.pool, requests, replace(_DEFAULTS, max_drafts=most), costs)
            return [request.output for request in requests]

        turns = Turns(*(lambda most=most: way(most) for most in _TIMED))
        same = [0] * len(_TIMED)
        repeats = run.sized(3, 1)
        for _ in range(repeats):
            for at, found in enumerate(turns()):
                same[at] += found == expected
        for at, most in enumerate(_TIMED[1:], 1):
            setting = base | {"at once": len(expected), "max_drafts": most}
            goal = Goal(1.0, of="ours") if most == _DEFAULTS.max_drafts else None
            ratio = median_ratio(turns.ns[at], turns.ns[0])
            yield Figure("time over none", ratio, "", "Time", setting, goal=goal)
            yield Figure("answers equal", same[at] / repeats, "", "Time", setting)
