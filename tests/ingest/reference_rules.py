"""The rules of `ingest.feed_rules` in plain Python, a symbol at a time: their oracle."""

from dataclasses import dataclass, field

from ingest.bars import BarPolicy


@dataclass(frozen=True)
class Fed:
    """A record. ``values``: price and size; bid, ask and their sizes; or open, high, low, close, volume."""

    kind: str
    event: int
    values: tuple[int, ...]
    received: int = 0
    gap: bool = False
    identified: bool = False
    interval: int = 0

    @property
    def price(self) -> int:
        if self.kind == "quote":
            return (self.values[0] + self.values[1]) // 2
        return self.values[3] if self.kind == "bar" else self.values[0]

    @property
    def content(self) -> tuple[object, ...]:
        return self.kind, self.event, self.values, self.interval


@dataclass
class ReferenceRules:
    """Says of each record which faults it has; keeps all. ``splits``: as in `ingest.bars.Feeds`."""

    policy: BarPolicy
    splits: tuple[tuple[int, float], ...] = ()
    rolls: tuple[int, ...] = ()
    known: set[object] = field(default_factory=set)
    recent: list[object] = field(default_factory=list)
    before_gap: list[object] = field(default_factory=list)
    after_gap: int = 0
    newest: int = 0
    bar_end: int = 0
    last: tuple[int, int] | None = None
    """The newest price that is not suspect, and its event time."""
    suspect: int | None = None
    typical: float = 0.0
    moves: int = 0

    def judge(self, record: Fed) -> set[str]:
        found = {"duplicate"} if self.is_repeat(record) else set()
        if record.received < record.event:
            found.add("skewed_clock")
        match record.kind:
            case "trade" if record.values[1] == 0:
                found.add("zero_size")
            case "quote":
                bid, ask, *sizes = record.values
                found |= {"crossed"} if bid > ask else {"locked"} if bid == ask else set()
                found |= {"one_sided"} if sorted(size > 0 for size in sizes) == [False, True] else set()
            case "bar":
                if 0 < record.received - record.event < record.interval // 2:
                    found.add("close_stamped")
                if self.newest < record.event < self.bar_end:
                    found.add("overlapping")
        if record.event < self.newest:
            return found | {"reordered"}
        self.newest = record.event
        self.bar_end = record.event + record.interval
        return found if "crossed" in found else found | self.judge_price(record)

    def is_repeat(self, record: Fed) -> bool:
        if record.identified:
            again = record.content in self.known
            self.known.add(record.content)
            return again
        if record.kind == "bar":
            return False
        if record.gap:
            self.before_gap, self.after_gap = self.recent[-64:], 64
        if self.after_gap:
            if record.content in self.before_gap:
                return True
            self.after_gap -= 1
            self.before_gap = self.before_gap[-self.after_gap :] if self.after_gap else []
        self.recent.append(record.content)
        return False

    def judge_price(self, record: Fed) -> set[str]:
        price, event = record.price, record.event
        if self.last is None:
            return self.settle(price, event, 0)
        before, since = self.last
        if any(since < roll <= event for roll in self.rolls):
            self.suspect = None
            return self.settle(price, event, 0)
        for moment, factor in sorted(self.splits):
            if since < moment <= event:
                if abs(before / price / factor - 1) < 0.2:
                    self.suspect = None
                    return {"split"} | self.settle(price, event, 0)
                break
        limit, found = max(self.policy.bad_tick_band * self.typical, 0.002 * before), set[str]()
        if self.suspect is not None:
            suspect, self.suspect = self.suspect, None
            if abs(price - before) <= limit:
                return {"bad_tick"} | self.settle(price, event, abs(price - before))
            scale = suspect / before
            limit *= scale
            self.typical *= scale
            if abs(price - suspect) <= limit and is_split(max(before, suspect) / min(before, suspect)):
                found.add("split_like")
            before = suspect
            self.last = suspect, since
        if self.moves >= 64 and abs(price - before) > limit:
            self.suspect = price
            return found
        return found | self.settle(price, event, abs(price - before))

    def settle(self, price: int, event: int, move: float) -> set[str]:
        share = max(1 / 64, 1 / (self.moves + 1))
        self.typical += (min(move, 4 * self.typical + 1) - self.typical) * share
        self.last, self.moves = (price, event), self.moves + 1
        return set()


def is_split(ratio: float) -> bool:
    """Three for two, or a whole number up to twenty, within three percent."""
    near = [1.5, *range(2, 21)]
    return any(abs(ratio - each) < 0.03 * each for each in near) and ratio <= 20 * 1.03
