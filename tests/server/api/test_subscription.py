"""Subscriptions over WebSocket: messages are pushed as far as the credit goes, and given back when the connection is lost."""

import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus

from metaq.errors import Fenced
from metaq.server.api import websocket
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, wait_until
from tests.support.rest import ROOT, Rest
from tests.support.users import GROUP, READER, TOPIC, USERS, WRITER, write_users
from tests.support.websocket import Subscriber

DEADLINE_S: Final = 60.0
KEY: Final = "dGhlIHNhbXBsZSBub25jZQ=="
"""The example of RFC 6455, section 1.3."""
HANDSHAKE: Final = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": KEY}
GOING_AWAY: Final = 1001
FIN: Final = 0x80
MASKED: Final = 0x80
CLOSE: Final = 0x8


@pytest.fixture
def rest(broker: BrokerProcess) -> Iterator[Rest]:
    with Rest(broker.http) as rest:
        yield rest


def in_flight(rest: Rest, group: str, topic: str) -> int:
    """Messages of a topic that members of a group have."""
    return sum(row["in_flight"] for row in rest.get(f"/groups/{group}/leases", topic=topic)["rows"])


# -- messages ---------------------------------------------------------------------------------------------------------


def test_messages_come_as_far_as_the_credit_goes(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: two may be out; the next one comes when one of them is acked, and more when ready says so."""
    rest.put("/topics/credit", {"partitions": 1})
    rest.publish("credit", *"abcdef")
    with Subscriber(broker.http, "g-credit", "credit", ready=2) as member:
        (first, one), (second, _) = member.taken(), member.taken()
        assert (first, second) == ("a", "b")
        assert in_flight(rest, "g-credit", "credit") == 2
        assert member.ask(ack=one) == {"done": one}
        assert member.taken()[0] == "c"
        member.say(ready=4)
        assert [member.taken()[0] for _ in range(2)] == ["d", "e"]
        assert in_flight(rest, "g-credit", "credit") == 4
        member.say(ready=0)
        rest.publish("credit", "g")
        assert "problem" in member.ask(ack="0-0-aaaaaa")  # had there been a push, it would have come before
    assert rest.get("/groups/g-credit/lag", topic="credit")["partitions"][0]["committed"] == 1


def test_a_message_is_what_rest_shows(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: all that its sender gave it, and how often it was delivered before."""
    rest.put("/topics/shown", {"partitions": 2})
    rest.publish("shown", "ä", tag="paid", keys=["order-7"], properties={"a": "b"}, partition=1)
    rest.post("/topics/shown/messages", {"body_base64": "/w==", "partition": 1, "tag": "unpaid"})
    first, last = rest.get("/topics/shown/partitions/1/messages")["messages"]
    with Subscriber(broker.http, "g-shown", "shown", tags="paid") as member:
        pushed = member.hear()
        assert pushed["message"] == first
        member.say(nack=pushed["receipt"])
        assert member.hear() == {"done": pushed["receipt"]}
        again = member.hear()
        properties = again["message"]["properties"]
        assert properties.keys() - first["properties"].keys() == {"1ST_POP_TIME"}
        assert again["message"] == {**first, "properties": properties, "deliveries": 1}
        assert again["receipt"] != pushed["receipt"]
    with Subscriber(broker.http, "g-all", "shown", ready=2) as member:
        assert [member.hear()["message"]["body_base64"] for _ in range(2)] == [None, last["body_base64"]]


def test_a_lease_ends_later_or_at_once(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: extend, nack with a delay, and reject do what they do with the other protocols."""
    rest.put("/topics/ends", {"partitions": 1})
    rest.publish("ends", "x", "y")
    with Subscriber(broker.http, "g-ends", "ends") as member:
        _, receipt = member.taken()
        (before,) = rest.get("/groups/g-ends/leases/ends/0")["rows"]
        assert member.ask(extend=receipt, invisible_ms=600_000) == {"done": receipt}
        (after,) = rest.get("/groups/g-ends/leases/ends/0")["rows"]
        assert after["due_ms"] > before["due_ms"] + 500_000
        assert member.ask(nack=receipt, delay_ms=600_000) == {"done": receipt}
        body, receipt = member.taken()
        assert body == "y"
        assert [row["state"] for row in rest.get("/groups/g-ends/leases/ends/0")["rows"]] == ["delayed", "leased"]
        assert member.ask(nack=receipt, reject=True) == {"done": receipt}
        (dead,) = rest.get("/groups/g-ends/dead-letters")["messages"]
        assert dead["body"] == "y"


def test_a_lost_connection_gives_messages_back(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: at once, long before their leases would end, to whoever waits for them."""
    rest.put("/topics/lost", {"partitions": 1})
    rest.publish("lost", *"abc")
    with Subscriber(broker.http, "g-lost", "lost", ready=3) as member:
        for _ in range(3):
            member.taken()
        kernel = member.connection.socket
        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, as of a process that dies
        with Subscriber(broker.http, "g-lost", "lost", ready=3) as another:
            kernel.shutdown(socket.SHUT_RDWR)
            assert [another.taken()[0] for _ in range(3)] == ["a", "b", "c"]


def test_who_leases_consumes(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: a subscriber is no member of its group, and yet the group is not without consumers while messages wait."""
    rest.put("/topics/leased", {"partitions": 1})
    rest.publish("leased", "a", "b")

    def said() -> tuple[bool, bool]:
        stuck = [row["found"] for row in rest.get("/broker/findings")["rows"] if row["check"] == "groups"]
        return rest.get("/groups/g-leased")["leasing"], any("g-leased" in found for found in stuck)

    with Subscriber(broker.http, "g-leased", "leased", ready=1) as member:
        member.taken()
        assert said() == (True, False)
    wait_until(lambda: said() == (False, True), DEADLINE_S, "nobody consumes any more", 0.1)


def test_two_members_share(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: each message goes to one of them, whichever protocol the other one speaks."""
    rest.put("/topics/shared", {"partitions": 1})
    with Subscriber(broker.http, "g-shared", "shared") as member, broker.connect() as text:
        text.sendall(b"subscribe shared g-shared 5\r\n")
        assert text.recv(100).startswith(b"result 200")
        rest.publish("shared", "one", "two")
        pushed = text.recv(1000)
        got = {member.taken()[0], re.findall(rb"(one|two)$", pushed)[0].decode()}
    assert got == {"one", "two"}


def test_it_is_listed_with_the_connections(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: until it is over."""
    rest.put("/topics/listed", {"partitions": 1})

    def protocols() -> list[str]:
        return [row["protocol"] for row in rest.get("/broker/connections")["rows"]]

    before = len(protocols())
    with Subscriber(broker.http, "g-listed", "listed"):
        assert len(protocols()) == before + 1
    wait_until(lambda: len(protocols()) == before, DEADLINE_S, "the connection is over")


# -- who may, and what is no subscription -----------------------------------------------------------------------------


def test_the_handshake(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: its bytes are those of RFC 6455."""
    rest.put("/topics/golden", {"partitions": 1})
    with ExitStack() as stack:
        connection = stack.enter_context(raw(broker, "golden"))
        head, _, rest_of_it = connection.recv(4096).partition(b"\r\n\r\n")
        lines = [line for line in head.decode().split("\r\n") if not line.startswith("Date: ")]
        assert lines[0] == "HTTP/1.1 101 Switching Protocols"
        assert {line.lower() for line in lines[1:]} >= {
            "upgrade: websocket",
            "connection: upgrade",
            "sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=",
        }
        assert "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head.decode()
        assert not {"content-length", "transfer-encoding"} & {line.partition(":")[0].lower() for line in lines[1:]}
        assert (rest_of_it or connection.recv(10)) == bytes((FIN | 0x9, 0))  # a ping


def raw(broker: BrokerProcess, topic: str, ready: int = 1, *, receive_bytes: int = 65536) -> socket.socket:
    """A connection that has sent the handshake, and has read nothing yet."""
    host, _, port = broker.http.rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(SOCKET_TIMEOUT_S)
    connection.connect((host, int(port)))
    lines = [f"GET {ROOT}/groups/g-raw/subscription?topic={topic}&ready={ready} HTTP/1.1", f"Host: {broker.http}"]
    lines += [f"{name}: {value}" for name, value in HANDSHAKE.items()]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def test_what_is_no_handshake_is_refused(rest: Rest) -> None:
    """E-33: with a problem, and with what the broker speaks."""
    rest.put("/topics/refused", {"partitions": 1})
    path = f"{ROOT}/groups/g/subscription?topic=refused"

    def refused(**other: str | None) -> tuple[int, dict[str, str], str]:
        headers = {**HANDSHAKE, **{name.replace("_", "-"): value for name, value in other.items()}}
        answer = rest.send("GET", path, headers={name: value for name, value in headers.items() if value is not None})
        assert answer.headers["content-type"] == "application/problem+json"
        return answer.status, answer.headers, answer.content["detail"]

    for missing in ("Connection", "Upgrade"):
        status, headers, detail = refused(**{missing: None})
        assert (status, headers["upgrade"]) == (426, "websocket")
        assert "WebSocket" in detail
    status, headers, _ = refused(Sec_WebSocket_Version="8")
    assert (status, headers["sec-websocket-version"]) == (426, "13")
    for key in (None, "", "short", "!" * 24):
        assert refused(Sec_WebSocket_Key=key)[0] == 400
    assert refused(Origin="http://evil.example")[0] == 403
    assert rest.refused(404, "GET", "/nothing")["code"] == 3


def test_what_cannot_be_subscribed_to_is_refused(broker: BrokerProcess) -> None:
    """E-33: as every other request, before the connection becomes a WebSocket."""
    with pytest.raises(InvalidStatus) as refusal:
        Subscriber(broker.http, "g", "nothing")
    body = refusal.value.response.body
    assert body is not None
    assert (refusal.value.response.status_code, json.loads(body)["code"]) == (404, 17)
    with pytest.raises(InvalidStatus) as refusal:
        Subscriber(broker.http, "g", "refused", ready=10_001)
    assert refusal.value.response.status_code == 400


def test_rights_are_those_of_other_protocols(tmp_path: Path) -> None:
    """E-33: nobody has to log in first, the writer may not, the reader may; and a broker that stops says so."""
    users = write_users(tmp_path / "users.yaml")
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker:
        with Rest(broker.http, WRITER) as writer:
            broker_has_topic = writer.ask("POST", f"/topics/{TOPIC}/messages", {"body": "x"}).status
        assert broker_has_topic == 200
        for who, status in ((None, 401), (WRITER, 403)):
            with pytest.raises(InvalidStatus) as refusal:
                Subscriber(broker.http, GROUP, TOPIC, who)
            assert refusal.value.response.status_code == status
        with Subscriber(broker.http, GROUP, TOPIC, READER) as member:
            assert member.taken()[0] == "x"
            broker.terminate()
            with pytest.raises(ConnectionClosed) as end:
                member.hear()
        assert end.value.rcvd is not None
        assert (end.value.rcvd.code, "stops" in end.value.rcvd.reason) == (GOING_AWAY, True)


def test_a_user_that_is_removed_gets_nothing_more(tmp_path: Path) -> None:
    """E-33: and is told why."""
    users = write_users(tmp_path / "users.yaml")
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker, Rest(broker.http, WRITER) as writer:
        writer.publish(TOPIC, "x")
        with Subscriber(broker.http, GROUP, TOPIC, READER, ready=9) as member:
            assert member.taken()[0] == "x"
            write_users(users, USERS.replace("reader:", "reader2:"))
            wait_until(lambda: "users reloaded" in broker.stderr(), 30, "the log tells it")
            writer.publish(TOPIC, "y")
            end = member.hear()
            assert (end["problem"]["status"], end["receipt"]) == (403, None)
            with pytest.raises(ConnectionClosed):
                member.hear()


# -- what clients may say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("", "message"),
        ("{}", "exactly one"),
        ('{"ready":1,"ack":"0-0-aaaaaa"}', "exactly one"),
        ('{"ready":10001}', "<= 10000"),
        ('{"ack":"x"}', "is not an ID"),
        ('{"ack":"0-0-aaaaaa\\r\\nquit"}', "is not an ID"),
        ('{"ack":"0-0-aaaaaa","delay_ms":1}', "belong to nack"),
        ('{"extend":"0-0-aaaaaa"}', "needs an invisible_ms"),
        ('{"nack":"0-0-aaaaaa","invisible_ms":1000}', "invisible_ms"),
        ('{"nack":"0-0-aaaaaa","reject":true,"delay_ms":1}', "not both"),
        ('{"other":1}', "unknown field"),
        ("[" * 1000, "message"),
    ],
)
def test_what_makes_no_sense_is_answered(rest: Rest, broker: BrokerProcess, word: str, reason: str) -> None:
    """E-33: with a problem, and the subscription goes on."""
    rest.put("/topics/sense", {"partitions": 1})
    with Subscriber(broker.http, "g-sense", "sense") as member:
        member.connection.send(word)
        answer = member.hear()
        assert (answer["problem"]["status"], answer["receipt"]) == (400, None)
        assert reason in answer["problem"]["detail"]
        rest.publish("sense", "x")
        _, receipt = member.taken()
        assert member.ask(ack=receipt) == {"done": receipt}
        late = member.ask(ack=receipt)
        assert (late["problem"]["status"], late["receipt"]) == (409, receipt)


def test_messages_of_many_pieces_and_of_too_many(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: a message may come in pieces; a long one, and one that is no text, end the connection with the code for it."""
    rest.put("/topics/pieces", {"partitions": 1})
    rest.publish("pieces", "x")
    with Subscriber(broker.http, "g-pieces", "pieces") as member:
        _, receipt = member.taken()
        member.connection.send(list(json.dumps({"ack": receipt})))
        assert member.hear() == {"done": receipt}
        member.connection.send("x" * (websocket.MOST_SAID + 1))
        with pytest.raises(ConnectionClosed) as end:
            member.hear()
        assert end.value.rcvd is not None
        assert end.value.rcvd.code == 1009
    with Subscriber(broker.http, "g-pieces", "pieces") as member:
        member.connection.send(b"{}")
        with pytest.raises(ConnectionClosed) as end:
            member.hear()
        assert end.value.rcvd is not None
        assert end.value.rcvd.code == 1003


Frame = tuple[int, bytes, bool]
"""The first byte, the payload, and whether it is masked as it must be."""


def encoded(frame: Frame) -> bytes:
    first, payload, is_masked = frame
    size = len(payload)
    length = bytes((size,)) if size < 126 else struct.pack("!BH", 126, size)
    if not is_masked:
        return bytes((first,)) + length + payload
    return bytes((first, length[0] | MASKED)) + length[1:] + bytes(4) + payload


frames = st.tuples(
    st.integers(0, 255) | st.sampled_from([FIN | 1, FIN | 8, FIN | 9, FIN | 10, 1, 0, FIN]),
    st.binary(max_size=200) | st.sampled_from([b'{"ready":5}', b'{"ack":"0-0-aaaaaa"}', b"\xff", b"\x03\xe8", b""]),
    st.sampled_from([True, True, True, False]),
)


@settings(max_examples=60, deadline=None)
@given(sent=st.lists(frames.map(encoded) | st.binary(max_size=64), max_size=12))
def test_whatever_comes_the_broker_answers_in_frames(broker: BrokerProcess, sent: list[bytes]) -> None:
    """E-33: and ends the connection when the client does, with nothing of it left."""
    with Rest(broker.http) as rest:
        rest.put("/topics/garbage", {"partitions": 1})
    with raw(broker, "garbage") as connection:
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(4096)
        try:
            connection.sendall(b"".join(sent))
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                received += data
        except (ConnectionResetError, BrokenPipeError):  # it has ended the connection with something of ours unread
            pass
    answered = received.partition(b"\r\n\r\n")[2]
    at = 0
    while at < len(answered):
        first, size = answered[at], answered[at + 1]
        assert (first & 0x70, size & MASKED) == (0, 0), answered
        head = 2
        if size == 126:
            size, head = struct.unpack_from("!H", answered, at + 2)[0], 4
        if first & 0xF == 1:
            assert json.loads(answered[at + head : at + head + size]).keys() <= {"problem", "receipt"}
        at += head + size
        assert first & 0xF != CLOSE or at >= len(answered), "nothing follows a close"
    assert broker.running
    assert "Traceback" not in broker.stderr()


def test_nothing_follows_a_close(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: the broker answers it and ends the connection; what comes after it is no request."""
    rest.put("/topics/closed", {"partitions": 1})
    with raw(broker, "closed") as connection:
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(4096)
        connection.sendall(encoded((FIN | CLOSE, struct.pack("!H", 1000), True)))
        while not received.endswith(bytes((FIN | CLOSE, 2)) + struct.pack("!H", 1000)):
            received += connection.recv(1)
        try:
            connection.sendall(f"GET {ROOT}/topics HTTP/1.1\r\nHost: {broker.http}\r\n\r\n".encode())
            assert connection.recv(4096) == b""
        except (ConnectionResetError, BrokenPipeError):
            pass


# -- clients that do not read, and clients that are gone --------------------------------------------------------------


def test_a_client_that_does_not_read(rest: Rest, broker: BrokerProcess) -> None:
    """E-33: gets few messages, whatever its credit; another one gets all others, and these once it is gone."""
    rest.put("/topics/slow", {"partitions": 1})
    count = 600
    bodies = [{"body": f"{number:03}{'x' * 50_000}"} for number in range(count)]
    with raw(broker, "slow", 10_000, receive_bytes=4096) as connection:
        connection.recv(100)
        for first in range(0, count, 50):
            rest.post("/topics/slow/messages/many", {"messages": bodies[first : first + 50]})
        got = set()
        with Subscriber(broker.http, "g-raw", "slow") as another:

            def take(last: int) -> None:
                while last not in got:
                    body, receipt = another.taken()
                    got.add(int(body[:3]))
                    assert another.ask(ack=receipt) == {"done": receipt}

            take(count - 1)
            kept = in_flight(rest, "g-raw", "slow")
            assert 0 < kept == count - len(got) < count // 2
            connection.close()
            while len(got) < count:
                take(min(set(range(count)) - got))


class Silence:
    """A client that says nothing, and never reads."""

    def __init__(self) -> None:
        self.is_over = False
        self.ended = 0
        self.address = ("127.0.0.1", 1)

    def begin(self) -> None:
        """Push nothing."""

    def next(self, seconds: float) -> list[Any]:
        return []

    def wake(self) -> None:
        """Nobody waits."""

    def end(self) -> None:
        self.ended += 1

    def within(self, seconds: float) -> None:
        assert seconds > websocket.PING_S

    def read1(self, size: int) -> bytes:
        from gevent import sleep

        sleep(DEADLINE_S)
        raise Fenced("nobody waits so long")


def test_a_client_that_is_silent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-33: it is asked by pings, and its messages are given back when no answer comes."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    silence: Any = Silence()
    talk = iter(websocket.Frames(silence, silence, silence, silence))
    ping = bytes((FIN | 0x9, 0))
    assert [next(talk), next(talk)] == [ping, ping]
    now += websocket.SILENT_S + 1
    assert list(talk) == []
    assert silence.ended == 2  # the subscription and the call
