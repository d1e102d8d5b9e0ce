"""Administration: the state and the roles of a broker's replicas (docs/replication.md)."""

from metaq.client.admin.views import ReplicaView, read_replica
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest, ask, successful
from metaq.protocol.remoting.codes import Request, Response


class ReplicaAdmin:
    """The administration of single replicas, by their addresses; made by ``Admin.replicas``. Threads may share it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def status(self, address: str) -> ReplicaView | None:
        """Return the state of a replica; ``None`` when the broker there accepts no slaves (``replication_listen``).

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        request = RemotingRequest.of(Request.REPLICA_STATUS)
        response = self._core.transport.call(address, request, self._core.deadline())
        return None if response.code == Response.REQUEST_CODE_NOT_SUPPORTED else read_replica(successful(response).body)

    def promote(self, address: str, *, accept_loss: bool = False) -> None:
        """Make a slave the master; its role changes after the answer. There is no check that the old master is gone.

        Args:
            address: the broker's address, ``host:port``.
            accept_loss: promote it even when it is refused because it may lack acknowledged messages.

        Raises:
            Refused: ``accept_loss`` is not given, and it is suspect, or was not in sync where masters are elected. With fixed
                roles one that was not in sync is promoted.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        self._tell(address, Request.CHANGE_ROLE, role="master", **({"acceptLoss": "true"} if accept_loss else {}))

    def demote(self, address: str, master: str) -> None:
        """Make a replica the slave of the one whose ``replication`` is ``master``; its role changes after the answer.

        Args:
            address: the broker's address, ``host:port``.
            master: the ``replication`` address of its master.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        self._tell(address, Request.CHANGE_ROLE, role="slave", master=master)

    def hand_over(self, address: str, replica: int) -> None:
        """Have the master at an address hand its role over to another replica, without loss of messages.

        Args:
            address: the master's address.
            replica: the number of the replica that becomes master.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        self._tell(address, Request.HAND_OVER, replica=str(replica))

    def _tell(self, address: str, code: Request, **fields: str) -> None:
        ask(self._core.transport, address, RemotingRequest(code, fields), self._core.deadline())
