"""Requests that are answered from the store, at once or from a greenlet that waits for the disk."""

from collections.abc import Callable
from typing import Any

from metaq.errors import MetaqError
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.remoting.session import Answer, Kept, RemotingSession, failure
from metaq.server.wire.reads import StoreRead
from metaq.store.files.filecache import Read


class RemotingRead(StoreRead):
    """One such request in progress, until it is answered; a subclass defines what to ``read``."""

    # no __slots__: mypyc allows none in a base of a compiled class, and pulls are compiled

    def __init__(self, session: RemotingSession, request: RemotingCommand) -> None:
        self.session: RemotingSession = session
        self._request: RemotingCommand | Kept = request

    def found(self, result: Any) -> None:
        self.session.settle(self._request, result)

    def fail(self, error: MetaqError) -> None:
        self.session.settle(self._request, failure(error))

    def defer(self) -> None:
        self._request = self.session.owe(self._request)


class AnswerRead(RemotingRead):
    """A request whose answer one function reads."""

    __slots__ = ("_work",)

    def __init__(self, session: RemotingSession, request: RemotingCommand, work: Callable[[Read], Answer]) -> None:
        super().__init__(session, request)
        self._work = work

    def read(self, read: Read) -> Answer:
        return self._work(read)
