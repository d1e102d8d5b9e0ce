"""A broker with its HTTP port in the process of the test, and connections to it that say how requests come in pieces."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import gevent
from gevent import socket

from metaq.config import Settings, load
from metaq.server.broker import Broker
from metaq.server.http.http import Monitor
from metaq.server.http.port import HttpPort
from metaq.server.services.call import Call
from metaq.server.services.deadletters import DeadQuery, list_dead
from metaq.server.services.messages import StoredMessage
from metaq.store.files.disk import Disk

DEADLINE_S: Final = 60.0
ROOT: Final = "/api/v1/topics"
JSON: Final = "Content-Type: application/json"


class Answer(NamedTuple):
    """An answer, without what no two have in common."""

    status: str
    headers: Mapping[str, str]
    body: str


class Served:
    """A broker with its HTTP port, in the process of the test."""

    def __init__(self, stack: ExitStack, data: Path, disk: Disk | None = None, **given: Any) -> None:
        self.stack = stack
        self.settings: Settings = load(
            None,
            {},
            {
                "data": str(data),
                "listen": "127.0.0.1:0",
                "remoting_listen": "127.0.0.1:0",
                "registry_listen": "127.0.0.1:0",
                "http_listen": "127.0.0.1:0",
                "durability": "memory",
                "ample_free_bytes": 0,  # however full the disk of the machine is
                **given,
            },
        )
        self.broker = Broker.alone(self.settings, disk=disk)
        self.broker.start()
        stack.callback(self.broker.stop)
        self.monitor = Monitor(self.settings, "127.0.0.1:0")
        stack.callback(self.monitor.close)
        broker = self.broker
        self.monitor.serving(lambda: broker.metrics, broker.authentication, lambda: broker.site)
        assert self.monitor._port is not None
        self.port: HttpPort = self.monitor._port
        self.long = 0
        """The number of requests that went the long way."""
        go_long = self.port.go_long

        def counted(*given: Any) -> None:
            self.long += 1
            go_long(*given)

        self.port.go_long = counted  # type: ignore[assignment, method-assign]

    def call(self, kind: type[Call] = Call) -> Call:
        """A call of anybody."""
        return kind(self.broker._make_interior(), self.broker.authentication.anonymous, ("127.0.0.1", 1))

    def stored(self, topic: str) -> int:
        """The number of messages in a topic."""
        known = self.broker.engine.context.topics.get(topic)
        partitions = 0 if known is None else known.all_partitions
        return sum(self.broker.store.queue(topic, number).next for number in range(partitions))


class Browser:
    """One connection to the port."""

    def __init__(self, served: Served) -> None:
        assert served.monitor.address is not None
        self.socket = socket.create_connection(served.monitor.address, timeout=DEADLINE_S)
        served.stack.callback(self.socket.close)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def send(self, *data: bytes) -> None:
        """Send the parts one after the other, each when the one before has arrived."""
        for part in data:
            self.socket.sendall(part)
            gevent.sleep(0)  # no pause: on a busy machine, one would take long

    def read(self) -> Answer | None:
        """The next answer; ``None`` when the connection has ended instead."""
        while b"\r\n\r\n" not in self._received:
            if not self._more():
                return None
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers.get("content-length", "0"))
        while len(self._received) < length:
            assert self._more()
        body, self._received = self._received[:length].decode(), self._received[length:]
        headers.pop("date", None)
        return Answer(status, headers, body)

    def post(self, path: str, body: object) -> Any:
        """What the API answers, as JSON."""
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", JSON, f"Content-Length: {len(data)}", ""]
        answer = self.ask("".join(f"{line}\r\n" for line in lines).encode() + data)
        assert answer is not None
        return json.loads(answer.body)

    def _more(self) -> bool:
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            return False
        self._received += data
        return bool(data)

    def ask(self, *data: bytes) -> Answer | None:
        self.send(*data)
        return self.read()


def request(topic: str, body: object, *headers: str, length: int | None = None) -> bytes:
    """A publish."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(topic, len(data) if length is None else length, *headers) + data


def head(topic: str, length: int, *headers: str) -> bytes:
    lines = [f"POST {ROOT}/{topic}/messages HTTP/1.1", "Host: localhost", JSON, *headers, f"Content-Length: {length}"]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def dead_letter(served: Served, topic: str, group: str) -> StoredMessage:
    """Have a group give up a message of a topic, and return its first dead letter."""
    browser, leases, call = Browser(served), f"/api/v1/groups/{group}/leases", served.call()
    [leased] = browser.post(leases, {"topic": topic, "limit": 1})["messages"]
    browser.post(f"{leases}/nack", {"topic": topic, "receipt": leased["receipt"], "reject": True})
    while not (letters := list_dead(call, group, DeadQuery()).messages):
        gevent.sleep(0.01)
    return letters[0]


def warm(served: Served, *topics: str) -> None:
    """Publish until a publish has a short way: not one of the first after topics have changed."""
    browser = Browser(served)
    for topic in topics:
        for partition in (*range(4), *range(4)):  # the first one makes the topic
            browser.ask(request(topic, {"body": "first", "partition": partition}))
