"""Runs of requests whose senders are authenticated first."""

from collections.abc import Sequence

from metaq.errors import AccessDenied
from metaq.protocol.remoting.leases.plainacks import PlainAcks
from metaq.protocol.remoting.requests import Received
from metaq.protocol.remoting.sending.plain import PlainSend
from metaq.server.access.authentication import Authentication
from metaq.server.remoting.admission import Admission
from metaq.server.remoting.session import RemotingSession, RunHandler, failure


def signed(authentication: Authentication, needs: Admission, run: RunHandler) -> RunHandler:
    """Return a handler that authenticates the sender of each request before it calls ``run``; without users, ``run`` itself."""
    if not authentication.has_users:
        return run

    def identified(session: RemotingSession, requests: Sequence[Received], at: int) -> int:
        request = requests[at]
        if isinstance(request, PlainAcks):
            return at  # the sender of each is authenticated when it is handled by itself
        if isinstance(request, PlainSend):
            request = request.command()
        if len(request.body) > needs.most_bytes:
            return at  # checking its signature would read the whole body: it is refused before that
        try:
            authentication.identify(session, request)
        except AccessDenied as error:
            session.respond(request, failure(error))
            return at + 1
        return at + run(session, requests[at : at + 1], 0)

    return identified
