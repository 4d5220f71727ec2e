"""Synthetic workloads with published distributions, streamed lazily and equal for equal seeds.

`crawler` (append mode) and `anns` (update mode) follow *Stream2LLM* section 6.1 and table 2: inter-chunk
times, chunks per query and tokens per query have the published quantiles and means. Values between the
quantiles are interpolated; extremes that are not published are chosen to match the means. `sessions` follows
*k-LPM* section 5.1: prompts in random order, several of which share a user's history. Requests arrive as a
Poisson process. docs/simulation.md lists what is published and what is assumed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from lab.simulation.distributions import Counts, QuantileDistribution, humped, shares, skewed
from lab.simulation.inputs import Input, merged
from lab.simulation.tokens import EMPTY, MAX_ID, Segments

QUESTION_TOKENS = 32
TOP_K = 10
"""Documents in a list of search results."""


@dataclass(frozen=True, slots=True)
class Retrieval:
    """How one query's documents arrive."""

    gap_ms: QuantileDistribution
    """Time between two chunks."""
    chunks: Counts
    tokens: QuantileDistribution
    """Tokens of the finished prompt."""
    search_ms: QuantileDistribution | None = None
    """Length of the whole search; None: its gaps are all there is."""
    grows: bool = False
    """Prompts are as long as their chunks are many, by rank; else the two are independent."""
    late: bool = True
    """The last list arrives when the search ends; else it came before."""

    def size(self, rng: Random, chunks: int) -> int:
        """Tokens of a finished prompt of `chunks` chunks."""
        return round(self.tokens.at(self.chunks.rank(chunks, rng) if self.grows else rng.random()))

    def gaps(self, rng: Random, n: int, delay: float) -> list[int]:
        """Times between ``n + 1`` chunks, ns."""
        return [round(self.gap_ms.draw(rng) * delay * 1e6) for _ in range(n)]


CRAWLER = Retrieval(
    gap_ms=QuantileDistribution(
        ((0, 3), (0.05, 82), (0.25, 387), (0.5, 701), (0.75, 1340), (0.95, 3078), (0.99, 5293), (1, 9000))
    ),
    chunks=humped(7.9, 17),
    tokens=QuantileDistribution(
        ((0, 400), (0.5, 5749), (0.75, 11_167), (0.95, 28_372), (0.99, 46_000), (1, 100_000))
    ),
    grows=True,
)
"""The answer of the search is the first chunk, and each page one more."""
ANNS = Retrieval(
    gap_ms=QuantileDistribution(
        ((0, 0.5), (0.05, 1.4), (0.25, 11.3), (0.5, 37), (0.75, 124), (0.95, 699), (0.99, 2079), (1, 3500))
    ),
    chunks=skewed(4.4, 26),
    tokens=QuantileDistribution(
        ((0, 2650), (0.5, 10_126), (0.75, 14_615), (0.95, 30_618), (0.99, 72_000), (1, 110_000))
    ),
    search_ms=QuantileDistribution(((0, 1850), (0.5, 3464), (0.95, 5375), (1, 10_633))),
)
ONESHOT_TOKENS = QuantileDistribution(((0, 16), (0.5, 512), (0.95, 4096), (1, 8192)))
HISTORY_TOKENS = QuantileDistribution(((0, 4096), (1, 7168)))
DOCUMENT_TOKENS = QuantileDistribution(((0, 512), (1, 1024)))
BASE_TOKENS = 256
PER_USER = 4
"""Prompts that share one user's history (k-LPM section 5.1)."""


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a workload. Raises ValueError for numbers that make no sense."""

    qps: float
    """Mean arrivals per second."""
    requests: int
    delay: float = 1.0
    """Factor on the times between chunks (section 6.4)."""
    seed: int = 0
    max_tokens: int = 1
    """Tokens of an answer; the papers' systems only prefill, so one token ends a request."""
    burst: float = 1.0
    """Squared coefficient of variation of the times between arrivals: 1 of a Poisson process."""

    def __post_init__(self) -> None:
        if not self.qps > 0 or self.requests < 1 or not self.delay >= 0 or self.max_tokens < 1:
            raise ValueError("qps must be above 0, requests and max_tokens at least 1, delay at least 0")
        if not self.burst > 0:
            raise ValueError(f"burst must be above 0, not {self.burst}")

    def gap_s(self, rng: Random) -> float:
        """Draw the time to the next arrival."""
        if self.burst == 1:
            return rng.expovariate(self.qps)
        return rng.gammavariate(1 / self.burst, self.burst / self.qps)


class Library:
    """Documents without common tokens: each is a new run of ids. After the last id they start over."""

    def __init__(self) -> None:
        self._next = 0

    def document(self, tokens: int) -> range:
        """A new one."""
        start = self._next if self._next + tokens <= MAX_ID else 0
        self._next = start + tokens + 1
        return range(start, start + tokens)


def crawler(load: Load, shape: Retrieval = CRAWLER) -> Iterator[Input]:
    """Append mode: the question when the search has answered, then each page as it is found."""
    rng, library = Random(load.seed), Library()

    def query(number: int, opened: int) -> list[Input]:
        chunks = shape.chunks.draw(rng)
        gaps = shape.gaps(rng, max(1, chunks - 1), load.delay)
        total = max(shape.size(rng, chunks), QUESTION_TOKENS + len(gaps))
        question = Segments([library.document(QUESTION_TOKENS)])
        pages = [library.document(n) for n in shares(rng, total - QUESTION_TOKENS, len(gaps))]
        pieces = [Input(opened, number, "open", question, False, load.max_tokens)]
        for at, page in zip(accumulate(gaps), pages, strict=True):
            pieces.append(Input(opened + at, number, "append", Segments([page]), page is pages[-1]))
        return pieces

    return _arriving(load, rng, query)


def anns(load: Load, shape: Retrieval = ANNS) -> Iterator[Input]:
    """Update mode: the question follows a list of the best documents, which is refined.

    Each update inserts a document at a random rank, rather a low one, and drops the last one. A list is sent
    when the next one replaces it, and the last one when the search ends, which has found nothing better for a
    while.
    """
    rng, library = Random(load.seed), Library()

    def query(number: int, opened: int) -> list[Input]:
        chunks = shape.chunks.draw(rng)
        shown = shape.gaps(rng, chunks - 1, load.delay)
        total = max(shape.size(rng, chunks), QUESTION_TOKENS + TOP_K)
        question = library.document(QUESTION_TOKENS)
        sizes = shares(rng, total - QUESTION_TOKENS, TOP_K)
        documents = [library.document(n) for n in sizes]
        lists = [documents]
        for _ in shown:  # backwards: the finished prompt is the one whose size is known
            documents = documents.copy()
            del documents[max(rng.randrange(TOP_K), rng.randrange(TOP_K))]
            documents.append(library.document(rng.choice(sizes)))
            lists.append(documents)
        prompts = [Segments([*documents, question]) for documents in reversed(lists)]
        search = 0 if shape.search_ms is None else round(shape.search_ms.draw(rng) * load.delay * 1e6)
        rest = max(0, search - sum(shown))
        between = [*shown[1:], rest] if shown and shape.late else shown
        sent = [opened + at for at in accumulate(between, initial=0)]
        pieces = [
            Input(at, number, "update", prompt, shape.late and prompt is prompts[-1])
            for at, prompt in zip(sent, prompts, strict=True)
        ]
        if not shape.late:
            pieces.append(Input(sent[-1] + rest, number, "append", EMPTY, True))
        return [pieces[0]._replace(op="open", max_tokens=load.max_tokens), *pieces[1:]]

    return _arriving(load, rng, query)


def sessions(load: Load) -> Iterator[Input]:
    """Stateless prompts (base, user's history, document), `PER_USER` for each history, in random order."""
    rng, library = Random(load.seed), Library()
    base = library.document(BASE_TOKENS)
    users = -(-load.requests // PER_USER)
    histories = [library.document(round(HISTORY_TOKENS.draw(rng))) for _ in range(users)]
    order = [number // PER_USER for number in range(load.requests)]
    rng.shuffle(order)

    def query(number: int, opened: int) -> list[Input]:
        document = library.document(round(DOCUMENT_TOKENS.draw(rng)))
        prompt = Segments([base, histories[order[number]], document])
        return [Input(opened, number, "open", prompt, True, load.max_tokens)]

    return _arriving(load, rng, query)


def oneshot(load: Load) -> Iterator[Input]:
    """Prompts that are complete from the start and have nothing in common."""
    rng, library = Random(load.seed), Library()

    def query(number: int, opened: int) -> list[Input]:
        prompt = Segments([library.document(round(ONESHOT_TOKENS.draw(rng)))])
        return [Input(opened, number, "open", prompt, True, load.max_tokens)]

    return _arriving(load, rng, query)


WORKLOADS: dict[str, Callable[[Load], Iterator[Input]]] = {
    "crawler": crawler,
    "anns": anns,
    "sessions": sessions,
    "oneshot": oneshot,
}


def _arriving(load: Load, rng: Random, query: Callable[[int, int], list[Input]]) -> Iterator[Input]:
    def queries() -> Iterator[list[Input]]:
        now = 0.0
        for number in range(load.requests):
            now += load.gap_s(rng)
            yield query(number, round(now * 1e9))

    return merged(queries())


def whole(inputs: Iterator[Input]) -> Iterator[Input]:
    """The same requests without streaming: each opens, complete, when its last piece arrives."""
    partial: dict[int, tuple[Segments, int]] = {}
    for piece in inputs:
        tokens, max_tokens = partial.pop(piece.request, (EMPTY, piece.max_tokens))
        tokens = tokens + piece.tokens if piece.op == "append" else piece.tokens
        if piece.last:
            yield Input(piece.time_ns, piece.request, "open", tokens, True, max_tokens)
        else:
            partial[piece.request] = tokens, max_tokens
