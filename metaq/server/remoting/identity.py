"""Who answers at an address: 30000."""

import secrets

from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler


class IdentityHandler:
    """Tells this process from every other one, whatever names they have."""

    def __init__(self, broker_name: str) -> None:
        """A registry without a broker has no name."""
        self.broker_name = broker_name
        self.identity = secrets.token_hex(16)
        """Drawn at random when the process starts."""

    def requests(self) -> dict[int, RequestHandler]:
        """Code → method."""
        return {Request.IDENTITY: self.answer}

    def answer(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """30000."""
        return Answer(fields={"brokerName": self.broker_name, "identity": self.identity})
