"""Packed bodies: read within the limit, whatever they hold, and refused by name where they cannot be read."""

import contextlib
import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.api.content_codings import ACCEPTED, CorruptBody, UnknownCoding, coding_of, unpacked
from feeds.push_source import PushedSource, PushLimits
from feeds.zstd import zstd
from tests.daemon.api.test_api_http_listeners import serving
from tests.kit.http import request


def bare(data: bytes) -> bytes:
    """Deflate without zlib's header and checksum."""
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


def streamed(data: bytes) -> bytes:
    """A frame of zstd that does not say how long it is."""
    stream = zstd.ZstdCompressor(options={zstd.CompressionParameter.content_size_flag: 0})
    return stream.compress(data) + stream.flush()


PACK: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare),
    "zstd": ("zstd", zstd.compress),
    "streamed zstd": ("zstd", streamed),
}
each_form = pytest.mark.parametrize("form", sorted(PACK))


@given(st.binary(max_size=5000), st.sampled_from(sorted(PACK)), st.integers(-2, 2))
def test_a_body_is_read_up_to_the_limit_and_not_beyond(data, form, more):
    coding, pack = PACK[form]
    limit = max(0, len(data) - more)
    assert unpacked(pack(data), coding, limit) == (data if len(data) <= limit else None)


@given(st.binary(min_size=1, max_size=2000), st.sampled_from(sorted(PACK)), st.data())
def test_a_body_without_its_end_is_never_taken_for_whole(data, form, chance):
    coding, pack = PACK[form]
    packed = pack(data)
    end = chance.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(CorruptBody):
        unpacked(packed[:end], coding, 10_000)


@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate", "zstd"]))
def test_any_bytes_are_read_or_corrupt(data, coding):
    with contextlib.suppress(CorruptBody):
        found = unpacked(data, coding, 1000)
        assert found is None or len(found) <= 1000


@each_form
def test_a_small_body_that_holds_much_takes_little_memory(form):
    coding, pack = PACK[form]
    bomb, limit = pack(bytes(200_000_000)), 1 << 20
    tracemalloc.start()
    assert unpacked(bomb, coding, limit) is None
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 * limit


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
def test_parts_that_follow_each_other_are_one_body(coding, pack):
    parts = [b"one", b"", b"two" * 1000, random.Random(1).randbytes(500)]
    assert unpacked(b"".join(map(pack, parts)), coding, 10_000) == b"".join(parts)


GZIPPED = gzip.compress(b"x", mtime=0)  # the same in every worker: it names tests


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", GZIPPED + b"behind"),
        ("deflate", zlib.compress(b"x") + b"behind"),
        ("zstd", zstd.compress(b"x") + b"behind"),
        ("gzip", zlib.compress(b"x")),
        ("deflate", GZIPPED),
        ("zstd", GZIPPED),
        ("gzip", GZIPPED[:-8] + b"\0" * 8),
    ],
)
def test_what_is_not_its_coding_is_corrupt(coding, body):
    with pytest.raises(CorruptBody):
        unpacked(body, coding, 10_000)


@pytest.mark.parametrize(
    ("values", "coding"),
    [
        ((), ""),
        ((b"",), ""),
        ((b"identity",), ""),
        ((b"GZIP",), "gzip"),
        ((b" x-gzip ",), "gzip"),
        ((b"X-GZip",), "gzip"),
        ((b"Deflate",), "deflate"),
        ((b"zstd, identity",), "zstd"),
        ((b"identity", b"zstd"), "zstd"),
    ],
)
def test_names_of_codings(values, coding):
    assert coding_of(values) == coding


@pytest.mark.parametrize(
    "values", [(b"br",), (b"compress",), (b"gzip, gzip",), (b"gzip", b"zstd"), (b"\xff",), (b"aws-chunked",)]
)
def test_other_codings_are_unknown(values):
    with pytest.raises(UnknownCoding, match=ACCEPTED):
        coding_of(values)


T = 1_709_632_800 * 10**9
TRADE = {
    **{"type": "trade", "venue": "T", "symbol": "A", "ts_event": T, "ts_recv": T},
    **{"price": "100", "size": "1"},
}
LIMIT = 4000


@pytest.fixture
async def served() -> AsyncIterator[tuple[int, PushedSource]]:
    bench = await serving(limits=PushLimits(waiting=100, body_bytes=LIMIT))
    await bench.source.start()
    yield bench.port, bench.source
    await bench.server.stop()


def lines(count: int) -> bytes:
    return b"".join(json.dumps({**TRADE, "seq": n}).encode() + b"\n" for n in range(count))


async def post(port: int, body: bytes, coding: str):
    headers = {"content-type": "application/x-ndjson", "content-encoding": coding}
    return await request(port, "POST", "/v1/data", body, headers)


@each_form
async def test_packed_records_are_pushed(served, form):
    port, source = served
    coding, pack = PACK[form]
    reply = await post(port, pack(lines(20)), coding.upper())
    assert (reply.status, reply.json["accepted"], source.waiting) == (202, 20, 20)


@each_form
async def test_the_limit_counts_what_a_body_holds(served, form):
    port, source = served
    coding, pack = PACK[form]
    full = lines(100)
    assert len(pack(full)) < LIMIT < len(full)
    reply = await post(port, pack(full), coding)
    assert (reply.status, reply.json["code"], source.waiting) == (413, "too_long", 0)
    reply = await post(port, pack(bytes(10**7)), coding)
    assert reply.status == 413


@pytest.mark.parametrize("coding", ["br", "gzip, deflate", "compress"])
async def test_unknown_codings_are_refused_with_those_that_are_known(served, coding):
    port, source = served
    reply = await post(port, lines(1), coding)
    assert (reply.status, reply.headers["accept-encoding"], source.waiting) == (415, ACCEPTED, 0)
    assert reply.json["code"] == "bad_request"


@pytest.mark.parametrize("coding", ["gzip", "zstd", "deflate"])
@pytest.mark.parametrize("body", ["", "half", "junk"])
async def test_what_cannot_be_unpacked_is_a_bad_request(served, coding, body):
    port, source = served
    whole = PACK[coding][1](lines(10))
    sent = {"": b"", "half": whole[: len(whole) // 2], "junk": b"\xffjunk" * 9}[body]
    reply = await post(port, sent, coding)
    assert (reply.status, reply.json["code"], source.waiting) == (400, "bad_request", 0)
    assert coding in reply.json["message"]


async def test_a_body_that_is_not_packed_is_read_as_it_is(served):
    port, _ = served
    assert (await post(port, lines(3), "identity")).json["accepted"] == 3
