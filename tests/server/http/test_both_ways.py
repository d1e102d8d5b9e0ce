"""The two ways of a publish over HTTP: what they answer is the same, and what could be read in two ways is refused by both."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Final

import pytest
from gevent import socket
from hypothesis import HealthCheck, given
from hypothesis import settings as testing
from hypothesis import strategies as st

from tests.server.http.conftest import TOPICS
from tests.support.served import JSON, ROOT, Answer, Browser, Served, request, warm

UNUSED: Final = count()
PLACE: Final = re.compile(r'"(id|offset_id|offset|partition|handle)":("[^"]*"|\d+)')


def comparable(answer: Answer | None) -> Answer | None:
    """An answer without what differs between two messages: their ids and places."""
    if answer is None:
        return None
    headers = {name: value for name, value in answer.headers.items() if name != "content-length"}
    return Answer(answer.status, headers, PLACE.sub(r'"\1":_', answer.body))


# -- both ways --------------------------------------------------------------------------------------------------------

SHORT_TEXT: Final = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES: Final = st.none() | st.integers(-2, 1 << 33) | SHORT_TEXT | st.lists(SHORT_TEXT, max_size=2) | st.booleans()
MESSAGES: Final = st.fixed_dictionaries(
    {},
    optional={
        "body": SHORT_TEXT | st.just("x" * 3000),
        "body_base64": st.sampled_from(["eA==", "e", ""]) | st.none(),
        "tag": SHORT_TEXT | st.none(),
        "keys": st.lists(SHORT_TEXT, max_size=2),
        "properties": st.dictionaries(
            SHORT_TEXT | st.sampled_from(["DELAY", "TAGS", "UNIQ_KEY", "a", "__SHARDINGKEY"]), SHORT_TEXT, max_size=3
        ),
        "partition": st.integers(-1, 4) | st.none(),
        "ordering_key": SHORT_TEXT | st.none(),
        "priority": st.integers(0, 4) | st.none(),
        "delay_ms": st.sampled_from([None, 0, 3_600_000, -1]),
        "deliver_at_ms": st.sampled_from([None, 0, 1, 1 << 60]),
        "id": st.none() | SHORT_TEXT,
        "unknown": VALUES,
    },
)
USUAL: Final = st.fixed_dictionaries(
    {"body": st.text(st.characters(codec="utf-8"), max_size=40)},
    optional={
        "tag": SHORT_TEXT | st.none(),
        "keys": st.lists(SHORT_TEXT, max_size=2),
        "properties": st.dictionaries(st.text("abc", min_size=1, max_size=3), SHORT_TEXT, max_size=2),
        "partition": st.just(0) | st.none(),
        "ordering_key": SHORT_TEXT,
    },
)
BODIES: Final = (
    USUAL.map(lambda message: json.dumps(message).encode())
    | MESSAGES.map(lambda message: json.dumps(message).encode())
    | MESSAGES.map(lambda message: json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    | st.binary(max_size=20)
    | st.sampled_from([b"", b"{", b"[]", b"null", b"{}", b"[" * 5000, b'{"body":"\xff"}', b'{"body":"a","body":"b"}'])
)
NAMES: Final = st.sampled_from(
    [*TOPICS, "plain?", "plain?a=b", "none", "%70lain", "plain/", "TBW102", "SCHEDULE_TOPIC_XXXX", "%25RETRY%25g", "x" * 300]
)
HEADERS: Final = st.lists(
    st.sampled_from(
        [
            "Origin: http://localhost",
            "Origin: http://elsewhere",
            "Sec-Fetch-Site: cross-site",
            "Sec-Fetch-Site: same-origin",
            "Authorization: Bearer x",
            "Connection: keep-alive",
            "Connection: close",
            "Expect: 100-continue",
            "Accept: */*",
            "Cookie: a=b",
            "Content-Type: text/plain",
            "Host: elsewhere",
            "Transfer-Encoding: chunked",
            "Content-Length: 3",
            "content-length: 3",
            "X: a\r\n b",
            "X : a",
            "X: a\nY: b",
            "Upgrade: websocket",
        ]
    ),
    max_size=2,
)


def test_both_ways_answer_the_same(served: Served) -> None:
    """E-32: to a request that comes again as to one that was never seen, and one in ten can be short."""
    short: list[bool] = []
    both_ways(served, short)
    assert sum(short) > len(short) / 10


@testing(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(topic=st.just("ordered") | NAMES, body=BODIES, headers=st.just([]) | HEADERS, more=st.just(0) | st.integers(-1, 1))
def both_ways(served: Served, was_short: list[bool], topic: str, body: bytes, headers: Sequence[str], more: int) -> None:
    """Ask the same three times, the last two with the same head, and compare."""
    length = len(body) + (more if len(body) > 1 else 0)
    answers, before = [], served.long
    for own in (("X-Unused: {:08}",), ("X-Seen: 12345678",), ("X-Seen: 12345678",)):
        browser = Browser(served)
        browser.send(request(topic, body, *headers, *(each.format(next(UNUSED)) for each in own), length=length))
        browser.socket.shutdown(socket.SHUT_WR)
        answers.append([comparable(browser.read()), comparable(browser.read())])
        browser.socket.close()
    first, again, short = answers
    was_short.append(served.long - before < len(answers))
    if '"id"' in (body.decode(errors="replace")) and topic == "once":
        return  # the later ones are told where the first is, in all that is comparable
    assert first == again == short


@pytest.mark.parametrize("message", [{"body": "b", "tag": "t", "keys": ["k", "l"], "properties": {"p": "é"}}, {}])
def test_both_ways_store_the_same(served: Served, message: Mapping[str, Any]) -> None:
    """E-32: but for the id and the place."""
    warm(served, "ordered")
    browser, shown, seen = Browser(served), [], f"X-Seen: {next(UNUSED)}"
    for own in (f"X-Unused: {next(UNUSED)}", seen, seen):
        before = served.long
        answer = browser.ask(request("ordered", message, own))
        assert answer is not None
        went_long = served.long - before
        where = json.loads(answer.body)["offset_id"]
        found = browser.ask(f"GET /api/v1/messages/{where} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert found is not None
        row = json.loads(found.body)
        for name in ("id", "offset_id", "offset", "born_ms", "stored_ms"):
            row.pop(name, None)
        row["properties"] = {name: value for name, value in row.get("properties", {}).items() if name != "UNIQ_KEY"}
        shown.append((row, went_long))
    assert [row for row, _ in shown] == [shown[0][0]] * 3
    assert [went_long for _, went_long in shown] == [1, 1, 0]


# -- what two readers could read in two ways --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "Content-Length: 0\r\nContent-Length: {}",
        "Content-Length: {}\r\nContent-Length: 0",
        "Content-Length: {}\r\ncontent-length: 0",
        "Transfer-Encoding: chunked\r\nContent-Length: {}",
        "Content-Length: {}\r\nTransfer-Encoding: chunked",
        "Content-Length: {}\r\n x",
        "Content-Length : {}",
        "Content-Length: +{}",
        "Content-Length: {}, {}",
        "Content-Length: 0x{}",
        "Content-Length: -{}",
        "\r Content-Length: {}",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(served: Served, line: str) -> None:
    """E-32: as often as it comes, and what it carries is not taken for a request."""
    carried = request("ordered", {"body": "smuggled"})
    before = served.stored("ordered")
    for _ in range(3):
        browser = Browser(served)
        first = f"POST {ROOT}/ordered/messages HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n"
        answer = browser.ask(first.encode() + line.format(len(carried), len(carried)).encode() + b"\r\n\r\n" + carried)
        assert answer is not None
        assert answer.status == "HTTP/1.1 400 Bad Request"
        assert browser.read() is None
    assert served.stored("ordered") == before


def test_a_head_whose_lines_end_without_cr(served: Served) -> None:
    """E-32: what follows its end is not a part of it, although it looks like one."""
    inner = request("ordered", {"body": "x"})
    outer = f"POST {ROOT}/ordered/messages HTTP/1.1\nHost: localhost\n{JSON}\nContent-Length: 2\n\n{{}}".encode()
    before = served.stored("ordered")
    for number in range(3):
        browser = Browser(served)
        browser.send(outer + inner)
        answers = [browser.read(), browser.read()]
        assert [answer and answer.status for answer in answers] == ["HTTP/1.1 200 OK"] * 2
        assert served.stored("ordered") == before + 2 * (number + 1)
