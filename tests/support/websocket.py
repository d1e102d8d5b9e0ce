"""A program that subscribes over WebSocket, with a client of its own."""

import json
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from websockets.sync.client import connect

from metaq.protocol.remoting.signature import Credentials
from tests.support.broker import SOCKET_TIMEOUT_S
from tests.support.rest import ROOT, named


class Subscriber:
    """A member of a group, at the HTTP port ``address`` of a broker."""

    def __init__(self, address: str, group: str, topic: str, who: Credentials | None = None, **query: object) -> None:
        """Raise ``websockets.exceptions.InvalidStatus`` when it is refused."""
        where = f"ws://{address}{ROOT}/groups/{named(group)}/subscription?{urlencode({'topic': topic, **query})}"
        proof = {} if who is None else {"Authorization": f"Bearer {who.secret}"}
        self._stack = ExitStack()
        client = connect(where, additional_headers=proof, open_timeout=SOCKET_TIMEOUT_S, proxy=None)
        self.connection = self._stack.enter_context(client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def say(self, **word: object) -> None:
        self.connection.send(json.dumps(word))

    def hear(self) -> Any:
        """The next message of the broker."""
        return json.loads(self.connection.recv(SOCKET_TIMEOUT_S))

    def ask(self, **word: object) -> Any:
        """Say something, and return the answer; no message may come before it."""
        self.say(**word)
        return self.hear()

    def taken(self) -> tuple[str, str]:
        """The body and the receipt of the next message, which must be one that was pushed."""
        pushed = self.hear()
        assert pushed.keys() == {"message", "receipt"}, pushed
        return pushed["message"]["body"], pushed["receipt"]
