"""A program that uses the REST API of a broker, over one connection that stays open."""

import base64
import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote, urlencode

from metaq.protocol.remoting.signature import Credentials
from tests.support.broker import SOCKET_TIMEOUT_S

ROOT: Final = "/api/v1"
JSON: Final = "application/json"
RESTED_S: Final = 5.0


class LastingConnection(http.client.HTTPConnection):
    """A connection of a client that rests between requests: the broker ends one that says nothing for 10 s."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, timeout=SOCKET_TIMEOUT_S)
        self._used_s = 0.0

    def getresponse(self) -> http.client.HTTPResponse:
        answer = super().getresponse()
        self._used_s = time.monotonic()
        return answer

    def renew(self) -> None:
        """Have the next request make a new connection if this one may be ended before it arrives."""
        if time.monotonic() - self._used_s > RESTED_S:
            self.close()


class RestAnswer(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    """By names in small letters."""
    data: bytes

    @property
    def content(self) -> Any:
        """The JSON in it."""
        return json.loads(self.data)


class Rest:
    """Asks as ``who``; without one, as nobody."""

    def __init__(self, address: str, who: Credentials | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self._connection = LastingConnection(host.strip("[]"), int(port))
        self._proof = {} if who is None else {"Authorization": f"Bearer {who.secret}"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> RestAnswer:
        """Send any request, and return its answer, whatever it is."""
        kind = {} if data is None else {"Content-Type": JSON}
        self._connection.renew()
        self._connection.request(method, path, data, {**self._proof, **kind, **(headers or {})})
        answer = self._connection.getresponse()
        return RestAnswer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())

    def ask(self, method: str, path: str, body: object = None, **query: object) -> RestAnswer:
        """Use an operation below ``ROOT``."""
        where = f"{ROOT}{path}" + (f"?{urlencode(query)}" if query else "")
        return self.send(method, where, None if body is None else json.dumps(body).encode())

    def get(self, path: str, **query: object) -> Any:
        """What an operation that only looks answers."""
        return self._done(self.ask("GET", path, **query))

    def all_rows(self, path: str, **query: object) -> list[dict[str, Any]]:
        """The rows of a list, by pages of two."""
        rows: list[dict[str, Any]] = []
        after: dict[str, object] = {}
        while True:
            page = self.get(path, limit=2, **query, **after)
            assert len(page["rows"]) <= 2
            rows += page["rows"]
            if page["next"] is None:
                return rows
            after = {"after": page["next"]}

    def post(self, path: str, body: object) -> Any:
        return self._done(self.ask("POST", path, body))

    def put(self, path: str, body: object) -> Any:
        return self._done(self.ask("PUT", path, body))

    def delete(self, path: str) -> Any:
        return self._done(self.ask("DELETE", path))

    def _done(self, answer: RestAnswer) -> Any:
        assert (answer.status, answer.headers["content-type"]) == (200, JSON), answer
        return answer.content

    def refused(self, status: int, method: str, path: str, body: object = None, **query: object) -> dict[str, Any]:
        """The problem that an operation is refused with."""
        answer = self.ask(method, path, body, **query)
        assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), answer
        problem: dict[str, Any] = answer.content
        assert problem["status"] == status
        return problem

    def publish(self, topic: str, *bodies: str, **options: object) -> list[dict[str, Any]]:
        """Publish messages one by one; return where they are."""
        return [self.post(f"/topics/{named(topic)}/messages", {"body": body, **options}) for body in bodies]

    def events(self, path: str, **query: object) -> Iterator[dict[str, Any]]:
        """The rows of a stream, over a connection of their own; what says that there is nothing new is left out."""
        host, _, port = self.address.rpartition(":")
        with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=SOCKET_TIMEOUT_S)) as connection:
            connection.request("GET", f"{ROOT}{path}?{urlencode(query)}", headers=self._proof)
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream"), answer.read()
            yield {}  # it has begun
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


def named(name: str) -> str:
    """A name as it stands in a path."""
    return quote(name, safe="")


def basic(name: str, password: str) -> dict[str, str]:
    """The header of a login by name and password."""
    return {"Authorization": f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"}
