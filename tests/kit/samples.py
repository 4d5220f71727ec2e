"""Small files of every recorded shape."""

import gzip
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    """A small file of one shape, and the name of its real counterpart."""

    form: str
    content: str
    symbol: str
    records: int
    bars: int
    real: str
    until: str
    """Where to stop playing the real file, so that a slow machine finishes in seconds."""
    real_bars: int
    """Bars up to there."""


_FRAME = (
    '{"stream":"btcusdt@trade","data":{"s":"BTCUSDT","t":%d,"p":"61837.%02d","q":"0.02","T":%d,"m":true}}'
)
_T0 = 1_723_161_255_342
SAMPLES = [
    Sample(
        "btc_perp_bars",
        "timestamp,open,high,low,close,volume\n"
        + "".join(
            f"2022-01-05 00:{m:02d}:00,46319.0,46385.0,46300.5,46377.0,23004{m}.7295\n" for m in range(7)
        ),
        "PERP:BTCUSD",
        7,
        7,
        "btc_perp_1m_202201.csv",
        "2022-01-01T00:00:00Z",
        59,  # every minute from 23:01
    ),
    Sample(
        "sp500_bars",
        "Date,Open,Close,High,Low,Volume\n"
        + "".join(f"11/5/2019 9:{m},3080.8,3080.49,3081.47,3080.3,0\n" for m in range(30, 36)),
        "INDEX:SPX",
        6,
        6,
        "sp500_index_1m_20191105.csv",
        "2019-11-05T15:00:00Z",
        30,  # 9:30 to 10:00 Eastern
    ),
    Sample(
        "histdata_quotes",
        "".join(f"20200101 1700{s:02d}065,1.12106,1.1213{s % 10},0\n" for s in range(12)),
        "HISTDATA:EURUSD",
        12,
        12,
        "histdata_eurusd_ticks_20200101.csv",
        "2020-01-01T22:02:00Z",
        17,
    ),
    Sample(
        "binance_capture",
        "".join(
            f"{(_T0 - 1272 + n * 400) * 1_000_000} {_FRAME % (n, n, _T0 + n * 400)}\n" for n in range(16)
        ),
        "BINANCE:BTCUSDT",
        16,
        7,  # 6.0 s from x.342: seconds x to x + 6
        "binance_spot_btcusdt_20240808_raw.gz",
        "2024-08-08T23:54:25Z",
        11,  # of quotes, which come first in the capture
    ),
]


def write(sample: Sample, folder: Path) -> Path:
    path = folder / ("tape.gz" if sample.form == "binance_capture" else "tape.csv")
    raw = sample.content.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path
