"""The engine without a daemon: `python examples/embedded_engine.py MODEL_DIRECTORY < lines`."""

import sys
from pathlib import Path

from foretick import Engine, Retention, load_model

model = load_model(Path(sys.argv[1]))
encode, decode = model.tokenizer.encode, model.tokenizer.decode
engine = Engine(model, blocks=256)

# The prefix stays; of what follows, the newest 1,024 tokens.
session = engine.open_tape("prices", encode("Closing prices, one a line.\n"), Retention(tokens=1024))
for line in sys.stdin:
    engine.append(session, [encode(line)])

# A question reads the session's KV and leaves it as it is.
answer = engine.answer(session, encode("Is the price rising?\nAnswer:"), max_tokens=8)
print(f"data version {session.version}: {decode(answer)!r}")
session.release()
