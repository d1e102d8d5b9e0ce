"""The core that all parts of one client share: identity, routes, connections and heartbeats."""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final, Protocol
from weakref import WeakSet

import orjson

from metaq.client import checks
from metaq.client.connecting.access import OPEN, Access
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.connecting.health import BrokerHealth
from metaq.client.connecting.identity import UniqueIds, client_id, own_address
from metaq.client.connecting.link import Links
from metaq.client.connecting.presence import level_of
from metaq.client.connecting.routing import Routes
from metaq.client.connecting.scheduler import Scheduler, Task
from metaq.client.connecting.transport import Asked, ClientAnswer, Greet, Outcome, RemotingRequest, Transport, ask
from metaq.errors import ClientClosed, ClientError, ConnectionFailed, MetaqError, ProtocolError, Refused, RequestTimeout
from metaq.protocol.inflating import MAX_INFLATED_BYTES
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import UnregisterClient

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 30.0
ROUTES_S: Final = 30.0
LOOK_S: Final = 0.5
"""The pause after a broker was found lost before routes are refreshed; one refresh then serves all that notice meanwhile."""
EXPIRY_S: Final = 0.5
CONTROL_TIMEOUT_S: Final = 3.0
"""The time limit of the client's own requests: heartbeats, members, offsets."""
LEAST_S: Final = 1.0
"""The time that each broker has at least for offsets, when connecting to others has taken it all."""

MakeTransport = Callable[[Asked, Greet], Transport]


class GroupMember(Protocol):
    """A consumer, as the rest of its client knows it."""

    group: str

    def _heartbeat_row(self) -> dict[str, Any]:
        """Return the member's entry in heartbeats."""
        ...

    def _rebalance(self) -> None:
        """Find out again which queues are assigned to this member."""
        ...

    def _asked(self, request: RemotingCommand) -> ClientAnswer:
        """Answer a broker's request: reset offsets (220), report offsets (221) or state (307), or consume a message (309).

        It may block.
        """
        ...

    def close(self) -> None: ...


class ClientPart(Protocol):
    """A part that is closed with its client: a holder of messages that wait to be sent, or a reader of queues."""

    def close(self) -> None:
        """Send what waits, if anything, and return when the outcome is known. It may be called again."""
        ...


class Guide(Protocol):
    """A watcher that keeps the list of registries up to date."""

    def start(self) -> None: ...

    def close(self) -> None: ...


class Core:
    """The shared state of one client, as long-lived as the client. Several threads may use everything in it."""

    def __init__(
        self,
        registries: Sequence[str],
        *,
        timeout_s: float,
        instance: str = "",
        make_transport: MakeTransport | None = None,
        access: Access = OPEN,
        max_inflated_bytes: int = MAX_INFLATED_BYTES,
    ) -> None:
        self._address = own_address()
        self.id = client_id(self._address, instance)
        self.instance = instance
        self.timeout_s = timeout_s
        self.access = access
        self.max_inflated_bytes = max_inflated_bytes
        self.unique_ids = UniqueIds(self._address)
        self.health = BrokerHealth()
        self.scheduler = Scheduler(f"metaq-{self.id}")
        self._regular: list[tuple[float, Task]] = []
        """The periodic tasks, with their periods in seconds."""
        self.transport = self._links() if make_transport is None else make_transport(self._asked, self._greeting)
        self.routes = Routes(registries, self.transport)
        self.on_reply: Callable[[RemotingCommand], ClientAnswer] | None = None
        """The handler of replies to requests, code 326."""
        self.on_check: Callable[[str, RemotingCommand], None] | None = None
        """The handler of transaction checks, code 39; it takes the broker's address and the request."""
        self._make_guide: Callable[[], Guide] | None = None
        self._guide: Guide | None = None
        self._guard = threading.Lock()  # guards what follows
        self._producers: dict[str, int] = {}
        self._consumers: dict[str, GroupMember] = {}
        self._ending: set[GroupMember] = set()
        """The consumers that have left their groups, and still wait for their handlers."""
        self._parts: WeakSet[ClientPart] = WeakSet()
        self._looking = False
        self._awake = False
        self.is_closing = False
        """True from the beginning of ``close``, while its consumers may still use the client for what they have begun."""
        self.closed = False
        self._regular += [(HEARTBEAT_S, self.heartbeat), (ROUTES_S, self._refresh_routes)]
        renewed_in_children(self)

    def _links(self) -> Links:
        links = Links(self._asked, self._greeting, self.access, name_of=self._name_at)
        self._regular.append((EXPIRY_S, links.expire))
        return links

    def _renew(self) -> None:
        """Become another client in a child of a fork: with the same producers, without consumers, and idle until it is used."""
        self.id = client_id(self._address, f"{self.instance}#{os.getpid()}" if self.instance else "")
        self._guard = threading.Lock()
        self._consumers = {}
        self._ending = set()
        self._looking = self._awake = False
        self.is_closing = self.closed
        self._guide = None
        self.unique_ids.renew()
        self.scheduler.renew(f"metaq-{self.id}")
        self.transport.renew()
        self.routes.renew()

    def _wake(self) -> None:
        """Start the periodic tasks on first use; a client that is never used has no threads."""
        with self._guard:
            if self._awake:
                return
            self._awake = True
            regular = list(self._regular)
        for seconds, task in regular:
            self.scheduler.every(seconds, task)
        if self._make_guide is not None and self._guide is None:
            self.follow(self._make_guide)

    def regularly(self, seconds: float, task: Task) -> None:
        """Run a task periodically, ``seconds`` after each run has ended, in this process and in its forked children."""
        with self._guard:
            self._regular.append((seconds, task))
            is_awake = self._awake
        if is_awake:
            self.scheduler.every(seconds, task)

    def follow(self, make_guide: Callable[[], Guide]) -> None:
        """Start a watcher of the registries, which runs until this is closed. Each forked child makes one of its own."""
        self._make_guide = make_guide
        self._guide = make_guide()
        self._guide.start()

    def deadline(self, timeout_s: float | None = None) -> float:
        """Return the reading of ``time.monotonic`` at which a call times out, by default after the client's ``timeout_s``.

        ``ClientClosed`` when the client is closed, ``BadRequest`` for a time that is not a number of seconds.
        """
        self.check_open()
        if timeout_s is None:
            timeout_s = self.timeout_s
        else:
            checks.seconds("timeout_s", timeout_s)
        return time.monotonic() + timeout_s

    def check_open(self) -> None:
        if self.closed:
            raise ClientClosed("this client was closed")
        if not self._awake:
            self._wake()

    def ask_broker(self, broker_name: str, request: RemotingRequest, deadline: float) -> RemotingCommand:
        """Ask a master, and wait for success, as ``ask`` does; ``ConnectionFailed`` also when no route names a master."""
        try:
            return ask(self.transport, self.master(broker_name), request, deadline)
        except (ConnectionFailed, Refused) as error:
            if not isinstance(error, Refused) or error.code == Response.SERVICE_NOT_AVAILABLE:  # it is no longer master
                self.look_for_masters()
            raise

    def master(self, broker_name: str) -> str:
        """Return the address of a broker's master; ``ConnectionFailed`` when no route names one."""
        address = self.routes.address(broker_name)
        if address is None:
            raise ConnectionFailed(f"no route names a master of {broker_name}")
        return address

    def call_any(
        self, broker_name: str, request: RemotingRequest, deadline: float, *, shares_time: bool = False
    ) -> RemotingCommand:
        """Ask a master, or one of its slaves while the master cannot be reached, and return the answer, whatever its code.

        For requests that every replica can answer. With ``shares_time`` each has its share of the time, and a slave is asked
        also while its master is only slow; not for what a slave may learn too late, such as offsets. A slave has ``LEAST_S`` in
        any case. ``ConnectionFailed`` when no replica can be reached, ``RequestTimeout``.
        """
        failure: ClientError = ConnectionFailed(f"no route names broker {broker_name}")
        addresses = list(self.routes.replicas(broker_name).values())
        for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            now = time.monotonic()
            try:
                return self.transport.call(address, request, now + (deadline - now) / left if shares_time else deadline)
            except (ConnectionFailed, RequestTimeout) as error:
                self.look_for_masters()
                if isinstance(error, RequestTimeout) and not shares_time:
                    raise
                failure = error
                deadline = max(deadline, time.monotonic() + LEAST_S)  # to find that a host has vanished may take all of it
        raise failure

    def look_for_masters(self) -> None:
        """Refresh all routes soon, because a broker is lost or no longer master; calls until then share one refresh."""
        with self._guard:
            if self._looking:
                return
            self._looking = True
        self.scheduler.after(LOOK_S, self._look)

    def _look(self) -> None:
        with self._guard:
            self._looking = False
        self._refresh_routes()

    # -- members ------------------------------------------------------------------------------------------------------

    def add_producer(self, group: str) -> None:
        """Name a producer group in heartbeats from now on."""
        with self._guard:
            self._producers[group] = self._producers.get(group, 0) + 1
            is_new = self._producers[group] == 1
        if is_new:
            self.scheduler.run(self.heartbeat)

    def remove_producer(self, group: str) -> None:
        with self._guard:
            self._producers[group] -= 1
            is_last = not self._producers[group]
            if is_last:
                del self._producers[group]
        if is_last:
            self._unregister(UnregisterClient(self.id, producer_group=group))

    def add_part(self, part: ClientPart) -> None:
        """Close a part before the connections are closed, unless nobody uses it any more; ``ClientClosed`` when it is late."""
        with self._guard:
            if self.closed:
                raise ClientClosed("this client was closed")
            self._parts.add(part)

    def add_consumer(self, member: GroupMember) -> None:
        """Name a consumer in heartbeats from now on, and pass requests of brokers about its group to it.

        ``ClientError`` when this client already has a consumer of the group, ``ClientClosed`` when it is being closed.
        """
        with self._guard:
            if self.is_closing:
                raise ClientClosed("this client was closed")
            if member.group in self._consumers:
                raise ClientError(f"this client already has a consumer of group {member.group}; use it, or another client")
            self._consumers[member.group] = member

    def remove_consumer(self, member: GroupMember, end: Task = lambda: None) -> None:
        """Have a consumer leave its group; ``end`` then completes its close, for which the close of this client waits, too."""
        with self._guard:
            if self._consumers.get(member.group) is not member:
                return
            del self._consumers[member.group]
            self._ending.add(member)
        try:
            self._unregister(UnregisterClient(self.id, consumer_group=member.group))
        finally:
            try:
                end()
            finally:
                with self._guard:
                    self._ending.discard(member)

    def _unregister(self, header: UnregisterClient) -> None:
        """Unregister at all brokers, unless the client is unused. A broker that cannot be reached misses the heartbeats."""
        if not self._awake:
            return
        request = RemotingRequest.of(Request.UNREGISTER_CLIENT, header)
        for address in self.routes.broker_addresses(masters_only=False):
            try:
                ask(self.transport, address, request, time.monotonic() + CONTROL_TIMEOUT_S)
            except ClientError as error:
                logger.info("not unregistered address=%s reason=%s", address, error)

    def _members(self) -> list[GroupMember]:
        with self._guard:
            return list(self._consumers.values())

    # -- heartbeats ---------------------------------------------------------------------------------------------------

    def heartbeat(self, *, wait_s: float = 0.0) -> None:
        """Send a heartbeat to all brokers, and wait up to ``wait_s`` for their answers. Failures are logged, not raised."""
        request = self._heartbeat()
        if request is None:
            return
        with self._guard:
            masters_only = not self._consumers
        addresses = self.routes.broker_addresses(masters_only=masters_only)
        left = threading.Semaphore(0)

        def done(address: str, outcome: Outcome) -> None:
            if isinstance(outcome, ClientError) or outcome.code != Response.SUCCESS:
                reason = outcome if isinstance(outcome, ClientError) else outcome.remark
                logger.log(level_of(reason), "heartbeat failed address=%s reason=%s", address, reason)
            left.release()

        for address in addresses:
            deadline = time.monotonic() + CONTROL_TIMEOUT_S  # one for each: to connect may take it all
            try:
                self.transport.submit(address, request, deadline, functools.partial(done, address))
            except ClientError as error:
                done(address, error)
        waits_until = time.monotonic() + wait_s
        for _ in addresses if wait_s else ():
            left.acquire(timeout=max(0.0, waits_until - time.monotonic()))

    def _heartbeat(self) -> RemotingRequest | None:
        with self._guard:
            producers = [{"groupName": group} for group in self._producers]
            members = list(self._consumers.values())
        consumers = [member._heartbeat_row() for member in members]
        if not producers and not consumers:
            return None
        body = {"clientID": self.id, "consumerDataSet": consumers, "producerDataSet": producers}
        return RemotingRequest.of(Request.HEART_BEAT, None, orjson.dumps(body))

    def _greeting(self, address: str) -> RemotingRequest | None:
        return self._heartbeat() if address in self.routes.broker_addresses(masters_only=False) else None

    def _name_at(self, address: str) -> str | None:
        return self.routes.name_at(address)

    def _refresh_routes(self) -> None:
        if self.routes.refresh_all(CONTROL_TIMEOUT_S):
            self.heartbeat()
            for member in self._members():
                member._rebalance()

    # -- what brokers ask ---------------------------------------------------------------------------------------------

    def _asked(self, address: str, request: RemotingCommand, answer: Callable[[ClientAnswer], None]) -> None:
        """Dispatch a broker's request. This thread reads a connection, so anything that takes time runs on the scheduler."""
        if request.code == Request.PUSH_REPLY_MESSAGE_TO_CLIENT and self.on_reply is not None:
            answer(self.on_reply(request))
            return
        if request.code == Request.CHECK_TRANSACTION_STATE and self.on_check is not None:
            self.on_check(address, request)
            return
        group = request.fields.get("consumerGroup") or request.fields.get("group", "")
        with self._guard:
            member = self._consumers.get(group)
        if request.code not in _FOR_MEMBERS:
            answer(
                ClientAnswer(Response.REQUEST_CODE_NOT_SUPPORTED, remark=f"this client does not know request {request.code}")
            )
        elif member is None:
            answer(ClientAnswer(Response.SYSTEM_ERROR, remark=f"no consumer of group {group} in client {self.id}"))
        elif request.code == Request.NOTIFY_CONSUMER_IDS_CHANGED:
            self.scheduler.run(member._rebalance)
        else:
            self.scheduler.run(lambda: answer(_answered(member, request)))

    def close(self) -> None:
        """Close the consumers first, because they still have offsets to save and their listeners may send; take no new ones.

        Then nothing new is begun: close the parts, which may have messages to send, unregister, and close the connections. When
        one of these steps is interrupted, as by Ctrl-C, do the others.
        """
        with self._guard:
            if self.is_closing:
                return
            self.is_closing = True
            members = [*self._consumers.values(), *self._ending]
        with ExitStack() as steps:  # the last one that is pushed is done first
            steps.callback(self._disconnect)
            steps.callback(self._close_parts)
            for member in reversed(members):
                steps.callback(member.close)

    def _close_parts(self) -> None:
        with self._guard:
            self.closed = True
            parts = list(self._parts)
        with ExitStack() as steps:
            for part in reversed(parts):
                steps.callback(part.close)

    def _disconnect(self) -> None:
        with ExitStack() as steps:
            if self._guide is not None:
                steps.callback(self._guide.close)
            steps.callback(self.transport.close)
            steps.callback(self.scheduler.close)
            with self._guard:
                producers = list(self._producers)
                self._producers.clear()
            for group in producers:
                self._unregister(UnregisterClient(self.id, producer_group=group))


_FOR_MEMBERS: Final = frozenset(
    {
        Request.NOTIFY_CONSUMER_IDS_CHANGED,
        Request.RESET_CONSUMER_CLIENT_OFFSET,
        Request.GET_CONSUMER_STATUS_FROM_CLIENT,
        Request.GET_CONSUMER_RUNNING_INFO,
        Request.CONSUME_MESSAGE_DIRECTLY,
    }
)


def _answered(member: GroupMember, request: RemotingCommand) -> ClientAnswer:
    try:
        return member._asked(request)
    except (MetaqError, ProtocolError) as error:
        return ClientAnswer(Response.SYSTEM_ERROR, remark=str(error))
