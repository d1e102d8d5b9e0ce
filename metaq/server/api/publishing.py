"""Publishes that have a short way: a message of a user and a topic that are known, staged in the turn as a send is.

What a message may be, and what is answered, is said by the services. Here is only what a publish can do without: a greenlet,
Falcon, and a session inside of the process. It is compiled, so it gets what needs msgspec (``PublishForms``).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from typing import Any, Final, NamedTuple

from metaq.engine.context import Context
from metaq.engine.turn import Short, Turns
from metaq.errors import MetaqError
from metaq.protocol.ids import offset_id_of
from metaq.protocol.remoting.codes import JSON, VERSION, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.requests import Received
from metaq.server.access.permissions import Principal
from metaq.server.endpoint import Endpoint
from metaq.server.http.session import HttpSession, Take
from metaq.server.remoting.sending.outcome import SENT_BYTES, Sent
from metaq.server.services.outgoing import ROTATION, outgoing
from metaq.server.wire.session import Session

ROW_HEADERS: Final = {"content-type": "application/json", "cache-control": "no-store"}
"""Those of the answer to an operation that was done, without those of its length and date."""
_OK: Final = "200 OK"
_UNTOLD: Final = "is stored, but its row cannot be made"
_SEND: Final = int(Request.SEND_MESSAGE_V2)
_SUCCESS: Final = int(Response.SUCCESS)


class PublishForms(NamedTuple):
    """The forms of a publish: how it is read, and how it is answered."""

    read: Callable[[bytes], Any]
    """Returns the ``MessageInput`` in a body, or raises ``MetaqError``."""
    row: Callable[[str, str, int, str, int, int, str | None], bytes]
    """Returns the row of a stored message; it takes what ``metaq.server.services.sending.published`` takes."""
    problem: Callable[[MetaqError, str, Principal], tuple[str, Mapping[str, str], bytes]]
    """Returns status, headers and content of a refusal: its error, what became of the message, and to whom it is told."""


class Publishing:
    """Makes the short ways of publishes."""

    def __init__(
        self,
        context: Context,
        endpoint: Endpoint,
        turns: Turns,
        sends: Callable[[Session, Sequence[Received], int], int],
        forms: PublishForms,
        is_stopped: Callable[[], bool],
    ) -> None:
        """Prepare. ``sends`` is that of ``SendHandler``; ``is_stopped`` returns true when no more requests are taken."""
        self.context = context
        self.authentication = endpoint.authentication
        self.turns = turns
        self.sends = sends
        self.forms = forms
        self.is_stopped = is_stopped

    def short_way(self, principal: Principal, version: int, topic: str) -> Take:
        """Return what takes the publishes to a topic of a user who was found out by a version of the users."""
        return ShortPublish(self, principal, version, topic).take


class ShortPublish:
    """The publishes that have one head, until the users are read again."""

    def __init__(self, publishing: Publishing, principal: Principal, version: int, topic: str) -> None:
        self._publishing = publishing
        self._principal = principal
        self._version = version
        self._topic = topic

    def take(self, session: HttpSession, body: bytes) -> bool:
        """Stage the message of a request, whose answer is owed from then on; or do nothing, and return false."""
        own, principal, turns, topic = self._publishing, self._principal, self._publishing.turns, self._topic
        turn = ROTATION.turn(topic)
        if self._version != own.authentication.version or own.is_stopped():
            return False
        session.principal = principal
        outcome = session.outcome
        if outcome is None or not outcome.is_of(own, principal, turns.number):
            session.outcome = outcome = PublishOutcome(session, turns.number, own, principal)  # it takes what is sent
        try:
            ident, fields, data = outgoing(own.context, topic, own.forms.read(body))
            request = RemotingCommand(_SEND, 0, 0, fields, data, None, "HTTP", VERSION, JSON)
            taken = own.sends(session, (request,), 0)
        except MetaqError:
            taken = 0
        if not taken:  # the long way says why, if there is a reason
            ROTATION.go_back(topic, turn)
            return False
        if not outcome.made:
            turns.staged(outcome)
        outcome.made.append((ident, topic))
        return True


class PublishOutcome:
    """The answers to one connection's publishes of one user and turn. ``SendHandler.sends`` fills it like a ``SendOutcome``."""

    def __init__(self, session: HttpSession, turn: int, publishing: Publishing, principal: Principal) -> None:
        self._session = session
        self._publishing = publishing
        self._principal = principal
        self.turn = turn
        self.requests = 0
        self.sent: list[Sent] = []
        self.size = 0
        self.made: list[tuple[str, str]] = []
        """The ids and topics of the messages, in their order."""

    def is_of(self, publishing: Publishing, principal: Principal, turn: int) -> bool:
        """Return whether it has the answers to a user's publishes of a turn; the next broker counts its turns from 0 again."""
        return self.turn == turn and self._publishing is publishing and self._principal is principal

    def stored(self) -> None:
        self._say(_SUCCESS)

    def late(self, short: Short) -> None:
        self._say(int(short.code))

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._publishing.context.counters.refuse(error, self.requests)
        self._pay([self._problem(error, outcome)] * len(self.sent))

    def _say(self, code: int) -> None:
        host, row = self._publishing.context.store_host, self._publishing.forms.row
        answers: list[bytes] = []
        for (ident, topic), sent in zip(self.made, self.sent, strict=True):
            _, _, partition, offset, log_offset, _, more = sent
            recall = None if more is None else more[1]
            try:
                data = row(topic, ident, code, offset_id_of(host, log_offset), partition, offset, recall)
                answers.append(_answer(_OK, ROW_HEADERS, data))
            except MetaqError as error:  # not to be raised: the turn has other outcomes to tell
                answers.append(self._problem(error, _UNTOLD))
        self._pay(answers)

    def _problem(self, error: MetaqError, outcome: str) -> bytes:
        return _answer(*self._publishing.forms.problem(error, outcome, self._principal))

    def _pay(self, answers: list[bytes]) -> None:
        self._publishing.context.counters.put.add(self.requests, self.size)
        self._session.answer(len(answers), self.size + SENT_BYTES * len(answers), b"".join(answers))


def _answer(status: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return an answer as the long way writes it."""
    fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    date = _date(int(time.time()))
    return f"HTTP/1.1 {status}\r\n{fields}content-length: {len(body)}\r\nDate: {date}\r\n\r\n".encode("latin-1") + body


@lru_cache(maxsize=2)
def _date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)
