"""Heads of requests: what is read, and what is refused because two programs could read it in two ways."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.server.http.requesthead import MOST_FIELDS, MOST_HEAD, MOST_LINE, BadHead, Head, read_head

LINE = "POST /api/v1/topics/a%20b/messages?x=1 HTTP/1.1\r\n"
TOKEN = st.text("abcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^`|~", min_size=1, max_size=20)
VALUE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f\x85"), max_size=40)


def head_of(fields: str, line: str = LINE) -> Head:
    return read_head(line, io.BytesIO(f"{fields}\r\nbody".encode("latin-1")).readline)


def test_a_head_is_read() -> None:
    """MY-032: names in small letters, values without the blanks around them, joined where a field is there several times."""
    head = head_of("Host: a:1\r\nContent-Length:5 \r\nX: ä\r\nx:\tb\r\nCookie: c=1\r\ncookie: d=2\r\nEmpty:\r\n")
    assert head.fields == {"host": "a:1", "content-length": "5", "x": "ä,b", "cookie": "c=1; d=2", "empty": ""}
    assert (head.method, head.target, head.length) == ("POST", "/api/v1/topics/a%20b/messages?x=1", 5)
    assert (head.goes_on, head.is_chunked, head.wants_upgrade) == (True, False, False)
    assert head_of("Connection: Close\r\n").goes_on is False
    assert [head_of(fields, "GET / HTTP/1.0\r\n").goes_on for fields in ("", "connection: Keep-Alive\r\n")] == [False, True]
    assert head_of("Transfer-Encoding: Chunked\r\nUpgrade: WebSocket\r\n")[3:] == (
        {"transfer-encoding": "Chunked", "upgrade": "WebSocket"},
    )
    assert read_head("GET / HTTP/1.1\n", io.BytesIO(b"A: b\n\n").readline).fields == {"a": "b"}


@pytest.mark.parametrize(
    "fields",
    [
        "no colon\r\n",
        ": no name\r\n",
        "Name : a blank before the colon\r\n",
        "A: folded\r\n over two lines\r\n",
        "A: \x00\r\n",
        "A: alone\rhere\r\n",
        "Näme: x\r\n",
        "Content-Length: 5\r\nContent-Length: 5\r\n",
        "Content-Length: 5, 5\r\n",
        "Content-Length: -5\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Host: a\r\nHost: b\r\n",
        f"A: {'x' * MOST_LINE}\r\n",
        "A: b\r\n" * (MOST_FIELDS + 1),
        f"A: {'x' * (MOST_LINE // 2)}\r\n" * (2 * MOST_HEAD // MOST_LINE),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(fields: str) -> None:
    """E-05: nothing that passes a proxy as one request is two here."""
    with pytest.raises(BadHead):
        head_of(fields)


@pytest.mark.parametrize("line", ["GET /\r\n", "GET / HTTP/2.0\r\n", "GET / x HTTP/1.1\r\n", "\r\n", "GET / http/1.1\r\n"])
def test_what_is_no_line_of_a_request_is_refused(line: str) -> None:
    """E-05."""
    with pytest.raises(BadHead):
        head_of("", line)


def test_a_head_that_ends_early_is_refused() -> None:
    """E-05: its client is gone."""
    with pytest.raises(BadHead):
        read_head(LINE, io.BytesIO(b"Host: a\r\n").readline)


@given(st.dictionaries(TOKEN.filter(lambda name: name not in ("content-length", "transfer-encoding")), VALUE, max_size=20))
def test_every_field_is_read_as_it_was_sent(fields: dict[str, str]) -> None:
    """MY-032: of any token and any text of Latin-1."""
    sent = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    assert head_of(sent).fields == {name: value.strip(" ") for name, value in fields.items()}


@given(st.binary(max_size=400))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    """E-05: nothing else is raised."""
    try:
        head = read_head(LINE, io.BytesIO(data).readline)
    except BadHead:
        return
    assert head.length is None or head.length >= 0
