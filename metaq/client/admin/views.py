"""What administration shows, and how it is read from what brokers answer (specs: remoting protocol, section 3.3)."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from metaq.errors import BadRequest, ClientError
from metaq.message import MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import READ, WRITE
from metaq.protocol.remoting.undecided import Branch, BranchMessage, Half, Page, read_row
from metaq.protocol.subscription import EVERYTHING, ExpressionKind, Subscription, parse_subscription

T = TypeVar("T")


class BrokerView(NamedTuple):
    """One broker process."""

    cluster: str
    name: str
    broker_id: int
    """0 is the master."""
    address: str


class BrokerIdentity(NamedTuple):
    """Who answered at an address."""

    name: str
    """Empty for a registry of its own."""
    identity: str
    """Drawn at random when the process started."""


class QueueView(NamedTuple):
    """What there is of a topic in one partition."""

    queue: MessageQueue
    begin: int
    end: int
    updated_ms: int
    """When the last message was stored; 0 when there is none."""


class LagView(NamedTuple):
    """How far a group is behind in one partition."""

    queue: MessageQueue
    committed: int
    end: int
    consumed_ms: int
    """Store time of the last message that was consumed; 0 when it is not known."""

    @property
    def lag(self) -> int:
        return max(0, self.end - self.committed)


class MemberView(NamedTuple):
    """One client of a group."""

    client_id: str
    address: str
    language: str
    version: int


class GroupMembers(NamedTuple):
    """Who consumes in a group now, and what."""

    members: tuple[MemberView, ...]
    subscriptions: Mapping[str, str]
    """Expressions by topic, of the member that was heard last."""
    model: str
    consume_type: str
    kinds: Mapping[str, str]
    """``TAG`` or ``SQL92`` by topic: what those expressions are."""


class QueueWork(NamedTuple):
    """What a member does with one of its queues."""

    buffered: int
    """Messages that it has and has not consumed."""
    pulled_ms: int
    """When it asked for messages last, by its own clock."""
    consumed_ms: int
    """When it consumed one last; 0 when that is not known."""


class MemberWork(NamedTuple):
    """What a member says about itself."""

    subscriptions: Mapping[str, Subscription]
    """By topic, the group's retry topic among them."""
    queues: Mapping[MessageQueue, QueueWork]
    """Its own."""
    registries: str
    """Where it asks for routes, as it was told."""


class GroupView(NamedTuple):
    """How a broker treats a group."""

    name: str
    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queues: int = 1
    retry_max_times: int = 16


class TopicView(NamedTuple):
    """How a broker has a topic."""

    topic: str
    broker_name: str
    read_partitions: int
    write_partitions: int
    permission: int
    ordered: bool = False
    """Never true where a route tells about the topic: routes do not say it."""

    @property
    def permission_text(self) -> str:
        """As ``permission_text``."""
        return permission_text(self.permission)


def permission_text(permission: int) -> str:
    """``RW``, ``R-``, ``-W`` or ``--``."""
    return ("R" if permission & READ else "-") + ("W" if permission & WRITE else "-")


class BranchView(NamedTuple):
    """An undecided branch with its messages; brokers tell the first 1,000."""

    branch: Branch
    messages: tuple[BranchMessage, ...]
    problem: str | None
    """Why they cannot be read; then the branch cannot be committed."""


class SlaveView(NamedTuple):
    """A slave, as its master sees it."""

    replica: int
    address: str
    """Where its connection comes from."""
    text: str
    """Where clients of the text protocol reach it."""
    held_end: int
    lag_bytes: int
    lag_ms: int
    """Since it last held everything; −1: it never has."""
    in_sync: bool


class ReplicaView(NamedTuple):
    """How a replica of a broker stands."""

    role: str
    """``master`` or ``slave``."""
    replica: int
    epoch: int
    begin: int
    end: int
    durable_end: int
    readable_end: int
    """Log offset before which readers may see everything."""
    in_sync: tuple[int, ...]
    """Of a slave: as it heard last."""
    min_in_sync: int
    replication: str
    """Where slaves connect while it is master."""
    master: str
    """Of a slave: its master's ``replication``; empty while it follows nobody."""
    master_end: int
    """Where the master's log ends; of a slave: as it heard last."""
    problem: str | None
    """Why a slave follows nobody."""
    slaves: tuple[SlaveView, ...]
    suspect: str | None = None
    """Why its log may lack messages that were acknowledged."""


class OffsetChange(NamedTuple):
    """What resetting does to one partition."""

    queue: MessageQueue
    before: int | None
    """``None`` where the group has no offset."""
    after: int


def _reader(what: str) -> Callable[[Callable[[Any], T]], Callable[[bytes], T]]:
    """Make a function of a JSON value one of a body; what it stumbles over is ``ClientError``."""

    def decorate(read: Callable[[Any], T]) -> Callable[[bytes], T]:
        @wraps(read)
        def checked(body: bytes) -> T:
            try:
                return read(fastjson.decode(body))
            except (BadRequest, KeyError, TypeError, ValueError, AttributeError) as error:
                raise ClientError(f"a broker answered {body[:80]!r} where {what} are due: {error!r}") from error

        return checked

    return decorate


@_reader("statistics of a topic")
def read_queues(content: Any) -> list[QueueView]:
    """Body of 202."""
    rows = content["offsetTable"].items()
    return [QueueView(queue, row["minOffset"], row["maxOffset"], row["lastUpdateTimestamp"]) for queue, row in rows]


@_reader("statistics of a group")
def read_lags(content: Any) -> list[LagView]:
    """Body of 208."""
    rows = content["offsetTable"].items()
    return [LagView(queue, row["consumerOffset"], row["brokerOffset"], row["lastTimestamp"]) for queue, row in rows]


@_reader("connections of a group")
def read_members(content: Any) -> GroupMembers:
    """Body of 203 and 204."""
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
def read_groups(content: Any) -> list[GroupView]:
    """Body of 201."""
    return [
        GroupView(
            name,
            bool(row.get("consumeEnable", True)),
            bool(row.get("consumeBroadcastEnable", True)),
            row.get("retryQueueNums", 1),
            row.get("retryMaxTimes", 16),
        )
        for name, row in content["subscriptionGroupTable"].items()
    ]


@_reader("producers")
def read_producers(content: Any) -> dict[str, set[MemberView]]:
    """Body of 328."""
    return {
        group: {
            MemberView(row["clientId"], str(row["remoteIP"]).removeprefix("/"), str(row["language"]), row["version"])
            for row in rows
        }
        for group, rows in content["data"].items()
    }


@_reader("the state of a consumer")
def read_work(content: Any) -> MemberWork:
    """Body of 307."""
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
    """Body of 300."""
    return list(map(str, content["groupList"]))


@_reader("names and values")
def read_table(content: Any) -> dict[str, str]:
    """Body of 28."""
    return {str(name): str(value) for name, value in content["table"].items()}


@_reader("names and values")
def read_object(content: Any) -> dict[str, Any]:
    """Body of 307."""
    return dict(content)


@_reader("branches")
def read_branches(content: Any) -> Page[Branch]:
    """Body of 30010."""
    return Page([read_row(row, Branch) for row in content["rows"]], content["next"])


@_reader("transactional messages")
def read_halves(content: Any) -> Page[Half]:
    """Body of 30010."""
    return Page([read_row(row, Half) for row in content["rows"]], content["next"])


@_reader("a branch")
def read_branch(content: Any) -> BranchView:
    """Body of 30011."""
    messages = tuple(read_row(row, BranchMessage) for row in content["messages"])
    return BranchView(read_row(content["branch"], Branch), messages, content["problem"])


@_reader("a transactional message")
def read_half(content: Any) -> Half:
    """Body of 30011."""
    return read_row(content["half"], Half)


@_reader("the state of a replica")
def read_replica(content: Any) -> ReplicaView:
    """Body of 30020."""
    slaves = tuple(SlaveView(**{name: row[name] for name in SlaveView._fields}) for row in content["slaves"])
    known = {name: content[name] for name in ReplicaView._fields if name != "suspect" or name in content}
    return ReplicaView(**{**known, "in_sync": tuple(content["in_sync"]), "slaves": slaves})


def read_identity(fields: Mapping[str, str]) -> BrokerIdentity:
    """Fields of the answer to 30000."""
    return BrokerIdentity(fields.get("brokerName", ""), fields.get("identity", ""))


def read_lines(body: bytes) -> dict[str, str]:
    """Body of 26: a name, ``=`` and a value on each line."""
    lines = (line.partition("=") for line in body.decode(errors="replace").splitlines())
    return {name.strip(): value.strip() for name, separator, value in lines if separator}


def group_row(group: GroupView) -> dict[str, Any]:
    """Body of 200; what is not shown here stays as brokers have it by default."""
    return {
        "brokerId": 0,
        "consumeBroadcastEnable": group.consume_broadcast_enable,
        "consumeEnable": group.consume_enable,
        "consumeFromMinEnable": True,
        "groupName": group.name,
        "notifyConsumerIdsChangedEnable": True,
        "retryMaxTimes": group.retry_max_times,
        "retryQueueNums": group.retry_queues,
        "whichBrokerWhenConsumeSlowly": 1,
    }
