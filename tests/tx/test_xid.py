"""Keys of transactions (MQ-071, MQ-075, MQ-108): what is accepted, how it is normalized, what is refused and why."""

import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import BadRequest
from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.protocol.text.commands import Command, Put, Transaction
from metaq.protocol.text.tokens import INT32
from metaq.tx.xid import MAX_ID_BYTES, MAX_NAME_LENGTH, LocalKey, Xid, parse_key, qualifier_of
from tests.protocol.test_golden_vectors import HEX

GOLDEN_XA: Final = Xid(100, b"\x0a\x0b", b"\x0c\x0d", "myapp-host1")
GOLDEN_LOCAL: Final = LocalKey("10.0.0.9-1400000000000-1", 1)

int32 = st.integers(*INT32)
ids = st.binary(max_size=MAX_ID_BYTES)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), max_size=40)


def keys_in(commands: list[Command]) -> set[str | None]:
    found: set[str | None] = set()
    for command in commands:
        assert isinstance(command, Put | Transaction)
        found.add(command.key if isinstance(command, Transaction) else command.transaction)
    return found


@pytest.mark.parametrize(
    ("vector", "key"),
    [
        ("V17", GOLDEN_LOCAL),
        ("V18", GOLDEN_LOCAL),
        ("V19", GOLDEN_LOCAL),
        ("V20", GOLDEN_XA),
        ("V21", GOLDEN_XA),
        ("V22", GOLDEN_XA),
        ("V34", LocalKey("S1", 1)),
    ],
)
def test_keys_of_the_golden_vectors(vector: str, key: Xid | LocalKey) -> None:
    """MQ-075, MQ-108: the keys in what the Java client sends."""
    (text,) = keys_in(CommandReader(TextLimits()).receive(bytes.fromhex(HEX[vector])))
    assert text is not None
    assert parse_key(text) == key
    assert str(key) == text


def test_keys_in_golden_answers() -> None:
    """MQ-075: the keys that RECOVER lists (V23r), and those that errors name (V24, V33), are canonical."""
    listed = bytes.fromhex(HEX["V23r"]).decode().split("\r\n")[1:]
    assert listed == [str(GOLDEN_XA), str(Xid(101, b"\x0a\x0b", b"\x0c\x0e", "myapp-host1"))]
    named = [re.findall("'(.*)'", bytes.fromhex(HEX[vector]).decode())[0] for vector in ("V24", "V33")]
    assert [parse_key(text) for text in named] == [GOLDEN_XA, LocalKey("S1", 1)]


@pytest.mark.parametrize(
    ("text", "key", "canonical"),
    [
        ("XID:1:0A0b:FF:m", Xid(1, b"\x0a\x0b", b"\xff", "m"), "XID:1:0a0b:ff:m"),
        ("XID:1:0a0:f:m", Xid(1, b"\x0a", b"", "m"), "XID:1:0a::m"),
        ("XID:-1:::m", Xid(-1, b"", b"", "m"), "XID:-1:::m"),
        ("XID:+7:0a:0b:m", Xid(7, b"\x0a", b"\x0b", "m"), "XID:7:0a:0b:m"),
        ("XID:1:0a:0b", Xid(1, b"\x0a", b"\x0b"), "XID:1:0a:0b"),
        ("XID:1:0a:", Xid(1, b"\x0a", b""), "XID:1:0a:"),
        ("XID:1:0a:0b:", Xid(1, b"\x0a", b"\x0b"), "XID:1:0a:0b"),
        ("XID:1:0a:0b:5", Xid(1, b"\x0a", b"\x0b", "5"), "XID:1:0a:0b:5"),
        ("TX:host-1-2:-5", LocalKey("host-1-2", -5), "TX:host-1-2:-5"),
        ("TX::0", LocalKey("", 0), "TX::0"),
    ],
)
def test_spellings(text: str, key: Xid | LocalKey, canonical: str) -> None:
    """MQ-075: upper case comes back in lower case, half a byte is dropped, parts may be empty, keys of four parts stay so."""
    assert parse_key(text) == key
    assert str(key) == canonical
    assert parse_key(canonical) == key


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("null", "'null' is neither XID:"),
        ("", "'' is neither XID:"),
        ("XID", "is neither XID:"),
        ("XID:1:0a", "is neither XID:"),
        ("XID:1:0a:0b:m:n", "is neither XID:"),
        ("xid:1:0a:0b:m", "is neither XID:"),
        ("TX:1", "is neither XID:"),
        ("TX:fe80::1-1-1:1", "is neither XID:"),
        ("XID:x:0a:0b:m", "formatId 'x' is not a decimal number"),
        ("XID:2147483648:0a:0b:m", "formatId 2147483648 is not within"),
        ("TX:s:1_0", "number of the transaction '1_0' is not a decimal number"),
        ("TX:s:-2147483649", "number of the transaction -2147483649 is not within"),
        ("XID:1:0g:0b:m", "gtrid '0g' is not hexadecimal"),
        ("XID:1:0a:0 b0:m", "bqual '0 b0' is not hexadecimal"),
        ("XID:1:" + "00" * (MAX_ID_BYTES + 1) + ":0b:m", "gtrid has 65 bytes, the limit is 64"),
        ("XID:1:0a:" + "00" * (MAX_ID_BYTES + 1) + ":m", "bqual has 65 bytes, the limit is 64"),
        ("XID:1:0a:0b:m\tn", "qualifier 'm\\tn' has characters other than visible ASCII"),
        ("XID:1:0a:0b:m\x7f", "qualifier 'm\\x7f' has characters other than visible ASCII"),
        ("XID:1:0a:0b:" + "m" * (MAX_NAME_LENGTH + 1), "qualifier has 256 characters, the limit is 255"),
        ("XID:1:0a:0b:m\xe9", "qualifier 'm\xe9' has characters other than visible ASCII"),
        ("TX:s\ns:1", "session 's\\ns' has characters other than visible ASCII"),
        ("TX:" + "s" * (MAX_NAME_LENGTH + 1) + ":1", "session has 256 characters, the limit is 255"),
    ],
)
def test_refused_keys_say_why(text: str, reason: str) -> None:
    """MQ-075, MQ-108: a key that cannot be read is refused with the part and the limit."""
    for _ in range(2):
        with pytest.raises(BadRequest, match=re.escape(reason)):
            parse_key(text)


def test_the_longest_key() -> None:
    """MQ-075: the limits themselves are allowed."""
    xid = Xid(INT32[0], b"\xff" * MAX_ID_BYTES, b"\xff" * MAX_ID_BYTES, "q" * MAX_NAME_LENGTH)
    assert parse_key(str(xid)) == xid
    assert parse_key(f"XID:1:{'00' * MAX_ID_BYTES}0:0b") == Xid(1, bytes(MAX_ID_BYTES), b"\x0b")


@given(int32, ids, ids, names)
def test_xa_keys_come_back(format_id: int, gtrid: bytes, bqual: bytes, qualifier: str) -> None:
    """MQ-075: key → text → key, and the qualifier is found in the text."""
    xid = Xid(format_id, gtrid, bqual, qualifier)
    assert parse_key(str(xid)) == xid
    assert qualifier_of(str(xid)) == qualifier


@given(names, int32)
def test_local_keys_come_back(session: str, number: int) -> None:
    """MQ-108: key → text → key."""
    assert parse_key(str(LocalKey(session, number))) == LocalKey(session, number)


@given(st.text(st.characters(codec="latin-1"), max_size=30) | st.from_regex(r"(XID|TX)(:[0-9a-f\-]{0,4}){0,5}"))
def test_any_text_is_a_key_or_a_bad_request(text: str) -> None:
    """MQ-075: nothing that arrives as a key does harm, and what is a key has one canonical text."""
    try:
        key = parse_key(text)
    except BadRequest:
        return
    assert parse_key(str(key)) == key
