"""Requests that are answered when what was staged for them is as durable as promised."""

from metaq.engine.turn import Short, Turns
from metaq.errors import MetaqError
from metaq.server.remoting.session import Answer, Kept, RemotingSession


class OwedAnswer:
    """The outcome of one request that stored something: it is answered when that is as durable as promised."""

    __slots__ = ("_answer", "_request", "_session", "size")

    def __init__(self, session: RemotingSession, request: Kept, answer: Answer, size: int) -> None:
        """Prepare the outcome; the session must owe the answer already."""
        self._session = session
        self._request = request
        self._answer = answer
        self.size = size

    def stored(self) -> None:
        self._session.pay(self._request, self._answer)

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._session.pay(self._request, Answer(error.code, remark=f"the message {outcome}: {error}"))

    def late(self, short: Short) -> None:
        self._session.pay(self._request, self._answer._replace(code=self._answer.code or short.code))


def owe(turns: Turns, session: RemotingSession, request: Kept, answer: Answer, size: int) -> None:
    """Send an owed answer when what was just staged for its request, ``size`` bytes, is as durable as promised."""
    turns.staged(OwedAnswer(session, request, answer, size))
    turns.waiting_bytes += size
