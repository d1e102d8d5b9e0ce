"""Requests that store something about a message which must be read first."""

from metaq.engine.context import Context
from metaq.engine.turn import Turns
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.remoting.owed import owe
from metaq.server.remoting.reads import RemotingRead
from metaq.server.remoting.session import DONE, RemotingSession


class Change(RemotingRead):
    """One such request in progress; a subclass defines what to ``read``, and what to store when that is ``found``."""

    __slots__ = ("_context", "_turns", "principal")

    def __init__(self, context: Context, turns: Turns, session: RemotingSession, request: RemotingCommand) -> None:
        super().__init__(session, request)
        self._context = context
        self._turns = turns
        self.principal = session.principal
        """The requester: by the time that the message has been read, the session's principal may be another."""

    def check_load(self) -> None:
        """Raise the reason why nothing can be stored now, if there is one."""
        self._turns.check_load()
        self._context.store.check_writable()

    def answer_stored(self, size: int) -> None:
        """Answer when what was staged, with ``size`` bytes of bodies, is as durable as promised."""
        self._request = kept = self.session.owe(self._request)
        owe(self._turns, self.session, kept, DONE, size)
