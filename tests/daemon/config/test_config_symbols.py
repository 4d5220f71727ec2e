"""The file of symbols: read with the configuration, and refused where it contradicts itself or sessions."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.cli.check import command
from daemon.config.changes import changes
from daemon.config.load import ConfigError, load_config
from daemon.config.schema import Config
from daemon.config.symbol_checks import MAX_CONTRACTS
from daemon.config.symbols import NO_NAMES, Names, Period, Rolls, rolls_of
from feeds.timestamps import parse_instant
from ingest.feed_rules import ROLLS

ALIAS = '[[alias]]\nsymbol = "B:BTC"\nnames = ["B:XBT", "C:BTC"]\n'
ES = """
[[continuous]]
symbol = "CME:ES"
[[continuous.contracts]]
symbol = "CME:ESZ6"
from = "2026-09-14T00:00:30Z"
[[continuous.contracts]]
symbol = "CME:ESH7"
from = 2026-12-14T00:00:00Z
"""
Z6, H7 = (int(parse_instant(text)) for text in ("2026-09-14T00:00:30Z", "2026-12-14T00:00:00Z"))
SESSIONS = """
bars.interval = "1m"
[[sessions]]
name = "es"
symbol = "CME:ES"
[[sessions]]
match = "B:*"
"""


def written(folder: Path, text: str, sessions: str = SESSIONS) -> Path:
    """The configuration, with a file of symbols of this text."""
    (folder / "symbols.toml").write_text(text)
    file = folder / "foretick.toml"
    file.write_text(f'symbols.file = "{folder / "symbols.toml"}"\n{sessions}')
    return file


def loaded(folder: Path, text: str, sessions: str = SESSIONS) -> Config:
    return load_config(written(folder, text, sessions), {})


def test_names_and_rolls_are_those_of_the_file(tmp_path: Path) -> None:
    renamed = ALIAS + 'until = "2026-12-14T00:00:00Z"\n'
    config = loaded(tmp_path, renamed + ES)
    names = Names(config.symbols)
    assert names.periods["C:BTC"] == [Period(0, H7, "B:BTC")]
    assert [names.symbol("CME:ESZ6", at) for at in (Z6 - 1, Z6, H7 - 1, H7)] == [None, *["CME:ES"] * 2, None]
    assert [names.symbol("CME:ESH7", at) for at in (H7 - 1, H7)] == [None, "CME:ES"]
    assert [names.symbol(each, 0) for each in ("CME:ES", "X:Y")] == ["CME:ES", "X:Y"]
    assert names.symbols("B:XBT", 0) == {"B:BTC"}
    assert rolls_of(config.symbols) == {"CME:ES": Rolls(((H7, "ESH7"),))}
    assert not NO_NAMES.periods
    inline = (renamed + ES).replace("[[", "[[symbols.") + SESSIONS.replace("bars.interval", "#")
    (tmp_path / "inline.toml").write_text('bars.interval = "1m"\n' + inline)
    found = load_config(tmp_path / "inline.toml", {}).symbols
    assert (found.alias, found.continuous) == (config.symbols.alias, config.symbols.continuous)


def test_a_session_changes_with_the_rolls_of_its_symbols_alone(tmp_path: Path) -> None:
    old = loaded(tmp_path, ES)
    for text, changed in ((ES + ALIAS, []), (ES.replace("ESH7", "ESM7"), ["es"]), ("", ["es"])):
        found = changes(old, loaded(tmp_path, text))
        assert [each.name for each in found.changed] == changed
        assert (found.removed, found.added, found.fixed) == ((), (), ())


def test_so_many_contracts_as_the_rules_know(tmp_path: Path) -> None:
    assert MAX_CONTRACTS == ROLLS + 1
    months = [f"{2020 + n // 12}-{n % 12 + 1:02d}-01T00:00:00Z" for n in range(MAX_CONTRACTS + 1)]
    tables = [f'[[continuous.contracts]]\nsymbol = "CME:C{n}"\nfrom = {m}\n' for n, m in enumerate(months)]
    head = '[[continuous]]\nsymbol = "CME:ES"\n'
    assert len(loaded(tmp_path, head + "".join(tables[1:])).symbols.continuous[0].contracts) == ROLLS + 1
    with pytest.raises(ConfigError, match=r"symbols\.continuous\[0\]\.contracts"):
        loaded(tmp_path, head + "".join(tables))


READS = '[[sessions]]\nname = "z"\nsymbol = "CME:ESZ6"\n'
ROLLED_UP = SESSIONS.replace('"CME:ES"\n', '"CME:ES"\nrollup = [{ interval = "7m", bars = 9 }]\n')
TWO = SESSIONS.replace('"CME:ES"\n', '"CME:ES"\nmore_symbols = ["V:X"]\n')
RESET = ES.replace('"CME:ES"\n', '"CME:ES"\nroll = "reset"\n')


@pytest.mark.parametrize(
    ("text", "sessions", "said"),
    [
        ("alias = [", SESSIONS, "symbols.toml is not valid TOML"),
        ("[[aliases]]\n", SESSIONS, "symbols.toml: aliases: there is no such key; did you mean alias?"),
        ('instruments_file = "x"\n', SESSIONS, "instruments_file: there is no such key"),
        (ALIAS + 'till = "2026-01-01T00:00:00Z"\n', SESSIONS, "alias[0].till: there is no such key"),
        ('[[alias]]\nsymbol = "BTC"\nnames = ["B:XBT"]\n', SESSIONS, "alias[0].symbol: "),
        ('[[alias]]\nsymbol = "B:BTC"\nnames = ["X BT"]\n', SESSIONS, "alias[0].names[0]: "),
        ('[[alias]]\nsymbol = "B:BTC"\nnames = []\n', SESSIONS, "alias[0].names: "),
        (ALIAS + 'until = "tomorrow"\n', SESSIONS, "alias[0].until: "),
        (
            ALIAS + 'from = "2026-02-01T00:00:00Z"\nuntil = "2026-02-01T00:00:00Z"\n',
            SESSIONS,
            "symbols.alias[0].until: 2026-02-01T00:00:00.000000000Z is not after from",
        ),
        (ALIAS.replace("C:BTC", "B:BTC"), SESSIONS, "alias[0].names[1]: 'B:BTC' is the symbol itself"),
        (
            ALIAS + ALIAS.replace("B:BTC", "B:X").replace('"B:XBT", ', ""),
            SESSIONS,
            "symbols.alias[1].names[0]: 'C:BTC' is of 'B:BTC' at that time",
        ),
        (
            ALIAS + '[[alias]]\nsymbol = "C:BTC"\nnames = ["D:BTC"]\n',
            SESSIONS,
            "symbols.alias[0].names[1]: 'C:BTC' has other names itself: give them to 'B:BTC'",
        ),
        (ALIAS.replace("C:BTC", "C:BTC*"), SESSIONS, "'C:BTC*' is no VENUE:SYMBOL: write each name out"),
        (ALIAS.replace("C:BTC", "C:BTC:X"), SESSIONS, "'C:BTC:X' is no VENUE:SYMBOL"),
        (ES.replace("ESZ6", "ESH7"), SESSIONS, "contracts[1].symbol: 'CME:ESH7' appears twice"),
        (ES.replace("2026-09", "2026-12"), SESSIONS, "[1].from: 2026-12-14T00:00:00.000000000Z is not"),
        (ES + ES, SESSIONS, "symbols.continuous[1].symbol: 'CME:ES' is already symbols.continuous[0]"),
        ('[[continuous]]\nsymbol = "C:E"\ncontracts = []\n', SESSIONS, "contracts: there is none"),
        ('[[continuous]]\nsymbol = "C:E"\n', SESSIONS, "continuous[0]"),
        (ES.replace("00:00Z", "00:01Z"), SESSIONS, "2026-12-14T00:00:01.000000000Z is inside a"),
        (ES, ROLLED_UP, "is inside a bar of"),
        (ES.replace('"CME:ES"', '"B:ES"').replace("00:00Z", "00:01Z"), SESSIONS, "of sessions[1]"),
        (RESET, TWO, 'symbols.continuous[0].roll: sessions[0] has the bars of other symbols'),
        (RESET, ROLLED_UP.replace("7m", "5m"), "symbols.continuous[0].roll: sessions[0] has a rollup"),
        (ES, SESSIONS + READS, "sessions[2].symbol: 'CME:ESZ6' is another name of 'CME:ES': read that one"),
        (ES, SESSIONS.replace("B:*", "CME:ESZ6"), "sessions[1].match: 'CME:ESZ6' is another name"),
        (ES, '[symbols]\nalias = [{ symbol = "A:B", names = ["A:C"] }]\n', "symbols.file: "),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_with_a_sentence(
    tmp_path: Path, text: str, sessions: str, said: str
) -> None:
    file = written(tmp_path, text, sessions)
    if sessions.startswith("[symbols]"):
        file.write_text(sessions + f'file = "{tmp_path / "symbols.toml"}"\n')
    done = CliRunner().invoke(command, ["--config", str(file)])
    assert done.exit_code == 2
    assert said in done.output


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"symbols\.file: .*gone\.toml: cannot read"):
        load_config(None, {}, {"symbols.file": str(tmp_path / "gone.toml")})
