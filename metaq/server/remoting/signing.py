"""Sends whose senders are authenticated first."""

from collections.abc import Sequence

from metaq.errors import AccessDenied
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.access.authentication import Authentication
from metaq.server.remoting.session import RemotingSession, SendsHandler, failure


def signed(authentication: Authentication, sends: SendsHandler) -> SendsHandler:
    """Return a handler that authenticates the sender of each request before it calls ``sends``; without users, ``sends``
    itself."""
    if not authentication.has_users:
        return sends

    def identified(session: RemotingSession, requests: Sequence[RemotingCommand], at: int) -> int:
        request = requests[at]
        try:
            authentication.identify(session, request)
        except AccessDenied as error:
            session.respond(request, failure(error))
            return at + 1
        return at + sends(session, requests[at : at + 1], 0)

    return identified
