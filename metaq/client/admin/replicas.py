"""Administration: how the replicas of a broker stand, and which one is the master (docs/replication.md)."""

from metaq.client.admin.views import ReplicaView, read_replica
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import Question, ask, call, successful
from metaq.protocol.remoting.codes import Request, Response


class ReplicaAdmin:
    """Asks one replica at a time, by its address. Made by ``Admin.replicas``; threads may share it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def status(self, address: str) -> ReplicaView | None:
        """How a replica stands; ``None`` when the broker there takes no slaves (``replication_listen``)."""
        question = Question.of(Request.REPLICA_STATUS)
        response = call(self._core.transport, address, question, self._core.deadline())
        return None if response.code == Response.REQUEST_CODE_NOT_SUPPORTED else read_replica(successful(response).body)

    def promote(self, address: str, *, accept_loss: bool = False) -> None:
        """Make a slave the master; its role changes after the answer. Nobody checks that the old master is gone.

        ``Refused`` when the slave may lack messages that were acknowledged, unless the loss is accepted.
        """
        self._tell(address, Request.CHANGE_ROLE, role="master", **({"acceptLoss": "true"} if accept_loss else {}))

    def demote(self, address: str, master: str) -> None:
        """Make a replica the slave of the one whose ``replication`` is ``master``; its role changes after the answer."""
        self._tell(address, Request.CHANGE_ROLE, role="slave", master=master)

    def hand_over(self, address: str, replica: int) -> None:
        """Have the master at an address make another replica the master, without losing anything."""
        self._tell(address, Request.HAND_OVER, replica=str(replica))

    def _tell(self, address: str, code: Request, **fields: str) -> None:
        ask(self._core.transport, address, Question(code, fields), self._core.deadline())
