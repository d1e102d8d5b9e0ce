"""The delivery progress of delayed messages, for administrators: 45."""

from metaq.engine.schedule import Schedule
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler


class DelayHandler:
    """Handles requests about the schedule of delayed messages."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def requests(self) -> dict[int, RequestHandler]:
        return {Request.GET_ALL_DELAY_OFFSET: self.all_positions}

    def all_positions(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the position of each delay level that ever held a message (45)."""
        demand(session.principal, Action.INSPECT)
        return Answer(body=(fastjson.encode({"offsetTable": self._schedule.positions()}),))
