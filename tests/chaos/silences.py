"""`python -m tests.chaos.silences FILE`: how long sessions were silent when they changed hands."""

import sys
from pathlib import Path

import msgspec

from tests.chaos.moves import HandOver, summary

if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_bytes().splitlines()
    print(summary(msgspec.json.decode(each, type=HandOver) for each in lines))
