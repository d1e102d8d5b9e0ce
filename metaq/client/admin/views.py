"""The results of administration, and their decoding from brokers' answers (specs: remoting protocol, section 3.3)."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from metaq.errors import BadRequest, ClientError
from metaq.message import MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.adminbodies import LeaseProgress
from metaq.protocol.remoting.attributes import GROUP_ATTRIBUTES, Number
from metaq.protocol.remoting.codes import READ, WRITE
from metaq.protocol.remoting.timers import RecurringRow, TimerRow
from metaq.protocol.remoting.undecided import Branch, BranchMessage, HalfRow, Page, read_row
from metaq.protocol.subscription import EVERYTHING, ExpressionKind, Subscription, parse_subscription

T = TypeVar("T")


class BrokerView(NamedTuple):
    """One broker process."""

    cluster: str
    name: str
    broker_id: int
    """0 for the master."""
    address: str


class BrokerIdentity(NamedTuple):
    """The process that answered at an address."""

    name: str
    """The broker's name; empty for a standalone registry."""
    identity: str
    """A random value that the process chose when it started."""


class QueueView(NamedTuple):
    """The state of one queue of a topic."""

    queue: MessageQueue
    begin: int
    end: int
    updated_ms: int
    """The store time of the last message; 0 when there is none."""


class LagView(NamedTuple):
    """The lag of a group in one queue."""

    queue: MessageQueue
    committed: int
    end: int
    consumed_ms: int
    """The store time of the last message that was consumed; 0 when it is not known."""
    leased: LeaseProgress | None = None
    """What there is more to say when the group leases messages there."""

    @property
    def lag(self) -> int:
        """The number of messages behind the committed offset."""
        return max(0, self.end - self.committed) if self.leased is None else self.leased.lag


class MemberView(NamedTuple):
    """One client of a group."""

    client_id: str
    address: str
    language: str
    version: int


class GroupMembers(NamedTuple):
    """The members of a group, and their subscriptions."""

    members: tuple[MemberView, ...]
    subscriptions: Mapping[str, str]
    """The filter expressions by topic, from the member with the latest heartbeat."""
    model: str
    consume_type: str
    kinds: Mapping[str, str]
    """The kinds of those expressions by topic, ``TAG`` or ``SQL92``."""


class QueueWork(NamedTuple):
    """The state of one of a member's queues, as the member reports it."""

    buffered: int
    """The messages that it has fetched and not consumed yet."""
    pulled_ms: int
    """The time of its last pull, by its own clock."""
    consumed_ms: int
    """The time at which it last consumed a message; 0 when that is not known."""


class MemberWork(NamedTuple):
    """The state that a member reports."""

    subscriptions: Mapping[str, Subscription]
    """The member's subscriptions by topic, including the group's retry topic."""
    queues: Mapping[MessageQueue, QueueWork]
    """The queues that are assigned to it."""
    registries: str
    """The registries that it is configured with."""


class GroupView(NamedTuple):
    """The configuration of a group at a broker."""

    name: str
    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queues: int = 1
    retry_max_times: int = 16
    priority_factor: int = 100
    """Of 100 pops from a topic with priorities, the number that begin with the highest one."""
    max_in_flight: int = 20_000
    """Messages of one partition that may be leased at once."""
    max_open: int = 1_000_000
    """Messages of one partition that may be given and not finished."""
    max_invisible_ms: int = 43_200_000
    """The longest lease."""
    order: str = "none"
    """Which messages are given one after the other: ``none``, those of a ``partition`` or of a ``key``."""
    lease_acks: str = "appended"
    """When an ack is answered: when it is ``appended``, or ``safe`` as a put. With ``safe`` a lease is on all replicas in sync
    before its consumer has the message, at durability levels that rest on replicas."""
    lease_aged_out: str = "dead"
    """What becomes of an open message that retention deletes: ``dead`` letter or ``drop``."""

    def attributes(self) -> dict[str, str]:
        """Return the settings that brokers keep as attributes: texts by name."""
        return {name: str(getattr(self, group_field(name))) for name in GROUP_ATTRIBUTES}

    def with_attributes(self, values: Mapping[str, str]) -> "GroupView":
        """Return the same configuration with these attributes, which brokers know."""
        return self._replace(**_attribute_values(values))


def group_field(attribute: str) -> str:
    """Return the name that an attribute of groups has in ``GroupView``."""
    return attribute.replace(".", "_")


class TopicView(NamedTuple):
    """The configuration of a topic at a broker."""

    topic: str
    broker_name: str
    read_partitions: int
    write_partitions: int
    permission: int
    ordered: bool = False
    """Always false when the configuration comes from a route, because routes do not carry it."""
    priority: bool = False
    """Whether each partition is a level of priority; always false when the configuration comes from a route."""

    @property
    def permission_text(self) -> str:
        """The permission as text: ``RW``, ``R-``, ``-W`` or ``--``."""
        return permission_text(self.permission)


def permission_text(permission: int) -> str:
    """Return a permission as text: ``RW``, ``R-``, ``-W`` or ``--``."""
    return ("R" if permission & READ else "-") + ("W" if permission & WRITE else "-")


class BranchView(NamedTuple):
    """An undecided branch with its messages, of which brokers return the first 1,000."""

    branch: Branch
    messages: tuple[BranchMessage, ...]
    problem: str | None
    """The reason why the messages cannot be read, and so the branch cannot be committed; else ``None``."""


class SlaveView(NamedTuple):
    """A slave, as its master sees it."""

    replica: int
    address: str
    """The address that its connection comes from."""
    text: str
    """Its address for clients of the text protocol."""
    held_end: int
    lag_bytes: int
    lag_ms: int
    """The milliseconds since it last held the whole log; −1 when it never has."""
    in_sync: bool


class ReplicaView(NamedTuple):
    """The state of one replica of a broker."""

    role: str
    """``master`` or ``slave``."""
    replica: int
    epoch: int
    begin: int
    end: int
    durable_end: int
    readable_end: int
    """The log offset before which readers may see all messages."""
    in_sync: tuple[int, ...]
    """The numbers of the in-sync replicas; on a slave, as its master last reported them."""
    min_in_sync: int
    replication: str
    """The address to which slaves connect while it is master."""
    master: str
    """The ``replication`` of a slave's master; empty while it follows none."""
    master_end: int
    """The end of the master's log; on a slave, as its master last reported it."""
    problem: str | None
    """The reason why a slave follows no master."""
    slaves: tuple[SlaveView, ...]
    suspect: str | None = None
    """The reason why its log may lack acknowledged messages; ``None`` when it does not."""
    elects: bool = False
    """True where the replicas of its broker elect their master."""
    leads: bool = False
    """True for the elected master, also while its disk is too full for it to serve as one."""


class OffsetChange(NamedTuple):
    """The change of a group's offset in one queue by a reset."""

    queue: MessageQueue
    before: int | None
    """The offset before; ``None`` when the group has none."""
    after: int


def _reader(what: str) -> Callable[[Callable[[Any], T]], Callable[[bytes], T]]:
    """Turn a function of a JSON value into a function of a body, which raises ``ClientError`` when it cannot be read."""

    def decorate(read: Callable[[Any], T]) -> Callable[[bytes], T]:
        @wraps(read)
        def checked(body: bytes) -> T:
            try:
                return read(fastjson.decode(body))
            except (BadRequest, KeyError, TypeError, ValueError, AttributeError) as error:
                raise ClientError(f"a broker answered {body[:80]!r} instead of {what}: {error!r}") from error

        return checked

    return decorate


@_reader("statistics of a topic")
def read_queues(content: Any) -> list[QueueView]:
    """Decode the answer to a query of a topic's queues (202)."""
    rows = content["offsetTable"].items()
    return [QueueView(queue, row["minOffset"], row["maxOffset"], row["lastUpdateTimestamp"]) for queue, row in rows]


@_reader("statistics of a group")
def read_lags(content: Any) -> list[LagView]:
    """Decode the answer to a query of a group's lag (208)."""
    rows = content["offsetTable"].items()
    return [
        LagView(queue, row["consumerOffset"], row["brokerOffset"], row["lastTimestamp"], _leased(row)) for queue, row in rows
    ]


def _leased(row: Mapping[str, Any]) -> LeaseProgress | None:
    if "metaqLag" not in row:
        return None
    return LeaseProgress(row["pullOffset"], row["metaqLag"], row["metaqInFlight"], row["metaqDelayed"])


@_reader("connections of a group")
def read_members(content: Any) -> GroupMembers:
    """Decode the answer to a query of the consumers (203) or the producers (204) of a group."""
    members = (
        MemberView(row["clientId"], row["clientAddr"], str(row.get("language")), row.get("version", 0))
        for row in content["connectionSet"]
    )
    table = content.get("subscriptionTable") or {}
    subscriptions = {topic: str(row.get("subString", "")) for topic, row in table.items()}
    kinds = {topic: str(row.get("expressionType") or ExpressionKind.TAG) for topic, row in table.items()}
    return GroupMembers(
        tuple(members), subscriptions, str(content.get("messageModel", "")), str(content.get("consumeType", "")), kinds
    )


@_reader("groups")
def read_groups(content: Any) -> dict[str, tuple[GroupView, dict[str, Any]]]:
    """Decode the answer to a query of all groups (201). With each group is its row, as it has more than ``GroupView``."""
    return {
        name: (
            GroupView(
                name,
                bool(row.get("consumeEnable", True)),
                bool(row.get("consumeBroadcastEnable", True)),
                row.get("retryQueueNums", 1),
                row.get("retryMaxTimes", 16),
                **_attribute_values(row.get("attributes") or {}),
            ),
            dict(row),
        )
        for name, row in content["subscriptionGroupTable"].items()
    }


def _attribute_values(attributes: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a ``GroupView`` that brokers keep as attributes; those of other brokers are left out."""
    known = {name: value for name, value in attributes.items() if name in GROUP_ATTRIBUTES}
    return {
        group_field(name): int(value) if isinstance(GROUP_ATTRIBUTES[name], Number) else value for name, value in known.items()
    }


@_reader("producers")
def read_producers(content: Any) -> dict[str, set[MemberView]]:
    """Decode the answer to a query of all producers (328)."""
    return {
        group: {
            MemberView(row["clientId"], str(row["remoteIP"]).removeprefix("/"), str(row["language"]), row["version"])
            for row in rows
        }
        for group, rows in content["data"].items()
    }


@_reader("the state of a consumer")
def read_work(content: Any) -> MemberWork:
    """Decode the known parts of a consumer's state (307)."""
    subscriptions = {
        row["topic"]: parse_subscription(
            row["topic"],
            row.get("subString") or EVERYTHING,
            row.get("subVersion", 0),
            row.get("expressionType") or ExpressionKind.TAG,
        )
        for row in content.get("subscriptionSet") or ()
    }
    queues = {
        queue: QueueWork(row.get("cachedMsgCount", 0), row.get("lastPullTimestamp", 0), row.get("lastConsumeTimestamp", 0))
        for queue, row in (content.get("mqTable") or {}).items()
        if not row.get("droped")
    }
    return MemberWork(subscriptions, queues, str(content.get("properties", {}).get("PROP_NAMESERVER_ADDR", "")))


@_reader("names of groups")
def read_group_names(content: Any) -> list[str]:
    """Decode the answer to a query of the groups of a topic (300)."""
    return list(map(str, content["groupList"]))


@_reader("names and values")
def read_table(content: Any) -> dict[str, str]:
    """Decode the answer to a query of a broker's runtime statistics (28)."""
    return {str(name): str(value) for name, value in content["table"].items()}


@_reader("names and values")
def read_object(content: Any) -> dict[str, Any]:
    """Decode a consumer's state to a dictionary with RocketMQ's names (307)."""
    return dict(content)


@_reader("branches")
def read_branches(content: Any) -> Page[Branch]:
    """Decode a page of undecided branches (30010)."""
    return Page([read_row(row, Branch) for row in content["rows"]], content["next"])


@_reader("transactional messages")
def read_halves(content: Any) -> Page[HalfRow]:
    """Decode a page of undecided transactional messages (30010)."""
    return Page([read_row(row, HalfRow) for row in content["rows"]], content["next"])


@_reader("a branch")
def read_branch(content: Any) -> BranchView:
    """Decode one undecided branch with its messages (30011)."""
    messages = tuple(read_row(row, BranchMessage) for row in content["messages"])
    return BranchView(read_row(content["branch"], Branch), messages, content["problem"])


@_reader("a transactional message")
def read_half(content: Any) -> HalfRow:
    """Decode one undecided transactional message (30011)."""
    return read_row(content["half"], HalfRow)


@_reader("delayed messages")
def read_timers(content: Any) -> tuple[list[TimerRow], str | None]:
    """Decode a page of delayed messages (30050)."""
    return [TimerRow(*(row[name] for name in TimerRow._fields)) for row in content["rows"]], content["next"]


@_reader("leases")
def read_leases(content: Any) -> tuple[list[dict[str, Any]], str | int | None]:
    """Decode a page of leases (30052, 30054 and 30055) to rows with their names."""
    return [dict(row) for row in content["rows"]], content["next"]


@_reader("recurring messages")
def read_recurring(content: Any) -> tuple[list[RecurringRow], str | None]:
    """Decode a page of recurring messages (30053)."""
    return [RecurringRow(*(row[name] for name in RecurringRow._fields)) for row in content["rows"]], content["next"]


@_reader("a time")
def read_due(content: Any) -> int:
    """Decode the answer to a definition of a recurring message (30053)."""
    return int(content["due_ms"])


@_reader("the state of a replica")
def read_replica(content: Any) -> ReplicaView:
    """Decode the answer to a query of a replica's state (30020)."""
    slaves = tuple(SlaveView(**{name: row[name] for name in SlaveView._fields}) for row in content["slaves"])
    known = {name: content[name] for name in ReplicaView._fields if name not in ReplicaView._field_defaults or name in content}
    return ReplicaView(**{**known, "in_sync": tuple(content["in_sync"]), "slaves": slaves})


def read_identity(fields: Mapping[str, str]) -> BrokerIdentity:
    """Decode the fields of the answer to a query of a process's identity (30000)."""
    return BrokerIdentity(fields.get("brokerName", ""), fields.get("identity", ""))


def read_lines(body: bytes) -> dict[str, str]:
    """Decode the answer to a query of a broker's settings (26): a name, ``=`` and a value on each line."""
    lines = (line.partition("=") for line in body.decode(errors="replace").splitlines())
    return {name.strip(): value.strip() for name, separator, value in lines if separator}


def group_row(group: GroupView, before: GroupView, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body that creates a group, or changes ``before``, whose ``row`` a broker has (200).

    What ``GroupView`` does not have stays as in the row; a new group gets the broker's defaults. Of attributes it has only
    those that differ: other brokers do not know all of them.
    """
    known = before.attributes()
    changes = {f"+{name}": value for name, value in group.attributes().items() if value != known[name]}
    own = {"attributes": changes} if changes else {}
    return {
        **{name: value for name, value in row.items() if name != "attributes"},
        **own,
        "consumeBroadcastEnable": group.consume_broadcast_enable,
        "consumeEnable": group.consume_enable,
        "groupName": group.name,
        "retryMaxTimes": group.retry_max_times,
        "retryQueueNums": group.retry_queues,
    }
