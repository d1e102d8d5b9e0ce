"""The entry point of the client library: ``connect``, and the client that it returns."""

import re
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack, overload

from metaq.address import REGISTRY_PORT, parse_address
from metaq.client import checks
from metaq.client.admin.admin import Admin
from metaq.client.connecting.access import Access, Tls
from metaq.client.connecting.core import Core, MakeTransport
from metaq.client.consuming.beginning import ConsumeFrom
from metaq.client.consuming.consumer import SimpleConsumer
from metaq.client.consuming.offsets import OFFSETS_FOLDER
from metaq.client.consuming.pull import DEFAULT_GROUP as PULL_GROUP
from metaq.client.consuming.pull import PullConsumer
from metaq.client.consuming.push import DEFAULT_THREADS, BatchListener, Listener, PushConsumer
from metaq.client.consuming.sendback import MAX_RECONSUME_TIMES
from metaq.client.consuming.sharing import Model
from metaq.client.keywords import suggests_options
from metaq.client.leasing.consumer import DEFAULT_BATCH, DEFAULT_INVISIBLE_S, DEFAULT_WAIT_S, LeaseConsumer, lease_consumer
from metaq.client.retries import Retry
from metaq.client.sending.cancelling import cancel
from metaq.client.sending.producer import BATCH_BYTES, DEFAULT_GROUP, Producer, ProducerOptions
from metaq.client.sending.replies import Replies
from metaq.client.serializers import Serializer
from metaq.client.transactions.branchplaces import Routed
from metaq.client.transactions.transactions import Check, Checks, Execute, TransactionProducer
from metaq.client.transactions.xasession import DEFAULT_BRANCH_TIMEOUT_S, XaSession
from metaq.client.url import read_url
from metaq.errors import BadRequest
from metaq.protocol.inflating import MAX_INFLATED_BYTES
from metaq.protocol.subscription import EVERYTHING
from metaq.registry.assign import Assign, average

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 10.0

in_process: Final[dict[str, MakeTransport]] = {}
"""Brokers in this process (``metaq.testing``) by their address."""


@suggests_options
def connect(
    address: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    instance: str = "",
    user: str = "",
    password: str = "",
    tls: Tls = False,
    max_inflated_bytes: int = MAX_INFLATED_BYTES,
) -> "Client":
    """Return a client of the brokers that are registered at ``address``. It opens connections only when they are needed.

    Args:
        address: one or more registries: ``host:port``, ``host:port;host2:port`` or ``metaq://host:port;host2:port/``; the
            default port is 9876. Or ZooKeeper, which knows the registries: ``zk://host:port,host2:port/``; the client connects
            to it at once, in the background. A URL may hold parameters, and user and password before the hosts:
            ``metaq://user:password@host/?timeout_s=3&tls=/etc/metaq/ca.pem``. In user and password
            write ``%2F`` for ``/``, ``%3F`` for ``?``, ``%23`` for ``#`` and ``%40`` for ``@``.
        timeout_s: the time limit of each call as a whole, unless the call has its own.
        instance: a name that makes this client's id unique on this machine, and by which a broadcast consumer finds its
            offsets again; by default a new one for each client.
        user: the user's name, when the brokers have users; each request is then signed.
        password: the user's secret.
        tls: ``True`` to use TLS with the certificates that this machine trusts, the name of a file (PEM) with others, or a
            context. In a URL ``tls=true`` or the name of the file.
        max_inflated_bytes: the largest body that a compressed message may have once inflated; a larger one is returned as it is
            stored, with an ``error``. By default 16 MiB, four times the largest message that brokers take.

    Raises:
        BadRequest: the address cannot be read.
        ConfigError: the package kazoo (the extra ``zookeeper``), which ZooKeeper needs, is not installed.
    """
    checks.text("address", address, "host:port of a registry, in one text")
    checks.seconds("timeout_s", timeout_s)
    checks.text("instance", instance)
    checks.secret("user", user)
    checks.secret("password", password)
    checks.number("max_inflated_bytes", max_inflated_bytes, 1)
    if address in in_process:
        make = in_process[address]
        core = Core(
            [address], timeout_s=timeout_s, instance=instance, make_transport=make, max_inflated_bytes=max_inflated_bytes
        )
        return Client(core)
    is_zookeeper = False
    if "://" in address:
        address, is_zookeeper, own_user, own_password, given = read_url(address)
        if own_user or own_password:
            user, password = own_user, own_password
        tls = {"true": True, "false": False}.get(given["tls"], given["tls"]) if "tls" in given else tls
        timeout_s = _seconds(given["timeout_s"]) if "timeout_s" in given else timeout_s
        instance = given.get("instance", instance)
    access = Access(user, password, tls)
    if is_zookeeper:
        return _through_zookeeper(address, timeout_s, instance, access, max_inflated_bytes)
    registries = _registries(address)
    return Client(
        Core(registries, timeout_s=timeout_s, instance=instance, access=access, max_inflated_bytes=max_inflated_bytes)
    )


def _through_zookeeper(hosts: str, timeout_s: float, instance: str, access: Access, max_inflated_bytes: int) -> "Client":
    from metaq.client.connecting.zookeeper import ZooKeeperRegistries  # noqa: PLC0415 - kazoo is an extra

    core = Core((), timeout_s=timeout_s, instance=instance, access=access, max_inflated_bytes=max_inflated_bytes)
    try:
        core.follow(lambda: ZooKeeperRegistries(hosts, core.routes.use))
    except BadRequest:
        core.close()
        raise
    return Client(core)


def _registries(address: str) -> list[str]:
    parts = filter(None, map(str.strip, re.split("[;,]", address)))
    found = [str(parse_address(part, default_port=REGISTRY_PORT)) for part in parts]
    if not found:
        raise BadRequest(f"{address!r} is not the address of a registry; write host:port")
    return found


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise BadRequest(f"timeout_s is {text!r}; write a number of seconds") from error


class Client:
    """A maker of producers, consumers and administration that share connections; made by ``connect``, a context manager.

    ::

        with metaq.connect("127.0.0.1:9876") as client:
            client.producer().send("orders", b"paid 2003", tag="paid")

    Threads may share it, its producers and its administration; consumers and XA sessions are for one thread at a time. Closing
    it closes its group consumers and its connections, so that nothing that it made works any more, except XA sessions.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._replies = Replies(core)
        self._checks = Checks(core)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The id by which brokers know the client: ``address@instance``."""
        return self._core.id

    def close(self) -> None:
        """Stop the consumers and save their offsets, unregister from the brokers, and close the connections."""
        self._checks.close()
        self._core.close()

    @overload
    def producer(self, group: str = ..., *, serializer: None = ..., **options: Unpack[ProducerOptions]) -> Producer: ...

    @overload
    def producer(self, group: str = ..., *, serializer: Serializer[T], **options: Unpack[ProducerOptions]) -> Producer[T]: ...

    @suggests_options
    def producer(
        self,
        group: str = DEFAULT_GROUP,
        *,
        linger_ms: int = 0,
        batch_bytes: int = BATCH_BYTES,
        serializer: Serializer[Any] | None = None,
        retry: Retry | None = None,
    ) -> Producer[Any]:
        """Return a producer.

        Args:
            group: its name only serves administration, and request and reply.
            linger_ms: how long a message of ``send_async`` may wait for others, to go with them as one batch; 0 for not at all.
                Messages that are delayed, or have a priority or a ``dedupe_id``, and those of 4 KiB and more go on their own.
            batch_bytes: the size from which on a batch goes at once; at most 4 MiB.
            serializer: makes the bodies of the values that are sent, and the values of replies; ``metaq.JSON``, or your own.
            retry: how often a message is sent again that a broker may have stored; by default twice, after 0.1 s and more.

        Raises:
            BadRequest: the group's name or a number is invalid.
            ClientClosed: the client was closed.
        """
        self._core.check_open()
        options: ProducerOptions = {"linger_ms": linger_ms, "batch_bytes": batch_bytes, "retry": retry}
        return Producer(self._core, self._replies, group, serializer=serializer, **options)

    def cancel(self, handle: str, *, timeout_s: float | None = None) -> None:
        """Cancel a delayed message. When this returns, it will not be delivered; to cancel it again does no harm.

        There are tries until the time is over while the broker cannot be reached, or cannot cancel yet.

        Args:
            handle: the ``handle`` in the result of the send. It stays good when brokers restart or are replaced.
            timeout_s: the time limit of the whole call; by default the client's.

        Raises:
            TooLate: the message was delivered before.
            UnknownHandle: no message is delayed under the handle.
            RouteNotFound: there is nowhere to cancel it; ``reason`` says why.
            Refused: the broker cannot cancel now, or the user may not send to the topic.
            ConnectionFailed: the broker cannot be reached.
            RequestTimeout: no answer in time; the message may be cancelled.
            BadRequest: the handle cannot be read.
        """
        deadline = self._core.deadline(timeout_s)
        checks.text("handle", handle, "the handle in the result of a delayed send")
        cancel(self._core, handle, deadline)

    @suggests_options
    def transaction_producer(self, group: str, execute: Execute, *, check: Check) -> TransactionProducer:
        """Return a producer of messages that are delivered if, and only if, a local transaction succeeds.

        Args:
            group: brokers may ask any producer of the group for the outcome of a transaction, so all of them must know it.
            execute: runs the local transaction for a message; ``send`` calls it with the message and its argument.
            check: finds out the outcome of a local transaction, perhaps of another process; called on a thread of the client.

        Raises:
            ClientError: this client already has a transaction producer of the group.
            BadRequest: the group's name is invalid.
            ClientClosed: the client was closed.
        """
        self._core.check_open()
        return TransactionProducer(self._core, self._checks, group, execute, check)

    @suggests_options
    def consumer(
        self,
        topic: str,
        group: str,
        *,
        tags: str = EVERYTHING,
        sql: str | None = None,
        model: Model = Model.CLUSTERING,
        consume_from: ConsumeFrom | datetime = ConsumeFrom.LAST,
        assign: Assign = average,
        auto_commit: bool = False,
        by_priority: bool = False,
        max_reconsume_times: int = MAX_RECONSUME_TIMES,
        offsets_folder: Path = OFFSETS_FOLDER,
        deserializer: Serializer[Any] | None = None,
    ) -> SimpleConsumer:
        """Return a consumer, a member of a group that is iterated over.

        Args:
            topic: the topic to consume; it need not exist yet. ``subscribe`` adds more.
            group: the group whose members share the messages; 1 to 120 letters, digits, and ``_ - % |``.
            tags: ``*``, or tags with ``||`` between them.
            sql: an SQL92 condition on properties, in place of tags.
            model: with ``BROADCASTING`` every member gets every message, and keeps its offsets in a file in ``offsets_folder``.
            consume_from: where the group begins when it has no offset yet.
            assign: the strategy that assigns queues to members; all members must use the same (``metaq.registry.assign``).
            auto_commit: mark a message as done when the next one is requested.
            by_priority: take what is fetched of greater partitions first, as in a topic with priorities; retries come last. A
                steady stream of urgent messages keeps the others waiting.
            max_reconsume_times: how often a message is delivered again before ``retry_later`` makes it a dead letter.
            offsets_folder: the folder in which a broadcast consumer keeps its offsets.
            deserializer: makes the ``value`` of each message; one whose body it does not take counts as failed.

        Raises:
            RouteNotFound: no registry answers.
            BadRequest: a name or an expression is invalid.
            ClientError: this client already has a consumer of the group, or the offsets cannot be used.
            ClientClosed: the client was closed.
        """
        self._core.check_open()
        return SimpleConsumer(
            self._core,
            topic,
            group,
            tags=tags,
            sql=sql,
            model=model,
            consume_from=consume_from,
            assign=assign,
            auto_commit=auto_commit,
            by_priority=by_priority,
            max_reconsume_times=max_reconsume_times,
            offsets_folder=offsets_folder,
            deserializer=deserializer,
        )

    @suggests_options
    def listen(
        self,
        topic: str,
        group: str,
        listener: Listener | BatchListener,
        *,
        tags: str = EVERYTHING,
        sql: str | None = None,
        ordered: bool = False,
        threads: int = DEFAULT_THREADS,
        batch_size: int | None = None,
        model: Model = Model.CLUSTERING,
        consume_from: ConsumeFrom | datetime = ConsumeFrom.LAST,
        assign: Assign = average,
        max_reconsume_times: int | None = None,
        offsets_folder: Path = OFFSETS_FOLDER,
        deserializer: Serializer[Any] | None = None,
        retry: Retry | None = None,
    ) -> PushConsumer:
        """Call ``listener`` for each message, until the consumer is closed.

        Args:
            topic: the topic to consume; it need not exist yet. ``subscribe`` adds more.
            group: the group whose members share the messages; 1 to 120 letters, digits, and ``_ - % |``.
            listener: returns when the message is consumed; raises to have it delivered again later.
            tags: ``*``, or tags with ``||`` between them.
            sql: an SQL92 condition on properties, in place of tags.
            ordered: consume the messages of a partition one after the other.
            threads: the number of threads that call the listener.
            batch_size: call the listener with a list of up to so many messages of a partition, those that are there; when it
                raises, each of them failed. By default it is called with one message.
            model: with ``BROADCASTING`` every member gets every message, keeps its offsets in a file, and only logs failures.
            consume_from: where the group begins when it has no offset yet.
            assign: the strategy that assigns queues to members; all members must use the same (``metaq.registry.assign``).
            max_reconsume_times: how often a failed message is delivered again before it becomes a dead letter; by default 16
                times, and without limit for an ordered consumer.
            offsets_folder: the folder in which a broadcast consumer keeps its offsets.
            deserializer: makes the ``value`` of each message; one whose body it does not take counts as failed.
            retry: instead of ``max_reconsume_times``, how often a failed message is delivered again, and after which pauses;
                they are rounded up to the delay levels of brokers, except for an ordered consumer.

        Returns:
            The consumer, which runs already.

        Raises:
            RouteNotFound: no registry answers.
            ClientError: this client already has a consumer of the group, the offsets cannot be used, or there are no threads.
            BadRequest: a name, an expression or a number is invalid.
            ClientClosed: the client was closed.
        """
        self._core.check_open()
        return PushConsumer(
            self._core,
            topic,
            group,
            listener,
            tags=tags,
            sql=sql,
            ordered=ordered,
            threads=threads,
            batch_size=batch_size,
            model=model,
            consume_from=consume_from,
            assign=assign,
            max_reconsume_times=max_reconsume_times,
            offsets_folder=offsets_folder,
            deserializer=deserializer,
            retry=retry,
        )

    @suggests_options
    def lease_consumer(
        self,
        topic: str,
        group: str,
        *,
        tags: str = EVERYTHING,
        sql: str | None = None,
        batch: int = DEFAULT_BATCH,
        invisible: timedelta | float = DEFAULT_INVISIBLE_S,
        wait: timedelta | float = DEFAULT_WAIT_S,
        from_first: bool = False,
        keep: bool = False,
        deserializer: Serializer[Any] | None = None,
    ) -> LeaseConsumer:
        """Return a consumer that leases messages: each comes again, to any member of the group, unless it is acked in time.

        Members of the group share the messages one by one, however many partitions there are. All of them lease.

        Args:
            topic: the topic to consume; it need not exist yet.
            group: the group whose members share the messages; 1 to 120 letters, digits, and ``_ - % |``.
            tags: ``*``, or tags with ``||`` between them.
            sql: an SQL92 condition on properties, in place of tags.
            batch: the most messages that come at once from each broker, 1 to 32; they wait in the consumer for their turns.
            invisible: how long a message is leased, a ``timedelta`` or seconds, from 1 s to the group's ``max_invisible_ms``.
            wait: how long a broker may hold a request for messages.
            from_first: begin with the first message of the topic if the group is new, not with those that come from now on; in
                a topic that is young, brokers always begin with the first.
            keep: extend the leases of returned messages, too, until they are settled, or the program drops them.
            deserializer: makes the ``value`` of each message; one whose body it does not take counts as failed.

        Raises:
            RouteNotFound: no registry answers.
            ClientError: this client already has a consumer of the group.
            BadRequest: a name, an expression or a number is invalid.
            ClientClosed: the client was closed.
        """
        self._core.check_open()
        return lease_consumer(
            self._core,
            topic,
            group,
            tags=tags,
            sql=sql,
            batch=batch,
            invisible=invisible,
            wait=wait,
            from_first=from_first,
            keep=keep,
            deserializer=deserializer,
        )

    @suggests_options
    def pull_consumer(
        self,
        topic: str,
        group: str = PULL_GROUP,
        *,
        tags: str = EVERYTHING,
        sql: str | None = None,
        by_priority: bool = False,
        deserializer: Serializer[Any] | None = None,
    ) -> PullConsumer:
        """Return a consumer that reads chosen queues from chosen offsets. The group is only used for offsets it commits.

        Args:
            topic: the topic to read.
            group: the group for which it commits offsets.
            tags: ``*``, or tags with ``||`` between them.
            sql: an SQL92 condition on properties, in place of tags.
            by_priority: take what is fetched of greater partitions first, as in a topic with priorities.
            deserializer: makes the ``value`` of each message; one whose body it does not take has an ``error``.

        Raises:
            BadRequest: a name or an expression is invalid.
            ClientClosed: the client was closed.
        """
        self._core.check_open()
        return PullConsumer(self._core, topic, group, tags=tags, sql=sql, by_priority=by_priority, deserializer=deserializer)

    @suggests_options
    def xa_session(
        self,
        *topics: str,
        qualifier: str = "",
        branch_timeout_s: int = DEFAULT_BRANCH_TIMEOUT_S,
        timeout_s: float | None = None,
    ) -> XaSession:
        """Return a session that sends messages in XA branches; each goes to a broker that takes messages for all ``topics``.

        Close the session separately: closing the client does not close it.

        Args:
            *topics: the topics that its branches use.
            qualifier: the name of the branches that ``tpc_recover`` lists; by default the names of program and host.
            branch_timeout_s: the most seconds from begin to prepare; the broker may allow less. 0 means no limit.
            timeout_s: the time limit of each connection and each answer; by default the client's.

        Raises:
            BadRequest: an argument is invalid.
            ClientClosed: the client was closed.
        """
        self._core.check_open()
        for topic in topics:
            checks.topic(topic)
        limit = self._core.timeout_s if timeout_s is None else timeout_s
        brokers = Routed(self._core, topics)
        access = self._core.access
        return XaSession(brokers, qualifier=qualifier, branch_timeout_s=branch_timeout_s, timeout_s=limit, access=access)

    def admin(self) -> Admin:
        """Return the administration of topics, groups, offsets and brokers, which also finds messages.

        Raises:
            ClientClosed: the client was closed.
        """
        self._core.check_open()
        return Admin(self._core)
