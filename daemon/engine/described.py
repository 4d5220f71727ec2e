"""What the prefix says of a session's lines (`model.describe`): whose bars they are, and what others mean."""

from collections.abc import Sequence

from daemon.config.schema import Config, SessionConfig
from daemon.config.symbols import rolls_of
from feeds.durations import Duration

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
        said.append("Times are when a bar began, in UTC.")
        said += _other_lines(config, session)
    return " ".join(said) + "\n"


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
