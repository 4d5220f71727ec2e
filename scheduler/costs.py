"""What the device takes for prefilling, for swapping and for a pass: read from a profile (*Stream2LLM* 4.3).

A profile is measured once for a device and a model (`foretick profile`) and saved as JSON. The scheduler
compares swapping with recomputing by it, and predicts how long a deadline can wait. The simulator takes its
times from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import msgspec

from engine.step import Chunk, Executor, SampledToken
from scheduler.curves import Curve, FitError

Span = tuple[int, int]
"""(tokens in KV, tokens to compute) of one row of a pass."""

_SUFFIX = ".json"
_NS = 1e9
GAIN, CLIP = 0.1, 4.0
"""See `OnlineCosts`."""


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The profile of one device with one model; times in seconds.

    A pass takes ``pass_s``, ``row_s`` for each row but the first, and what its rows compute and read, and
    never less than ``floor_s``: the weights are read once, however few the rows. A row of n tokens behind c
    computes recompute(c + n) - recompute(c), the rate of a prefill, and reads ``context_s`` for each of the
    c. Rows are assumed not to affect each other. Raises ValueError for values that make no sense.
    """

    device: str
    model: str
    block_size: int
    """Tokens of one block of the swap curves."""
    source: str
    """"measured: <command>", or where else it comes from."""
    pass_tokens: int
    """Tokens of one pass while a long prompt is computed."""
    pass_s: float
    """What every pass takes in addition to its rows."""
    floor_s: float
    """What a pass takes at the least: one token, no context."""
    recompute: Curve
    """Tokens of a prompt to the seconds it computes, passes' own cost left out."""
    swap_out: Curve
    """Blocks to the seconds until they are on the host; no blocks take no time."""
    swap_in: Curve
    """Blocks to the seconds until they are back."""
    row_s: float = 0.0
    """What each row of a pass takes in addition to its tokens; the first's is in ``pass_s``."""
    context_s: float = 0.0
    """What a row takes for each token in KV before it, whatever it computes."""
    errors: dict[str, FitError] = {}
    """Of points left out of the fit: by curve, and `batch` of passes of other shapes than a prefill's."""

    def __post_init__(self) -> None:
        for name in ("block_size", "pass_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if min(self.row_s, self.context_s) < 0:
            raise ValueError(f"row_s {self.row_s} or context_s {self.context_s} is negative")
        if not 0 <= self.pass_s <= self.floor_s:
            raise ValueError(f"floor_s {self.floor_s} is below pass_s {self.pass_s}, or that is negative")
        if self.recompute.y[0] != 0:
            raise ValueError("recompute of no tokens takes no time")

    def recompute_ns(self, tokens: int) -> int:
        """Prefilling ``tokens`` from an empty context, in passes of ``pass_tokens``."""
        if tokens <= 0:
            return 0
        return round(max(self.recompute(tokens) + self.overhead_s(tokens), self.floor_s) * _NS)

    def overhead_s(self, tokens: int) -> float:
        """Seconds of prefilling ``tokens`` besides computing: the passes' own, and reading the context."""
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
        """Both ways: what preempting by swapping takes in all (section 4.3 weighs it against recompute)."""
        return self.swap_out_ns(blocks) + self.swap_in_ns(blocks)

    def batch_ns(self, spans: Sequence[Span]) -> int:
        """One pass over rows of (tokens in KV, tokens to compute)."""
        curve, seconds = self.recompute, self.pass_s + self.row_s * max(0, len(spans) - 1)
        for computed, n in spans:
            seconds += curve(computed + n)
            if computed:
                seconds += self.context_s * computed - curve(computed)
        return round(max(seconds, self.floor_s) * _NS)

    def scaled(self, factor: float) -> CostModel:
        """A device that takes ``factor`` times as long for what it computes; transfers stay."""
        curve = self.recompute
        return msgspec.structs.replace(
            self,
            pass_s=self.pass_s * factor,
            floor_s=self.floor_s * factor,
            recompute=Curve(curve.x, tuple(y * factor for y in curve.y)),
            row_s=self.row_s * factor,
            context_s=self.context_s * factor,
        )


def shipped() -> list[str]:
    """Names of the profiles that come with the package."""
    names = (entry.name for entry in (files("scheduler") / "profiles").iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def load(profile: str | Path) -> CostModel:
    """A profile by the name of a shipped one, or by the path of a file.

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
    except msgspec.DecodeError as error:
        raise ValueError(f"{profile}: {error}") from None


def save(model: CostModel, path: Path) -> None:
    """Write a profile, its folder too. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(model)) + b"\n")


def guess(block_size: int) -> CostModel:
    """A default for an unknown device: slower than most, so that deadlines are met early, not late.

    10,000 tokens and 8,000 tokens' KV (500 blocks of 16) a second, 10 ms a pass. With `OnlineCosts` the
    first passes correct it.
    """
    block = Curve((0.0, 1.0), (0.0, block_size / 8000))
    return CostModel(
        device="unknown",
        model="unknown",
        block_size=block_size,
        source="a guess, not measured",
        pass_tokens=1024,
        pass_s=0.01,
        floor_s=0.01,
        recompute=Curve((0.0, 1.0), (0.0, 1e-4)),
        swap_out=block,
        swap_in=block,
    )


class OnlineCosts:
    """A profile corrected by the passes that really ran: one factor on everything that is computed.

    The factor is the ratio of two running means, of the measured and of the predicted time of a pass, each
    new pass with the weight `GAIN`, so long passes count for more. A pass counts for at most `CLIP` times
    what was expected of it and at least for the `CLIP`-th part, so that one that waited for a compilation
    moves the factor by a bounded step. Transfers are another resource and stay as measured.
    """

    def __init__(self, base: CostModel) -> None:
        self.base = base
        self._predicted = self._measured = 0.0

    @property
    def factor(self) -> float:
        """Measured over predicted time; 1 before the first pass."""
        return self._measured / self._predicted if self._predicted else 1.0

    def observe(self, spans: Sequence[Span], took_ns: int) -> None:
        """A pass over ``spans`` took ``took_ns``; a pass that took no time is ignored."""
        predicted = self.base.batch_ns(spans)
        if predicted <= 0 or took_ns <= 0:
            return
        expected = predicted * self.factor
        measured = min(max(float(took_ns), expected / CLIP), expected * CLIP)
        gain = GAIN if self._predicted else 1.0
        self._predicted += gain * (predicted - self._predicted)
        self._measured += gain * (measured - self._measured)

    def recompute_ns(self, tokens: int) -> int:
        """See `Costs`."""
        return round(self.base.recompute_ns(tokens) * self.factor)

    def swap_ns(self, blocks: int) -> int:
        """See `Costs`."""
        return self.base.swap_ns(blocks)

    def batch_ns(self, spans: Sequence[Span]) -> int:
        """See `Costs`."""
        return round(self.base.batch_ns(spans) * self.factor)


class LearningExecutor:
    """Runs another executor's passes and tells ``costs`` what they took; ``clock`` gives ns."""

    def __init__(self, executor: Executor, costs: OnlineCosts, clock: Callable[[], int]) -> None:
        self._executor, self._costs, self._clock = executor, costs, clock

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """See `Executor`; a pass that raises is not observed."""
        spans = spans_of(batch)
        began = self._clock()
        rows = self._executor.execute(batch)
        self._costs.observe(spans, self._clock() - began)
        return rows


def spans_of(batch: Sequence[Chunk]) -> list[Span]:
    """The rows of a pass as the cost model sees them. Call it before the pass, which advances the targets."""
    return [(chunk.target.context_tokens, len(chunk.tokens)) for chunk in batch]
