"""The status of a broker's replica, and operators' orders to it: requests 30020 to 30022.

Bodies are JSON::

    30020  →  {"role":"master","replica":1,"epoch":4,"begin":0,"end":90210,"durable_end":90210,"readable_end":90100,
               "in_sync":[1,2],"min_in_sync":2,"replication":"10.0.0.1:10912","master":"","master_end":0,"problem":null,
               "suspect":null,"elects":false,"leads":false,
               "slaves":[{"replica":2,"address":"10.0.0.2:41234","text":"10.0.0.2:8123","held_end":90210,"lag_bytes":0,
                          "lag_ms":0,"in_sync":true}]}
    30021  header role (master or slave), master (for a slave: HOST:PORT), acceptLoss (for a master: true)
    30022  header replica

``replication`` is the address for slaves. ``suspect`` is the reason why the log may lack acknowledged messages. On a slave,
``master_end`` and ``in_sync`` are what it last heard from its master. ``elects`` says whether the replicas elect their master.
``leads`` is true for the elected one, also while its disk is too full for it to be master.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from metaq.address import Address
from metaq.config import Settings
from metaq.errors import BadRequest
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.broker import Broker
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler
from metaq.server.replicas.roles import MasterRole, SlaveRole
from metaq.server.wire.listeners import reached_at


class Orders(Protocol):
    """The orders that an operator can give to a replica."""

    broker: Broker
    role: MasterRole | SlaveRole
    settings: Settings
    address: Address
    """The address for slaves."""

    @property
    def role_name(self) -> str: ...

    @property
    def suspicion(self) -> str | None:
        """The reason why acknowledged messages may be missing here, or ``None``."""
        ...

    @property
    def leads(self) -> bool: ...

    def promote(self, *, accept_loss: bool) -> None: ...

    def demote(self, master: str) -> None: ...

    def hand_over(self, replica: int) -> None: ...


class ReplicaHandler:
    """Handles operators' requests."""

    def __init__(self, orders: Orders, later: Later) -> None:
        self._orders = orders
        self._later = later

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.REPLICA_STATUS: self.status,
            Request.CHANGE_ROLE: self.change_role,
            Request.HAND_OVER: self.hand_over,
        }

    def status(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the status of this replica (30020)."""
        return Answer(body=(orjson.dumps(standing(self._orders)),))

    def change_role(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Make this replica master or slave (30021). The answer is sent before the role has changed."""
        self._later.run(session, request, lambda: self._change_role(request.fields))

    def _change_role(self, fields: Mapping[str, str]) -> Answer:
        role = fields.get("role")
        if role == "master":
            self._orders.promote(accept_loss=fields.get("acceptLoss") == "true")
        elif role == "slave":
            self._orders.demote(fields.get("master", ""))
        else:
            raise BadRequest(f"the role {role!r} is neither master nor slave")
        return Answer()

    def hand_over(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Hand the master role over to another replica (30022). The answer is sent once this replica is no longer master."""
        replica = request.fields.get("replica", "")
        if not replica.isdecimal():
            raise BadRequest(f"the replica {replica!r} is not a number")
        self._later.run(session, request, lambda: self._hand_over(int(replica)))

    def _hand_over(self, replica: int) -> Answer:
        self._orders.hand_over(replica)
        return Answer()


def standing(orders: Orders) -> dict[str, Any]:
    """Return the status of a replica, with its slaves or its master."""
    store, role, settings = orders.broker.store, orders.role, orders.settings
    common: dict[str, Any] = {
        "role": orders.role_name,
        "replica": settings.replica_number,
        "epoch": orders.broker.epochs.current.number,
        "begin": store.log.begin,
        "end": store.log.end,
        "durable_end": store.durable_end,
        "readable_end": role.readable_end,
        "min_in_sync": settings.min_in_sync,
        "suspect": orders.suspicion,
        "elects": settings.role == "elected",
        "leads": orders.leads,
        "replication": str(reached_at(orders.address, orders.broker.addresses.advertised)),
    }
    if isinstance(role, MasterRole):
        slaves = [slave._asdict() for slave in role.in_sync.standings()]
        members = sorted(role.in_sync.members)
        return {**common, "in_sync": members, "slaves": slaves, "master": "", "master_end": store.log.end, "problem": None}
    seen = role.seen
    heard = {"master": seen.address, "master_end": seen.log_end, "problem": seen.problem}
    return {**common, "in_sync": sorted(seen.in_sync), "slaves": [], **heard}
