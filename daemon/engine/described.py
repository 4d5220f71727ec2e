"""What the prefix says of a session's lines (`model.describe`): whose bars they are, and what others mean."""

from collections.abc import Sequence

from daemon.config.schema import BarsConfig, Config, SessionConfig
from daemon.config.symbols import rolls_of
from feeds.durations import Duration
from ingest.lines import DAY_NS

_EVENTS = {
    "text": "a headline (text)",
    "status": "a state of trading (halt, resume, auction, close, open)",
    "action": "a split, a dividend or another symbol",
    "book": "the best levels of the order book, price x size, bids first, and the imbalance",
}
_NAMES = {"d": "day", "h": "hour", "m": "minute", "s": "second", "ms": "millisecond"}


def described(config: Config, session: SessionConfig, *, is_compact: bool) -> str:
    """The text at the end of the frozen prefix, in whole lines."""
    bars, symbols = session.bars(config.bars), session.symbols
    length = "" if bars.ready == "any" else f", {_length(bars.interval)} each"
    said = [f"The bars are of {_listed([_symbol(each) for each in symbols])}{length}."]
    if not is_compact:
        said.append(f"Times are {_times(bars)}, in UTC.")
        said += _other_lines(config, session)
    units = (("Prices", session.prices_in), ("Volumes", session.volumes_in))
    said += [f"{what} are in {unit}." for what, unit in units if unit and not is_compact]
    return " ".join(said) + "\n"


def _times(bars: BarsConfig) -> str:
    """What the times of lines are."""
    if bars.interval >= DAY_NS:
        return "the days on which bars began"
    return "the date and the time when a bar began" if bars.dates else "when a bar began"


def _other_lines(config: Config, session: SessionConfig) -> list[str]:
    """What decimal lines are besides bars."""
    bars, rolls = session.bars(config.bars), rolls_of(config.symbols)
    events = [what for kind, what in _EVENTS.items() if getattr(config.events, kind) == "line"]
    said = [f"A line with a word behind its time is an event: {_listed(events, 'or')}."] if events else []
    if bars.late == "amend":
        said.append("A line that begins with amend is an earlier bar again, as late trades have made it.")
    if bars.empty == "emit":
        said.append("No trade means that there was none.")
    if any(each in rolls and not rolls[each].resets for each in session.symbols):
        said.append("Behind a line that begins with roll, the bars are of that contract.")
    return said


def _symbol(symbol: str) -> str:
    venue, _, name = symbol.partition(":")
    return f"{name} ({venue})"


def _listed(words: Sequence[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _length(interval: Duration) -> str:
    text = str(interval)
    number = text.rstrip("dhmsnu")
    unit = _NAMES.get(text.removeprefix(number))
    if unit is None:
        return text
    return f"one {unit}" if number == "1" else f"{number} {unit}s"
