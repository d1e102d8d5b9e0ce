"""Message ids: golden values of real brokers and clients, round trips, and refused texts."""

import datetime
import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import BadRequest
from metaq.message import LogOffset
from metaq.protocol.ids import (
    OffsetId,
    UniqueId,
    decode_offset_id,
    decode_unique_id,
    encode_offset_id,
    make_unique_id,
    sent_ms,
    unique_id_prefix,
)

OFFSET_IDS: Final = {
    "7F00000100002A9F00000000000009F9": OffsetId("127.0.0.1", 10911, LogOffset(2553)),
    "FD00000000000000000000000000000100002A9F00000000000009F9": OffsetId("fd00::1", 10911, LogOffset(2553)),
    "7F00000100002A9F0000000000000000": OffsetId("127.0.0.1", 10911, LogOffset(0)),
}
"""Golden vectors G20 and G21, and the answer of G7."""
UNIQUE_IDS: Final = {
    "FD00000000000000000000000000000249245FFD2B276945358E0000": ("fd00::2", 0x4924, 0x5FFD2B27, 1795257343374, 0),
    "FD0000000000000000000000000000024E995FFD2B27694674A00000": ("fd00::2", 0x4E99, 0x5FFD2B27, 1795257425056, 0),
}
"""Of golden vectors G6, whose message says when it was sent, and G35."""

MONTH_MS: Final = 31 * 24 * 3600 * 1000

mapped = re.compile("::ffff:", re.IGNORECASE)
addresses = st.ip_addresses().map(str).filter(lambda address: not mapped.match(address))
naturals16 = st.integers(0, (1 << 16) - 1)
naturals32 = st.integers(0, (1 << 32) - 1)
naturals63 = st.integers(0, (1 << 63) - 1).map(LogOffset)
times_ms = st.integers(1_000_000_000_000, 4_000_000_000_000)


@pytest.mark.parametrize("text", OFFSET_IDS)
def test_offset_ids_of_real_brokers(text: str) -> None:
    """RD-106: host and log offset, written and read; digits in any case."""
    assert decode_offset_id(text) == OFFSET_IDS[text]
    assert decode_offset_id(text.lower()) == OFFSET_IDS[text]
    assert encode_offset_id(OFFSET_IDS[text]) == text


def test_the_brokers_that_an_id_may_be_of() -> None:
    """RD-106: the one at its address; all with its port that advertise a name or IPv6, as records have no such address."""
    at_address, nowhere = (decode_offset_id(f"{host}00002A9F00000000000009F9") for host in ("7F000001", "00000000"))
    given = [("127.0.0.1", 10911), ("127.0.0.1", 10912), ("localhost", 10911), ("fd00::1", 10911), ("localhost", 10912)]
    assert [at_address.is_of(*address) for address in given] == [True, False, False, False, False]
    assert [nowhere.is_of(*address) for address in given] == [False, False, True, True, False]


@pytest.mark.parametrize("text", UNIQUE_IDS)
def test_unique_ids_of_real_clients(text: str) -> None:
    """SG-136: address, process, time and counter of the Java client, made again and recovered."""
    address, process, number, now_ms, counter = UNIQUE_IDS[text]
    assert make_unique_id(unique_id_prefix(address, process, number), now_ms, counter) == text
    unique = decode_unique_id(text)
    assert unique == UniqueId(address, process, number, unique.month_ms, counter)
    assert sent_ms(unique, now_ms) == now_ms
    assert sent_ms(unique, now_ms + 1000) == now_ms


def test_the_time_of_an_id_of_last_month_is_recovered() -> None:
    """SG-136: it would lie in the future of this one."""
    sent = datetime.datetime(2026, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
    unique = decode_unique_id(make_unique_id(unique_id_prefix("192.0.2.1", 1, 2), int(sent.timestamp() * 1000), 3))
    for later in (datetime.timedelta(seconds=1), datetime.timedelta(days=20)):
        assert sent_ms(unique, int((sent + later).timestamp() * 1000)) == int(sent.timestamp() * 1000)


def test_an_ipv4_address_written_as_ipv6_is_ipv4() -> None:
    """RD-106: so that it is the address that everybody else knows."""
    text = "00000000000000000000FFFF7F00000100002A9F00000000000009F9"
    assert decode_offset_id(text) == OffsetId("127.0.0.1", 10911, LogOffset(2553))


@pytest.mark.parametrize(
    "text",
    ["", "7F", "x" * 32, "7F" * 15, "7F" * 17, "7F" * 27, "7F" * 29, " 7F00000100002A9F00000000000009F9", "7F " * 16, "é" * 32],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    """RD-106, SG-136: with the text, shortened, in the error."""
    for decode in (decode_offset_id, decode_unique_id):
        with pytest.raises(BadRequest, match="not 32 or 56 hexadecimal digits"):
            decode(text)


def test_places_and_addresses_that_cannot_be_are_refused() -> None:
    """RD-106: a port or log offset out of range, a host name."""
    with pytest.raises(BadRequest, match="port -1 and"):
        decode_offset_id("7F000001FFFFFFFF00000000000009F9")
    with pytest.raises(BadRequest, match="port 65536 and"):
        decode_offset_id("7F0000010001000000000000000009F9")
    with pytest.raises(BadRequest, match="log offset -1 are impossible"):
        decode_offset_id("7F00000100002A9FFFFFFFFFFFFFFFFF")
    with pytest.raises(BadRequest, match="'localhost' is not an IP address"):
        encode_offset_id(OffsetId("localhost", 1, LogOffset(0)))


@given(addresses, naturals16, naturals63)
def test_offset_ids_round_trip(address: str, port: int, log_offset: LogOffset) -> None:
    """RD-106: any broker, any place."""
    where = OffsetId(address, port, log_offset)
    text = encode_offset_id(where)
    assert len(text) in (32, 56)
    assert text == text.upper()
    assert decode_offset_id(text) == where


@given(addresses, naturals32, st.integers(-(1 << 40), 1 << 40), times_ms, naturals32)
def test_unique_ids_round_trip(address: str, process: int, number: int, now_ms: int, counter: int) -> None:
    """SG-136: of each number the bits that there is room for; of the time, less than a month."""
    unique = decode_unique_id(make_unique_id(unique_id_prefix(address, process, number), now_ms, counter))
    assert unique[:3] == (address, process & 0xFFFF, number & 0xFFFFFFFF)
    assert unique.counter == counter & 0xFFFF
    assert unique.month_ms < MONTH_MS
    assert sent_ms(unique, now_ms) == now_ms


@given(st.text(max_size=70) | st.text("0123456789abcdefABCDEF", min_size=30, max_size=58))
def test_any_text_is_an_id_or_refused(text: str) -> None:
    """RD-106, SG-136: no other error."""
    try:
        decode_unique_id(text)
        where = decode_offset_id(text)
    except BadRequest as error:
        assert str(error).startswith("message id"), text
    else:
        assert decode_offset_id(encode_offset_id(where)) == where
