"""The identity of the process at an address: request 30000."""

import secrets

from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler


class IdentityHandler:
    """Answers with an identity that distinguishes this process from all others, whatever their names."""

    def __init__(self, broker_name: str) -> None:
        """Draw a random identity. A registry without a broker has an empty name."""
        self.broker_name = broker_name
        self.identity = secrets.token_hex(16)
        """Drawn at random when the process starts."""

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {Request.IDENTITY: self.answer}

    def answer(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the broker's name and this process's identity (30000)."""
        return Answer(fields={"brokerName": self.broker_name, "identity": self.identity})
