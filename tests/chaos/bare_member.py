"""`python -m tests.chaos.bare_member BOOTSTRAP TOPIC GROUP FILE`: a consumer that does nothing but read.

It writes a line for each record into FILE: symbol, event time and wall clock, ns. SIGTERM stops it in order.
"""

import asyncio
import signal
import sys
import time
from pathlib import Path

from aiokafka import AIOKafkaConsumer

from feeds.codec import decode_record


async def read(bootstrap: str, topic: str, group: str, file: Path) -> None:
    """Until SIGTERM."""
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=group,
        session_timeout_ms=6000,
        heartbeat_interval_ms=100,
        fetch_max_wait_ms=20,
        auto_offset_reset="earliest",
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await consumer.start()
    with file.open("a", buffering=1) as lines:
        while not stop.is_set():
            for batch in (await consumer.getmany(timeout_ms=20)).values():
                now_ns = time.time_ns()
                records = [decode_record(each.value or b"") for each in batch]
                lines.write("".join(f"{each.key} {each.ts_event} {now_ns}\n" for each in records))
    await consumer.stop()


if __name__ == "__main__":
    bootstrap, topic, group, file = sys.argv[1:]
    asyncio.run(read(bootstrap, topic, group, Path(file)))
