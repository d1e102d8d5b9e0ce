"""Requests that store something about a message which must be read first."""

from metaq.engine.context import Context
from metaq.engine.turn import Turns
from metaq.errors import MetaqError
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.text.messages import Stored
from metaq.server.remoting.owed import owe
from metaq.server.remoting.session import DONE, Kept, RemotingSession, failure
from metaq.server.wire.look import Question


class Change(Question):
    """One such request in progress; a subclass defines what to read (``look``) and what to do then (``change``)."""

    __slots__ = ("_context", "_request", "_turns", "principal", "session")

    def __init__(self, context: Context, turns: Turns, session: RemotingSession, request: RemotingCommand) -> None:
        self._context = context
        self._turns = turns
        self.session: RemotingSession = session
        self.principal = session.principal
        """The requester: by the time that the message has been read, the session's principal may be another."""
        self._request: RemotingCommand | Kept = request

    def change(self, stored: Stored | None) -> None:
        """Store what the request asks for and answer, or raise ``MetaqError``; ``stored`` is what was read."""
        raise NotImplementedError

    def owe(self) -> None:
        self._request = self.session.owe(self._request)

    def found(self, answer: Stored | None) -> None:
        try:
            self.change(answer)
        except MetaqError as error:
            self.fail(error)

    def fail(self, error: MetaqError) -> None:
        self.session.settle(self._request, failure(error))

    def check_load(self) -> None:
        """Raise the reason why nothing can be stored now, if there is one."""
        self._turns.check_load()
        self._context.store.check_writable()

    def answer_stored(self, size: int) -> None:
        """Answer when what was staged, with ``size`` bytes of bodies, is as durable as promised."""
        self._request = kept = self.session.owe(self._request)
        owe(self._turns, self.session, kept, DONE, size)
