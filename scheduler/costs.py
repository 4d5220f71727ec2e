"""Predicted times of prefilling, swapping and forward passes, from a profile (*Stream2LLM* section 4.3).

A profile is measured once for a device and a model (`foretick profile`) and saved as JSON. The scheduler uses
it to compare swapping with recomputing and to predict how long a deadline can wait; the simulator takes its
times from it.
"""

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import msgspec

from engine.step import Chunk, Executor, SampledToken, pass_timer
from regions.offload.kv_store import Way
from scheduler.curves import CostCurve, FitError

Span = tuple[int, int]
"""(tokens in KV, tokens to compute) of one row of a pass."""

_SUFFIX = ".json"
_NS = 1e9
GAIN, CLIP = 0.1, 4.0
"""See `OnlineCosts`."""


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The profile of one device with one model; times in seconds.

    A pass takes ``pass_s``, plus ``row_s`` for each row but the first, plus what its rows compute and read,
    but at least ``floor_s``: every pass reads the weights once. A row of n tokens behind c tokens of context
    computes for recompute(c + n) - recompute(c), the rate of a prefill, and reads for ``context_s`` times c.
    Rows are assumed not to affect each other. Raises ValueError for values that make no sense.
    """

    device: str
    model: str
    block_size: int
    """Tokens of one block of the swap curves."""
    source: str
    """"measured: <command>", or the source of the numbers."""
    pass_tokens: int
    """Tokens of one pass of a long prefill."""
    pass_s: float
    """Seconds of every pass, without its rows."""
    floor_s: float
    """Least seconds of a pass: one token, no context."""
    recompute: CostCurve
    """Tokens of a prompt to seconds of computing, without the fixed cost of each pass."""
    swap_out: CostCurve
    """Blocks to seconds of copying them to the host; 0 blocks take 0 s."""
    swap_in: CostCurve
    """Blocks to seconds of copying them back."""
    row_s: float = 0.0
    """Seconds of each row but the first, without its tokens."""
    context_s: float = 0.0
    """Seconds that a row takes for each token of its context."""
    step_s: float = 0.0
    """Seconds of the host beside a pass: planning, taking results. Only capacity planning reads it."""
    step_row_s: float = 0.0
    """As `step_s`, of each row."""
    answer_s: float = 0.0
    """Seconds of the gateway for one answer, up to its acknowledgement. As `step_s`."""
    record_s: float = 0.0
    """Seconds of the gateway for one record of a source. As `step_s`."""
    waking: CostCurve | None = None
    """Seconds without a pass, to those that the next one takes longer (cores sleep). As `step_s`."""
    errors: dict[str, FitError] = {}
    """Errors at points left out of the fit: by curve, and as `batch` for passes of several rows."""

    def __post_init__(self) -> None:
        for name in ("block_size", "pass_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if min(self.step_s, self.step_row_s, self.answer_s, self.record_s) < 0:
            raise ValueError("step_s, step_row_s, answer_s and record_s must not be negative")
        if min(self.row_s, self.context_s) < 0:
            raise ValueError(f"row_s {self.row_s} and context_s {self.context_s} must not be negative")
        if not 0 <= self.pass_s <= self.floor_s:
            raise ValueError(
                f"pass_s {self.pass_s} must be at least 0, and floor_s {self.floor_s} at least that"
            )
        if self.recompute.y[0] != 0:
            raise ValueError("recompute must be 0 s at 0 tokens")

    def recompute_ns(self, tokens: int) -> int:
        """Prefilling ``tokens`` from an empty context, in passes of ``pass_tokens``."""
        if tokens <= 0:
            return 0
        return round(max(self.recompute(tokens) + self.overhead_s(tokens), self.floor_s) * _NS)

    def overhead_s(self, tokens: int) -> float:
        """Seconds of prefilling ``tokens`` without the computing: fixed cost of the passes, context reads."""
        passes = -(-tokens // self.pass_tokens)
        before = self.pass_tokens * passes * (passes - 1) // 2
        return passes * self.pass_s + before * self.context_s

    def swap_out_ns(self, blocks: int) -> int:
        """Moving ``blocks`` to the host."""
        return round(self.swap_out(blocks) * _NS) if blocks > 0 else 0

    def swap_in_ns(self, blocks: int) -> int:
        """Moving ``blocks`` back."""
        return round(self.swap_in(blocks) * _NS) if blocks > 0 else 0

    def swap_ns(self, blocks: int) -> int:
        """Both directions: the whole cost of preemption by swapping (section 4.3)."""
        return self.swap_out_ns(blocks) + self.swap_in_ns(blocks)

    def batch_ns(self, spans: Sequence[Span]) -> int:
        """One pass over rows of (tokens in KV, tokens to compute)."""
        curve, seconds = self.recompute, self.pass_s + self.row_s * max(0, len(spans) - 1)
        for computed, n in spans:
            seconds += curve(computed + n)
            if computed:
                seconds += self.context_s * computed - curve(computed)
        return round(max(seconds, self.floor_s) * _NS)

    def host_ns(self, rows: int) -> int:
        """The host's time beside a pass over this number of rows; 0 in a profile without it."""
        return round((self.step_s + self.step_row_s * rows) * _NS)


def shipped() -> list[str]:
    """Names of the profiles that come with the package."""
    names = (entry.name for entry in (files("scheduler") / "profiles").iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def load(profile: str | Path) -> CostModel:
    """Load a shipped profile by name, or any profile by path.

    Raises ValueError naming the file, and the field at fault.
    """
    ours = files("scheduler") / "profiles" / f"{profile}{_SUFFIX}"
    try:
        data = ours.read_bytes() if profile in shipped() else Path(profile).read_bytes()
        return msgspec.json.decode(data, type=CostModel)
    except OSError as error:
        raise ValueError(
            f"{profile}: no profile ({error.strerror}); give a file, or one of {', '.join(shipped())}"
        ) from None
    # a string that is not UTF-8, deep nesting
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{profile}: {error}") from None


def save(model: CostModel, path: Path) -> None:
    """Write a profile and create its directory. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(model)) + b"\n")


def guess(block_size: int) -> CostModel:
    """A default for an unknown device, slower than most so that deadlines are met early rather than late.

    Per second 10,000 tokens of prefill and 8,000 tokens of KV copied (500 blocks of 16); 10 ms a pass.
    `OnlineCosts` corrects it from the first passes on.
    """
    block = CostCurve((0.0, 1.0), (0.0, block_size / 8000))
    return CostModel(
        device="unknown",
        model="unknown",
        block_size=block_size,
        source="a guess, not measured",
        pass_tokens=1024,
        pass_s=0.01,
        floor_s=0.01,
        recompute=CostCurve((0.0, 1.0), (0.0, 1e-4)),
        swap_out=block,
        swap_in=block,
    )


class OnlineCosts:
    """A profile corrected online: one factor on all computing times, and one on the transfers of each way.

    A factor is a running mean of measured times over one of predicted times; each new pass, or transfer, has
    the weight `GAIN`, so long ones count for more. One counts for between 1/`CLIP` and `CLIP` times its
    predicted time, so a pass that waited for a compilation moves the factor by a bounded step.
    """

    def __init__(self, base: CostModel) -> None:
        self.base = base
        self._computing = _Factor()
        self._copying: dict[Way, _Factor] = {"out": _Factor(), "in": _Factor()}

    @property
    def factor(self) -> float:
        """Measured over predicted time of passes; 1 before the first."""
        return self._computing.value

    def observe(self, spans: Sequence[Span], took_ns: int) -> None:
        """Record the time of a pass over ``spans``; 0 ns is ignored."""
        self._computing.observe(self.base.batch_ns(spans), took_ns)

    def copied(self, way: Way, blocks: int, took_ns: int) -> None:
        """Record the time of a transfer of ``blocks``: a `regions.offload.kv_store.Copied`."""
        predicted = self.base.swap_out_ns(blocks) if way == "out" else self.base.swap_in_ns(blocks)
        self._copying[way].observe(predicted, took_ns)

    def recompute_ns(self, tokens: int) -> int:
        """See `Costs`."""
        return round(self.base.recompute_ns(tokens) * self.factor)

    def swap_ns(self, blocks: int) -> int:
        """See `Costs`."""
        out, back = self.base.swap_out_ns(blocks), self.base.swap_in_ns(blocks)
        return round(out * self._copying["out"].value + back * self._copying["in"].value)

    def batch_ns(self, spans: Sequence[Span]) -> int:
        """See `Costs`."""
        return round(self.base.batch_ns(spans) * self.factor)


class _Factor:
    """See `OnlineCosts`."""

    def __init__(self) -> None:
        self._predicted = self._measured = 0.0

    @property
    def value(self) -> float:
        return self._measured / self._predicted if self._predicted else 1.0

    def observe(self, predicted: int, took_ns: int) -> None:
        if predicted <= 0 or took_ns <= 0:
            return
        expected = predicted * self.value
        measured = min(max(float(took_ns), expected / CLIP), expected * CLIP)
        gain = GAIN if self._predicted else 1.0
        self._predicted += gain * (predicted - self._predicted)
        self._measured += gain * (measured - self._measured)


class LearningExecutor:
    """Wraps an executor and reports the time of each pass to ``costs``; ``clock`` gives ns."""

    def __init__(self, executor: Executor, costs: OnlineCosts, clock: Callable[[], int]) -> None:
        self._executor, self._costs, self._clock = executor, costs, clock
        self._took = pass_timer(executor)
        self.took_ns: int | None = None
        """See `Timed`."""

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """See `Executor`; a pass that raises is not recorded."""
        spans = spans_of(batch)
        began = self._clock()
        rows = self._executor.execute(batch)
        self.took_ns = self._took(self._clock() - began)
        self._costs.observe(spans, self.took_ns)
        return rows


def spans_of(batch: Sequence[Chunk]) -> list[Span]:
    """The rows of a pass for the cost model. Call it before the pass, which advances the targets."""
    return [(chunk.target.context_tokens, len(chunk.tokens)) for chunk in batch]
